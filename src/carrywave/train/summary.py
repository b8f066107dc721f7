"""The summary before the first step: what is trained, how large it is, how it will be read and split."""

from __future__ import annotations

import itertools

import torch

from carrywave.data.order import Cursor, Order, SequenceOrder
from carrywave.kernels.choice import in_use
from carrywave.model.model import Model
from carrywave.model.whole import Whole
from carrywave.parallel.precision import HALVES, parameter_dtype
from carrywave.plan.plan import Plan
from carrywave.plan.schedule import show, wavefront
from carrywave.plan.shards import SHARDS
from carrywave.spec.facts import DataFacts
from carrywave.spec.spec import Spec

OPTIMIZER_COPIES = {"sgd": 0, "adam": 2, "adamw": 2, "ntasgd": 1}  # tensors as large as the parameters


def summarize(spec: Spec, facts: DataFacts, model: Model | Whole, plan: Plan, order: Order, device: str) -> str:
    """A few lines of plain text."""
    parameters = sum(p.numel() for p in model.parameters())
    widest, lanes = _largest(order)
    per_epoch = order.num_steps(0)
    steps = -(-per_epoch // spec.train.accumulate)
    size = 8 if spec.train.precision == "fp64" else 4
    weights = parameters * size
    copies = OPTIMIZER_COPIES[spec.train.optimizer] + (1 if spec.train.momentum else 0)
    activations = _activation_bytes(spec, model, facts, widest, lanes, size)
    total = weights * (2 + copies) + activations
    lines = [
        f"task      {spec.task}: {_data(facts)}",
        f"model     {_network(model, tied=spec.model.tie)}: {parameters:,} parameters",
        f"memory    about {_bytes(total)}: {_bytes(weights)} weights, {_bytes(weights)} gradients, "
        f"{_bytes(weights * copies)} optimizer, {_bytes(activations)} activations",
        f"batch     {_batch(spec, order)}; {_whole(spec, plan)}",
        f"epoch     {per_epoch:,} batches, {steps:,} optimizer steps; {spec.train.epochs} epochs",
        f"plan      {_plan(plan)} on {device}, {spec.train.precision}",
    ]
    if spec.train.reproducible:
        lines.append(f"shards    {SHARDS} of the lanes, each computed by itself and summed in one order, on 1, 2, 4 or 8 replicas")
    names = backends(spec, model, plan, order, device)
    if names:
        lines.append(f"kernels   {_by_layer(names)}")
    chunks = 1 if model.reads_whole else plan.chunks(widest)
    if chunks * plan.slices <= 12 and chunks * plan.slices * plan.stages > 1:
        lines += [f"          {row}" for row in show(wavefront(plan.stages, chunks, plan.slices, share_head=plan.share_head)).splitlines()]
    return "\n".join(lines)


def backends(spec: Spec, model: Model | Whole, plan: Plan, order: Order, device: str) -> tuple[str, ...]:
    """The backend of each LSTM layer for a chunk of the first batch; none for a module of the user's own, which runs as it is."""
    if isinstance(model, Whole):
        return ()
    lstm, window = model.lstm, order.window(Cursor(0, 0))
    steps = window.steps if plan.chunk_steps is None or model.reads_whole else min(window.steps, plan.chunk_steps)
    lanes = -(-len(window.length) // (SHARDS if spec.train.reproducible else plan.replicas * plan.slices))
    asked = lstm.kernel if plan.kernel == "auto" else plan.kernel
    one = torch.empty((), dtype=HALVES.get(spec.train.precision, parameter_dtype(spec.train.precision)), device=device)
    widths = (lstm.input_size, *(lstm.outputs(layer) for layer in range(lstm.num_layers - 1)))
    return tuple(in_use(asked, one.expand(steps, lanes, width), lstm.weights(layer)) for layer, width in enumerate(widths))


def _by_layer(names: tuple[str, ...]) -> str:
    """`persistent`, or where layers differ `persistent (layers 1-2), aten (cuDNN) (layer 3)`."""
    if len(set(names)) == 1:
        return names[0]
    parts, after = [], 0
    for name, same in itertools.groupby(names):
        first, after = after + 1, after + len(list(same))
        parts.append(f"{name} ({f'layer {first}' if first == after else f'layers {first}-{after}'})")
    return ", ".join(parts)


def _largest(order: Order) -> tuple[int, int]:
    """(steps, lanes) of the largest batch."""
    if isinstance(order, SequenceOrder):
        return max(order.shapes(0), key=lambda shape: shape[0] * shape[1])
    window = order.window(Cursor(0, 0))
    return window.steps, len(window.length)


def _activation_bytes(spec: Spec, model: Model | Whole, facts: DataFacts, steps: int, lanes: int, size: int) -> int:
    if isinstance(model, Whole):
        return 0  # what a module of the user's own keeps is not known
    half = 2 if spec.train.precision in ("bf16", "fp16") else size
    # Of each step a layer keeps its four gates, cell, output and a dropped copy of it.
    layers = sum(width * 7 * half * model.lstm.directions for width in model.lstm.widths)
    outputs = facts.vocabulary * 2 if spec.task == "language" else len(facts.labels) * 2
    return steps * lanes * (layers + outputs * 4)


def _data(facts: DataFacts) -> str:
    what = f"{facts.vocabulary:,} tokens in the vocabulary" if facts.vocabulary else f"{facts.features} features"
    many = f"{facts.sequences:,} sequences of up to {facts.longest:,} steps, " if facts.sequences > 1 else ""
    labels = f", {len(facts.labels)} labels" if facts.labels else ""
    return f"{many}{facts.steps:,} steps in train, {what}{labels}"


def _network(model: Model | Whole, *, tied: bool) -> str:
    if isinstance(model, Whole):
        return type(model.module).__name__
    lstm = model.lstm
    widths = lstm.widths
    shape = f"{len(widths)} x {widths[0]}" if len(set(widths)) == 1 else " -> ".join(map(str, widths))
    extras = [
        f"projection {lstm.proj_size}" if lstm.proj_size else "",
        "bidirectional" if lstm.bidirectional else "",
        "tied" if tied else "",
        "layer norm" if lstm.layer_norm else "",
    ]
    return ", ".join([f"LSTM {shape}", *filter(None, extras)])


def _batch(spec: Spec, order: Order) -> str:
    if spec.streams:
        return f"{spec.lanes} lanes x {spec.steps} steps{' (varied)' if spec.batch.vary else ''}, carry kept between windows"
    if isinstance(order, SequenceOrder):
        return f"{spec.tokens:,} steps, {len(order.shapes(0))} shapes, {order.waste(0):.1%} padding"
    return f"{spec.tokens:,} steps"


def _whole(spec: Spec, plan: Plan) -> str:
    unit = f"{spec.lanes // plan.replicas} lanes" if spec.streams else f"{spec.tokens:,} steps"
    times = f"; x {spec.train.accumulate} accumulated" if spec.train.accumulate > 1 else ""
    return f"{unit} on each of {plan.workers} device{'s' if plan.workers > 1 else ''}{times}"


def _plan(plan: Plan) -> str:
    if plan == Plan(kernel=plan.kernel):
        return "serial (one device, one chunk)"
    parts = [f"{plan.replicas} replicas x {plan.stages} stages", f"chunks of {plan.chunk_steps} steps" if plan.chunk_steps else "one chunk"]
    parts += [f"{plan.slices} slices", "recomputation" if plan.recompute else "no recomputation"]
    return ", ".join([*parts, *(["head shared"] if plan.shares_head else [])])


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")
