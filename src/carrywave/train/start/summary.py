"""Says what a run is before its first step: what is trained, how large it is, how the data is read and the work is split."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from carrywave.data.order import Cursor, Order, SequenceOrder
from carrywave.kernels.step_marks import CellNoise, StepMarks
from carrywave.model.heads.adaptive_softmax import AdaptiveSoftmax
from carrywave.model.model import Model
from carrywave.model.opaque_model import OpaqueModel
from carrywave.model.over_time.front import Front
from carrywave.parallel.mesh import Mesh
from carrywave.plan.plan import Plan
from carrywave.runs.watcher import size_text
from carrywave.spec.facts import DataFacts
from carrywave.spec.spec import Spec
from carrywave.spec.train_spec import TrainSpec
from carrywave.step.precision import HALVES, parameter_dtype
from carrywave.tasks.warnings import warnings_of
from carrywave.train.start.opening import Start
from carrywave.train.start.settling import Ready

OPTIMIZER_COPIES = {"sgd": 0, "adam": 2, "adamw": 2, "ntasgd": 1}  # tensors the size of the parameters


def announce(start: Start, ready: Ready, planned: tuple[Plan, Sequence[str]], model: Model | OpaqueModel, mesh: Mesh | None) -> None:
    """Show the summary of a run, and lines on what is odd or was chosen. Without a mesh, nothing is to be trained."""
    plan, reasons = planned
    lines = summarize(ready.spec, ready.data.facts, model, plan, ready.order, str(start.world.device))
    if mesh is not None and plan.workers > 1:
        lines += of_workers(mesh)
    start.asked.watch.begin("\n".join(lines))
    for line in noted(ready, model, reasons):
        start.asked.watch.say(line)


def summarize(spec: Spec, facts: DataFacts, model: Model | OpaqueModel, plan: Plan, order: Order, device: str) -> list[str]:
    """A few lines of plain text."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    per_epoch = order.num_steps(0)
    steps = -(-per_epoch // spec.train.accumulate)
    shown = replace(plan, chunk_steps=None) if model.reads_whole else plan
    names = backends(spec, model, plan, order, device)
    lines = [
        f"task      {spec.task}: {_data(facts)}",
        f"model     {_network(model, tied=spec.model.tie)}: {parameters:,} parameters",
        f"memory    {_memory(spec, parameters)}",
        f"batch     {'; '.join([_batch(spec, order), *_shares(spec, plan)])}",
        f"epoch     {_count(per_epoch, 'batch')}, {_count(steps, 'optimizer step')}; {_count(spec.train.epochs, 'epoch')}",
        f"plan      {_plan(shown)}; {device}, {spec.train.precision}",
    ]
    lines += [f"sync      {_sync(spec.train, plan)}"] if spec.train.sync != "step" else []
    lines += [f"kernels   {_by_layer(names)}"] if names else []
    return lines + _schedule(shown, _longest(order))


def _plan(plan: Plan) -> str:
    """The plan in words."""
    if plan == Plan(kernel=plan.kernel):
        return "1 device"
    from carrywave.plan.search import describe

    return describe(plan)


def _schedule(plan: Plan, steps: int) -> list[str]:
    """The schedule of the longest batch as a picture, where it is small."""
    chunks = plan.chunks(steps)
    if not 1 < chunks * plan.micro_batches * plan.stages <= 12 * plan.stages:
        return []
    from carrywave.plan.schedule.schedule import show, wavefront

    drawn = wavefront(plan.stages, chunks, plan.micro_batches, share_head=plan.share_head, defer_weights=not plan.recompute)
    return [f"          {row}" for row in show(drawn).splitlines()]


def transport_of(mesh: Mesh) -> str:
    """How the workers of a run reach each other; nothing for one worker."""
    if mesh.plan.workers == 1:
        return ""
    messages, sums = (f"in {each}" if each == "device memory" else f"over {each}" for each in (mesh.messages, mesh.sums))
    ways = f"messages {messages}, sums {sums}" if mesh.messages else f"sums {sums}"
    if mesh.messages == mesh.sums:
        ways = f"messages and sums {sums}"
    return ways


def of_workers(mesh: Mesh) -> list[str]:
    """How the workers of a run reach each other, and where they sit."""
    from carrywave.plan.placement import describe

    lines = [f"transport {transport_of(mesh)}"]
    seated = mesh.seats()
    if len({seat.host for seat in seated}) > 1:
        first, *others = describe(seated)
        lines += [f"hosts     {first}", *(f"          {line}" for line in others)]
    return lines


def _memory(spec: Spec, parameters: int) -> str:
    """What a whole model takes; what is kept for backward depends on the batch, and `carrywave plan` estimates it."""
    copies = 2 + OPTIMIZER_COPIES[spec.train.optimizer] + bool(spec.train.momentum) + (spec.train.ema is not None)
    num_bytes = copies * parameters * (8 if spec.train.precision == "fp64" else 4)
    return f"{size_text(num_bytes)} for parameters, gradients and optimizer; what is kept for backward comes on top"


def backends(spec: Spec, model: Model | OpaqueModel, plan: Plan, order: Order, device: str) -> tuple[str, ...]:
    """The backend of each recurrent layer for a chunk of the first batch; empty for the user's own module, which runs as it is."""
    if isinstance(model, OpaqueModel):
        return ()
    lstm, window = model.lstm, order.window(Cursor(0, 0))
    steps = -(-window.steps // model.stride) if plan.chunk_steps is None or model.reads_whole else min(window.steps, plan.chunk_steps)
    lanes = -(-len(window.length) // (plan.replicas * plan.micro_batches))
    kernel = lstm.kernel if plan.kernel == "auto" else plan.kernel
    one = torch.empty((), dtype=HALVES.get(spec.train.precision, parameter_dtype(spec.train.precision)), device=device)
    widths = (lstm.input_size, *(lstm.outputs(layer) for layer in range(lstm.num_layers - 1)))
    noise = CellNoise(lstm.recurrent_dropout, lstm.zoneout, ("",) * lstm.directions)
    marks = StepMarks(noise=noise) if lstm.noisy else None
    return tuple(
        lstm.backends.in_use(kernel, one.expand(steps, lanes, width), lstm.weights(layer), marks) for layer, width in enumerate(widths)
    )


def _by_layer(names: tuple[str, ...]) -> str:
    """`persistent`, or if layers differ `persistent (layers 1-2), aten (cuDNN) (layer 3)`."""
    if len(set(names)) == 1:
        return names[0]
    parts, after = [], 0
    for name, same in itertools.groupby(names):
        first, after = after + 1, after + len(list(same))
        parts.append(f"{name} ({f'layer {first}' if first == after else f'layers {first}-{after}'})")
    return ", ".join(parts)


def _longest(order: Order) -> int:
    """The steps of the longest batch."""
    if isinstance(order, SequenceOrder):
        return max(steps for steps, _ in order.shapes(0))
    return order.window(Cursor(0, 0)).steps


def _data(facts: DataFacts) -> str:
    what = f"{_count(facts.vocabulary, 'token')} in the vocabulary" if facts.vocabulary else _count(facts.features, "feature")
    many = f"{facts.sequences:,} sequences of up to {_count(facts.longest, 'step')}, " if facts.sequences > 1 else ""
    labels = f", {_count(len(facts.labels), 'label')}" if facts.labels else ""
    return f"{many}{_count(facts.steps, 'step')} in train, {what}{labels}"


def _network(model: Model | OpaqueModel, *, tied: bool) -> str:
    if isinstance(model, OpaqueModel):
        return type(model.module).__name__
    lstm = model.lstm
    widths = lstm.widths
    shape = f"{len(widths)} x {widths[0]}" if len(set(widths)) == 1 else " -> ".join(map(str, widths))
    front = model.encoder.layers if isinstance(model.encoder, Front) else ()
    extras = [
        f"front of {_count(len(front), 'convolution')}, {_count(model.stride, 'step')} to 1" if front else "",
        _count(lstm.num_heads, "head") if lstm.num_heads > 1 else "",
        f"projection {lstm.proj_size}" if lstm.proj_size else "",
        "bidirectional" if lstm.bidirectional else "",
        "tied" if tied else "",
        "layer norm" if lstm.layer_norm else "",
        "norms inside the cell" if lstm.cell_norm else "",
        "adaptive softmax" if isinstance(model.head, AdaptiveSoftmax) else "",
    ]
    return ", ".join([f"{lstm.cell.name.upper()} {shape}", *filter(None, extras)])


def _batch(spec: Spec, order: Order) -> str:
    if spec.streams:
        varied = " (varied)" if spec.batch.vary else ""
        return f"{_count(spec.lanes, 'lane')} x {_count(spec.steps, 'step')}{varied}, carry kept between windows"
    if isinstance(order, SequenceOrder):
        return f"{_count(spec.tokens, 'step')}, {_count(len(order.shapes(0)), 'shape')}, {order.waste(0):.1%} padding"
    return _count(spec.tokens, "step")


def _shares(spec: Spec, plan: Plan) -> list[str]:
    """How a batch is divided over replicas, and how many make a step; nothing where it is not."""
    fewest, most = spec.lanes // plan.replicas, -(-spec.lanes // plan.replicas)
    lanes = f"{_count(most, 'lane')}" if fewest == most else f"{fewest} or {_count(most, 'lane')}"
    parts = [f"{lanes} on each replica" if spec.streams else f"divided over {plan.replicas} replicas"] if plan.replicas > 1 else []
    return parts + ([f"{spec.train.accumulate} batches for each optimizer step"] if spec.train.accumulate > 1 else [])


def _sync(train: TrainSpec, plan: Plan) -> str:
    """How replicas exchange, if not at every step."""
    if plan.replicas == 1:
        return f"{train.sync}: one replica, so there is nobody to exchange with"
    if train.sync == "async":
        return f"async: {plan.replicas} replicas push gradients when they are ready, at most {_count(train.sync_staleness, 'step')} apart"
    return f"{train.sync}: {plan.replicas} replicas train on their own, and exchange weights every {_count(train.sync_every, 'step')}"


def _count(count: int, noun: str) -> str:
    """`1 feature`, `2 features`, `2 micro-batches`, `2 epochs`."""
    return f"{count:,} {noun}{('es' if noun.endswith('tch') else 's') * (count != 1)}"


def _ours(model: Model | OpaqueModel) -> bool:
    return isinstance(model, Model) and type(model.head).__module__.startswith("carrywave.")


def noted(ready: Ready, model: Model | OpaqueModel, planned: Sequence[str]) -> Iterator[str]:
    """Yield what else a person should know before the first step."""
    spec, order, prepared = ready.spec, ready.order, ready.data
    yield from ready.reasons
    if isinstance(order, SequenceOrder) and order.oversized:
        yield f"sequences longer than batch.tokens={spec.tokens}: {order.oversized}; each becomes a batch of its own"
    if spec.streams and isinstance(model, OpaqueModel):
        name = type(model.module).__name__
        yield f"{name} has no carry that the trainer can keep: each window of {spec.steps} steps starts fresh; use a cw.Model to keep one"
    labels = prepared.codec.labels
    if prepared.codec.label_kind == "whole number" and labels != tuple(map(str, range(len(labels)))) and not _ours(model):
        shown = ", ".join(labels[:5]) + (", …" if len(labels) > 5 else "")
        fact = f"the labels {shown} are passed to your loss as 0 to {len(labels) - 1}, in this order"
        yield f"{fact}; number them from 0 to keep them unchanged"
    yield from planned
    yield from prepared.notes
    for part in (ready.parts.valid, ready.parts.test):
        yield from () if part is None else part.notes
    yield from warnings_of(spec, prepared.codec, order, prepared.train, prepared.valid)
