"""Summarizes a run before its first step: what is trained, how large it is, how the data is read and the work is split."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, replace

import torch

from carrywave.data.order import Cursor, Order, SequenceOrder
from carrywave.kernels.step_marks import CellNoise, StepMarks
from carrywave.model.heads.adaptive_softmax import AdaptiveSoftmax
from carrywave.model.model import Model
from carrywave.model.opaque_model import OpaqueModel
from carrywave.model.over_time.front import Front
from carrywave.parallel.mesh import Mesh
from carrywave.plan.memory import largest_stage, say
from carrywave.plan.placement import Seat, describe
from carrywave.plan.plan import Plan
from carrywave.plan.schedule.schedule import show, wavefront
from carrywave.plan.search import describe as plan_in_words
from carrywave.plan.transports import Transports
from carrywave.plan.units import Units
from carrywave.spec.facts import DataFacts
from carrywave.spec.spec import Spec
from carrywave.spec.train_spec import TrainSpec
from carrywave.step.graphs.capture import Capture
from carrywave.step.precision import HALVES, parameter_dtype

OPTIMIZER_COPIES = {"sgd": 0, "adam": 2, "adamw": 2, "ntasgd": 1}  # tensors the size of the parameters


def summarize(
    spec: Spec,
    facts: DataFacts,
    model: Model | OpaqueModel,
    plan: Plan,
    order: Order,
    device: str,
    units: Units | None = None,
    transports: Transports | None = None,
    seated: Sequence[Seat] = (),
    kept: str = "",
) -> str:
    """A few lines of plain text. `units` is the planner's description of the model; None for the user's own modules. `transports` is how
    workers reach each other, and `seated` where they sit; nothing if they do not exist. `kept` says where several workers keep the run.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    widest = _longest(order)
    per_epoch = order.num_steps(0)
    steps = -(-per_epoch // spec.train.accumulate)
    lines = [
        f"task      {spec.task}: {_data(facts)}",
        f"model     {_network(model, tied=spec.model.tie)}: {parameters:,} parameters",
        f"memory    {_memory(spec, parameters, plan, units, transports)}",
        f"batch     {'; '.join([_batch(spec, order), *_shares(spec, plan)])}",
        f"epoch     {_count(per_epoch, 'batch')}, {_count(steps, 'optimizer step')}; {_count(spec.train.epochs, 'epoch')}",
        f"plan      {plan_in_words(replace(plan, chunk_steps=None) if model.reads_whole else plan)}; {device}, {spec.train.precision}",
    ]
    if str(transports or ""):
        lines.append(f"transport {transports}")
    if len({seat.host for seat in seated}) > 1:
        named = describe(seated)
        lines += [f"hosts     {named[0]}", *(f"          {line}" for line in named[1:])]
    if kept:
        lines.append(f"folder    {kept}")
    if spec.train.sync != "step":
        lines.append(f"sync      {_sync(spec.train, plan)}")
    names = backends(spec, model, plan, order, device)
    if names:
        lines.append(f"kernels   {_by_layer(names)}")
    chunks = 1 if model.reads_whole else plan.chunks(widest)
    if chunks * plan.micro_batches <= 12 and chunks * plan.micro_batches * plan.stages > 1:
        schedule = wavefront(plan.stages, chunks, plan.micro_batches, share_head=plan.share_head, defer_weights=not plan.recompute)
        lines += [f"          {row}" for row in show(schedule).splitlines()]
    return "\n".join(lines)


def transports_of_run(mesh: Mesh, model: Model | OpaqueModel, spec: Spec) -> Transports:
    """How the workers of this run reach each other, and what of a step will be recorded."""
    on_gpu = mesh.device.type == "cuda"
    if spec.train.precision == "fp64" or Capture.of(mesh.device, mesh.plan, model, on_device=mesh.messages_on_device) is None:
        return Transports(mesh.messages, mesh.sums, "", on_gpu)
    one_piece = mesh.on_device and (mesh.plan.stages > 1 or spec.train.accumulate == 1)
    return Transports(mesh.messages, mesh.sums, "steps" if one_piece else "passes", on_gpu)


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


def _memory(spec: Spec, parameters: int, plan: Plan, units: Units | None, transports: Transports | None) -> str:
    """Memory of a worker by the planner's own estimate, so that both agree; for the user's own modules, the part that is known."""
    if units is None:
        size = 8 if spec.train.precision == "fp64" else 4
        weights = parameters * size
        optimizer = weights * (OPTIMIZER_COPIES[spec.train.optimizer] + bool(spec.train.momentum) + (spec.train.ema is not None))
        return (
            f"at least {say(2 * weights + optimizer)}: {say(weights)} parameters, {say(weights)} gradients, {say(optimizer)} optimizer; "
            "what your own modules keep for backward is not included"
        )
    held = largest_stage(units, plan, transports)
    parts = {name: size for name, size in asdict(held).items() if size or name != "links"}
    on = "on a worker of the largest stage" if plan.stages > 1 else "on each worker" if plan.replicas > 1 else ""
    return " ".join(filter(None, ("about", say(held.total), on))) + ": " + ", ".join(f"{say(size)} {name}" for name, size in parts.items())


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
    many, every = _count(plan.replicas, "replica"), _count(train.sync_every, "step")
    alone = f"{train.sync}: one replica, so there is nobody to exchange with"
    if train.sync == "async":
        return (
            alone
            if plan.replicas == 1
            else (
                f"async: {many} push gradients when they are ready, at most {_count(train.max_staleness, 'step')} apart; "
                "the result depends on timing"
            )
        )
    fragments = f" in {train.sync_fragments} fragments" if train.sync_fragments > 1 else ""
    wire = " in bf16" if train.sync_dtype == "bf16" else ""
    how = f"averaged{f' with block momentum {train.block_momentum:g}' if train.block_momentum else ''}"
    if train.sync == "diloco":
        how = f"moved by an outer step, learning rate {train.outer_lr:g}, momentum {train.outer_momentum:g}"
    if plan.replicas == 1:
        return alone if how == "averaged" else f"{alone}; every {every} its weights are {how}"
    return f"{train.sync}: {many} train on their own; every {every} the weights are exchanged{fragments}{wire} and {how}"


def _count(count: int, noun: str) -> str:
    """`1 feature`, `2 features`, `2 micro-batches`, `2 epochs`."""
    return f"{count:,} {noun}{('es' if noun.endswith('tch') else 's') * (count != 1)}"
