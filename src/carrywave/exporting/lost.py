"""The loss of an exported model on a part of the data: what int8 costs, in the terms in which the run was judged."""

from __future__ import annotations

import math
from typing import Any

import torch

from carrywave.data.loader import Loader
from carrywave.data.order import Cursor
from carrywave.data.prepare import prepare
from carrywave.data.python_inputs import file_of, read_python
from carrywave.errors import DataError, option
from carrywave.exporting.portable import Portable, Runner
from carrywave.model.sample_weights import for_each_target
from carrywave.prediction.evaluation import order_for
from carrywave.prediction.saved_run import Saved
from carrywave.tasks.task import Part

MOST_TARGETS = 50_000  # of data that nobody asked for: enough to see what int8 costs, and with a large vocabulary a matter of a minute


def valid_part(saved: Saved, data: Any = None) -> Part:
    """The run's valid data, or else its test data; or the data given."""
    if data is not None:
        return saved.task.part(file_of(data, saved.spec) or "data", read_python(data, saved.task.codec, saved.spec))
    if saved.spec.data.train is None:
        raise DataError(
            f"{saved.run.path} was trained on data from Python, which is not stored in the run; pass a file with {option('data')}"
        )
    prepared = prepare(saved.spec, codec=saved.task.codec)
    for name, sequences in (("valid", prepared.valid), ("test", prepared.test)):
        if sequences is not None:
            return saved.task.part(name, sequences)
    raise DataError(f"{saved.run.path} was trained without valid or test data; pass a file with {option('data')}")


def mean_loss(portable: Portable, run: Runner, saved: Saved, part: Part, *, most: float = math.inf) -> float:
    """Mean loss over all real targets, with the carry of streams kept from window to window as in evaluation; `most`: no further batches
    after this many targets.
    """
    spec, head = saved.spec, portable.model.head
    loader = Loader(part.view, order_for(spec, part.view, training=False), device=torch.device("cpu"))
    total = count = 0.0
    state: list[torch.Tensor] | None = None
    for batch in loader.batches(Cursor(0, 0)):
        lanes = batch.lengths.shape[0]
        named = {**portable.step_of(batch.inputs, batch.history), "lengths": batch.lengths}
        begins = state is None or not spec.streams or state[0].shape[0] != lanes
        if portable.stateful:
            named |= {"fresh": (batch.fresh | begins)[:, None], "ready": (batch.lengths > 0)[:, None]}
        state = portable.blank(lanes) if begins else state
        fixed = [named[port.name].to(port.dtype) for port in portable.inputs if port.name in named]
        out, *after = run([*fixed, *(state or [])])
        state = list(after) if portable.stateful else None
        targets = batch.targets
        assert targets is not None
        weights = None if batch.weights is None else for_each_target(batch.weights, targets, pooled=portable.model.pooled)
        by_lane = portable.model.pooled and not portable.model.whole_head
        scored = head.score(out if by_lane else out.transpose(0, 1), targets, weights=weights)  # type: ignore[operator]
        total, count = total + float(scored[0]), count + float(scored[1])
        if count >= most:
            break
    if not count:
        raise DataError(f"{part.name} has no targets to measure a loss on; pass a file with {option('data')}")
    return total / count
