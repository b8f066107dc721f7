"""Notes to print before the first step, one line each: how the data was read, what the plan is, what may be a waste of time."""

from __future__ import annotations

from collections.abc import Iterator

from carrywave.data.order import Order, SequenceOrder
from carrywave.data.prepare import Prepared
from carrywave.model.model import Model
from carrywave.model.opaque_model import Whole
from carrywave.spec.spec import Spec
from carrywave.tasks.doubts import doubts
from carrywave.train.data_parts import DataParts


def _ours(model: Model | Whole) -> bool:
    return isinstance(model, Model) and type(model.head).__module__.startswith("carrywave.")


def noted(spec: Spec, order: Order, model: Model | Whole, planned: tuple[str, ...], prepared: Prepared, parts: DataParts) -> Iterator[str]:
    """Yield the notes."""
    if isinstance(order, SequenceOrder) and order.oversized:
        yield f"sequences longer than batch.tokens={spec.tokens}: {order.oversized}; each becomes a batch of its own"
    if spec.streams and isinstance(model, Whole):
        name = type(model.module).__name__
        yield f"{name} has no carry that the trainer can keep: each window of {spec.steps} steps starts fresh; use a cw.Model to keep one"
    labels = prepared.codec.labels
    if prepared.codec.label_kind == "whole number" and labels != tuple(map(str, range(len(labels)))) and not _ours(model):
        shown = ", ".join(labels[:5]) + (", …" if len(labels) > 5 else "")
        given = f"the labels {shown} are passed to your loss as 0 to {len(labels) - 1}, in this order"
        yield f"{given}; number them from 0 to keep them unchanged"
    yield from planned
    yield from prepared.notes
    for part in (parts.valid, parts.test):
        yield from () if part is None else part.notes
    yield from doubts(spec, prepared.codec, order, prepared.train, prepared.valid)
