"""Judging a model on one part of the data: a pass without gradients, with a carry of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from carrywave.data.batch import Batch
from carrywave.data.order import Cursor, Order, SequenceOrder, StreamOrder
from carrywave.data.stream import Loader
from carrywave.data.view import View
from carrywave.errors import DataError
from carrywave.model.model import Model
from carrywave.model.stage import Stage
from carrywave.model.whole import Whole
from carrywave.parallel import pipeline
from carrywave.parallel.mesh import Mesh
from carrywave.spec.spec import Spec
from carrywave.tasks.metrics import Metric
from carrywave.tasks.task import Part, Task


def order_for(spec: Spec, view: View, *, training: bool) -> Order:
    """The order in which a part is read: streams or buckets of sequences; shuffled and varied in training only."""
    if not spec.streams:
        return SequenceOrder(view.lengths, tokens=spec.tokens, seed=spec.train.seed, shuffle=training)
    lanes = spec.lanes
    if not training:
        # A small part may hold fewer steps than there are lanes; a part of its own may be cut as suits it.
        lanes = max(1, min(spec.batch.eval_lanes or lanes, int(view.lengths.sum())))
    # A series keeps its whole past when it is judged, so it is not cut into lanes.
    cut = training or spec.task != "forecasting"
    return StreamOrder(view.lengths, lanes=lanes, steps=spec.steps, seed=spec.train.seed, vary=spec.batch.vary and training, cut=cut)


def evaluate(
    model: Model | Whole,
    task: Task,
    part: Part,
    *,
    mesh: Mesh,
    stage: Stage | Whole | None = None,
    tick: Callable[[int, int], None] | None = None,
) -> dict[str, float]:
    """Mean loss over all real targets of a part, and the task's metrics: the same on every worker."""
    device = mesh.device
    judge = _Judge(task.meter(device) if model.has_output else None)
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, count, workers whose outputs the metric cannot judge
    observe = None if judge.meter is None else judge.see
    for _, outcome in passes(model, task.spec, part, mesh=mesh, stage=stage, observe=observe, tick=tick):
        sums[:2] += torch.stack([outcome.loss_sum, outcome.count])
    sums[2] = float(observe is not None and judge.meter is None)
    loss_sum, count, unfit = mesh.sum_(sums).tolist()
    if not count:
        raise DataError(f"{part.name} holds no target to judge by, every label in it is ignored; give it labels")
    metrics: dict[str, float] = {}
    if judge.meter is not None and not unfit:
        for tensor in judge.meter.tensors().values():
            mesh.sum_(tensor)
        metrics = judge.meter.values()
    loss = loss_sum / count
    return {"loss": loss} | task.derived(loss) | metrics | part.baseline


def passes(
    model: Model | Whole,
    spec: Spec,
    part: Part,
    *,
    mesh: Mesh,
    stage: Stage | Whole | None = None,
    observe: pipeline.Observer | None = None,
    tick: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[Batch, pipeline.Outcome]]:
    """One pass over a part without gradients, batch by batch, the carry of streams kept.

    Each worker sees its own lanes and, of the sums, those of its own stage. No worker waits for the others between batches.
    """
    stage = stage or (Stage(model, *mesh.span(model.units)) if isinstance(model, Model) else model)
    order = order_for(spec, part.view, training=False)
    share = mesh.share(inputs=stage.has_encoder, targets=stage.has_head)
    loader = Loader(part.view, order, device=mesh.device, share=share)
    was_training = model.training
    model.eval()
    state = None
    total = order.num_steps(0)
    try:
        for batch in loader.batches(Cursor(0, 0)):
            if state is None or not spec.streams:
                state = stage.start(batch.lanes.shape[0], mesh.device)
            program = pipeline.program_for(mesh.plan, [batch], backward=False, whole=model.reads_whole)
            with torch.no_grad():
                job = pipeline.Job(batch, state, precision=spec.train.precision, observe=observe)
                [outcome] = pipeline.run(stage, mesh.plan, program, [job], mesh.links, place=mesh.stage)
            state = outcome.state
            yield batch, outcome
            if tick is not None:
                tick(batch.step + 1, total)
    finally:
        model.train(was_training)


class _Judge:
    """Shows what the head puts out to the task's metric. A head of the user's own may put out something else: it has a loss alone."""

    def __init__(self, meter: Metric | None) -> None:
        self.meter = meter

    def see(self, out: Tensor, target: Tensor | None) -> None:
        if self.meter is None or target is None:
            return
        if self.meter.fits(out, target):
            self.meter.update(out, target)
        else:
            self.meter = None
