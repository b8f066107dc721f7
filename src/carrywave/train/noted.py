"""All that is said before the first step, one line each: how the data was read, what the plan is, what may be a waste of time."""

from __future__ import annotations

from collections.abc import Iterator

from carrywave.data.order import Order, SequenceOrder
from carrywave.data.prepare import Prepared
from carrywave.model.model import Model
from carrywave.model.whole import Whole
from carrywave.spec.spec import Spec
from carrywave.tasks.doubts import doubts
from carrywave.train.loop import Parts


def noted(spec: Spec, order: Order, model: Model | Whole, planned: tuple[str, ...], prepared: Prepared, parts: Parts) -> Iterator[str]:
    """The lines."""
    if isinstance(order, SequenceOrder) and order.oversized:
        yield f"{order.oversized} sequences are longer than batch.tokens={spec.tokens}: each is a batch of its own"
    if spec.streams and isinstance(model, Whole):
        name = type(model.module).__name__
        yield f"a {name} keeps no carry that the trainer knows of: each window of {spec.steps} steps starts anew; in a cw.Model it goes on"
    yield from planned
    yield from prepared.notes
    for part in (parts.valid, parts.test):
        yield from () if part is None else part.notes
    yield from doubts(spec, prepared.codec, order, prepared.train, prepared.valid)
