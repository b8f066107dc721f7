"""Evaluates a model on one part of the data: a pass without gradients, with its own carry."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from carrywave.data.batch import Batch
from carrywave.data.loader import Loader
from carrywave.data.order import Cursor, Order, SequenceOrder, StreamOrder, WindowOrder
from carrywave.data.sequences import View
from carrywave.errors import DataError
from carrywave.kernels import random
from carrywave.model.heads.ctc import Ctc
from carrywave.model.model import Model
from carrywave.model.modes import mode
from carrywave.model.opaque_model import OpaqueModel
from carrywave.model.stage import Stage
from carrywave.model.state import State
from carrywave.parallel.mesh import Mesh
from carrywave.spec.spec import Spec
from carrywave.step.checks.trial import SplitTrial
from carrywave.step.graphs.capture import Capture
from carrywave.step.passes import executor
from carrywave.step.passes.jobs import BatchOutcome, FlatCarry, Observer, flatten
from carrywave.tasks.kind import Part
from carrywave.tasks.metrics.errors import Metric, Row
from carrywave.tasks.task import Task

_Seen = tuple[BatchOutcome, list[tuple[Tensor, Tensor | None, Tensor, Tensor]]]


def order_for(spec: Spec, view: View, *, training: bool) -> Order:
    """The order in which a part is read: streams, random windows or length buckets; shuffled and with varying windows in training only."""
    if not spec.streams:
        return SequenceOrder(view.lengths, tokens=spec.tokens, seed=spec.train.seed, shuffle=training)
    if training and spec.random_windows:
        return WindowOrder(view.lengths, lanes=spec.lanes, steps=spec.steps, warm=spec.data.warmup, seed=spec.train.seed)
    lanes = spec.lanes
    if not training:
        # A small part may have fewer steps than there are lanes, and evaluation need not use as many lanes as training.
        lanes = max(1, min(spec.batch.eval_lanes or lanes, int(view.lengths.sum())))
    # A series is evaluated with its whole past, so it is not cut into lanes.
    cut = training or not spec.reads_series
    vary = spec.batch.vary and training
    return StreamOrder(view.lengths, lanes=lanes, steps=spec.steps, seed=spec.train.seed, vary=vary, cut=cut)


class Kept(NamedTuple):
    """What is kept from one evaluation of a model to the next."""

    stage: Stage | OpaqueModel | None = None  # None: made of the model
    capture: Capture | None = None  # CUDA graphs
    trial: SplitTrial | None = None  # what a user's modules were tried with


NOTHING_KEPT = Kept()


@dataclass
class Details:
    """What is wanted besides the metrics, and what was found of it."""

    by: tuple[str, ...] = ()  # metrics by something that `tasks.metrics.BY` lists, such as each series
    tops: tuple[int, ...] = ()  # how often the target is among so many of the likeliest, as in `metrics.for_task`
    rows: dict[str, list[Row]] = field(default_factory=dict)
    metric: Metric | None = None  # over all workers


def evaluate(
    model: Model | OpaqueModel,
    task: Task,
    part: Part,
    *,
    mesh: Mesh,
    kept: Kept = NOTHING_KEPT,
    tick: Callable[[int, int], None] | None = None,
    details: Details | None = None,
) -> dict[str, float]:
    """Mean loss over all real targets of a part, and the task's metrics: the same on every worker. `details` gets what it asks for."""
    device, details = mesh.device, details or Details()
    understood = model.has_output and (task.spec.task != "transcription" or is_ctc(model))
    scorer = _Scorer(task.meter(device, part, by_series="series" in details.by, tops=details.tops) if understood else None)
    watched = scorer.meter is not None
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, count, workers whose outputs do not fit the metric
    see = scorer.see if watched else None
    walk = passes(model, task.spec, part, mesh=mesh, kept=kept, observe=see, tick=tick)
    for _, outcome in walk:
        sums[:2] += torch.stack([outcome.loss_sum, outcome.count])
    sums[2] = float(watched and scorer.meter is None)
    return counted(task, part, mesh, sums, scorer.meter, details)


def no_targets(part: Part) -> DataError:
    """What to tell of a part in which there is nothing to score."""
    return DataError(f"{part.name} contains no targets: every label in it is ignored; add labels")


def counted(task: Task, part: Part, mesh: Mesh, sums: Tensor, meter: Metric | None, details: Details) -> dict[str, float]:
    """The figures of what all workers have summed: loss, targets and, in third place, workers whose outputs do not fit the metric."""
    loss_sum, count, *unfit = mesh.sum_(sums).tolist()
    if not count:
        raise no_targets(part)
    metrics: dict[str, float] = {}
    if meter is not None and not any(unfit):
        for tensor in meter.tensors().values():
            mesh.sum_(tensor)
        metrics, details.metric = meter.values(), meter
        details.rows.update({by: meter.rows(by) for by in details.by})
    loss = loss_sum / count
    return {"loss": loss} | task.derived(loss) | metrics | part.baseline


def is_ctc(model: Model | OpaqueModel) -> bool:
    """True if the outputs of a model are those that transcriptions are read from: a user's own head may mark ends otherwise."""
    return isinstance(model, Model) and isinstance(model.head, Ctc)


def passes(
    model: Model | OpaqueModel,
    spec: Spec,
    part: Part,
    *,
    mesh: Mesh,
    kept: Kept = NOTHING_KEPT,
    observe: Observer | None = None,
    tick: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[Batch, BatchOutcome]]:
    """One pass over a part without gradients, batch by batch, with the carry of streams kept.

    Each worker sees its own lanes, and only the sums of its own stage. Workers do not wait for each other between batches. On CUDA, batches
    of a recurring shape are captured and replayed; what is observed, and the outcome, are then valid until the next batch.
    """
    stage = kept.stage or (Stage(model, *mesh.unit_range(model.units)) if isinstance(model, Model) else model)
    order = order_for(spec, part.view, training=False)
    share = mesh.share(inputs=stage.has_encoder, targets=stage.has_head)
    loader = Loader(part.view, order, device=mesh.device, share=share)
    capture = kept.capture or Capture.of(mesh.device, mesh.plan, model, on_device=mesh.messages_on_device)
    forward = _Forward(stage, mesh, spec, uncut_time=model.reads_whole)
    trial = kept.trial or SplitTrial(model, stage, mesh, spec.train.precision)
    state: State | None = None
    total = order.num_steps(0)
    with mode(model, training=False):
        for batch in loader.batches(Cursor(0, 0)):
            trial.before([batch], [random.key(0)], training=False)
            if state is None or not spec.streams:
                state = stage.start(batch.lanes.shape[0], mesh.device).detach()
            # What a pooled head has accumulated is not among the tensors passed from one graph to the next.
            if capture is None or (state.acc is not None and spec.streams):
                outcome = forward.run(batch, state, observe)
            else:
                outcome = forward.recorded(capture, batch, state, observe)
            state = outcome.state
            yield batch, outcome
            if tick is not None:
                tick(batch.step + 1, total)


class _Forward:
    """The forward pass of a batch through this worker's stage."""

    def __init__(self, stage: Stage | OpaqueModel, mesh: Mesh, spec: Spec, *, uncut_time: bool) -> None:
        self.stage, self.mesh, self.spec, self.uncut_time = stage, mesh, spec, uncut_time

    def run(self, batch: Batch, state: State, observe: Observer | None) -> BatchOutcome:
        precision = self.spec.train.precision
        return executor.forward(self.stage, self.mesh, batch, state, uncut_time=self.uncut_time, precision=precision, observe=observe)

    def recorded(self, capture: Capture, batch: Batch, state: State, observe: Observer | None) -> BatchOutcome:
        """The same by graph replay. Observers run afterwards: their code is not ours to capture."""

        def forward(batches: Sequence[Batch], _: Sequence[Tensor], carries: FlatCarry) -> tuple[_Seen, FlatCarry]:
            [static_batch] = batches
            entered = (
                self.stage.start(static_batch.lanes.shape[0], self.mesh.device).detach()
                if carries is None
                else State(self.stage.carries(carries))
            )
            shown: list[tuple[Tensor, Tensor | None, Tensor, Tensor]] = []
            outcome = self.run(static_batch, entered, None if observe is None else lambda *seen: shown.append(seen))
            return (outcome, shown), None if carries is None else flatten(outcome.state)

        carries = flatten(state) if self.spec.streams else None
        (outcome, shown), left = capture("evaluation", forward, [batch], [], carries, under=(observe is not None,))
        if observe is not None:
            for seen in shown:
                observe(*seen)
        return outcome if left is None else replace(outcome, state=State(self.stage.carries(left)))


class _Scorer:
    """Passes the head's outputs to the task's metric. The user's own head may output something else; then there is only a loss."""

    def __init__(self, meter: Metric | None) -> None:
        self.meter = meter

    def see(self, out: Tensor, target: Tensor | None, sequence_B: Tensor, first_B: Tensor) -> None:
        """Add an output and its targets, with the sequence in each of its lanes, those of a micro-batch, and the step where it begins."""
        if self.meter is None or target is None:
            return
        if self.meter.fits(out, target):
            self.meter.update(out, target, sequence_B, first_B)
        else:
            self.meter = None
