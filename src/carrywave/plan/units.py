"""`Units` describes what a plan divides (the encoder, each layer, the head): sizes, parameters, and memory per lane and step.

Everything is derived from the spec and the facts of the data; no model is built. Counts are numbers of elements, whose size in bytes
depends on the precision. Parameters are exact; what is kept for backward is counted closely enough to tell what fits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from carrywave.errors import PlanError
from carrywave.plan.plan import Plan
from carrywave.plan.unit import Unit, encoder_unit, layer_unit
from carrywave.spec.data_spec import PARAMETERS
from carrywave.spec.defaults import resolve_for_data, suited, with_precision
from carrywave.spec.facts import DataFacts
from carrywave.spec.signal_spec import total_stride
from carrywave.spec.spec import Spec
from carrywave.spec.train_spec import TrainSpec

_ACTIVATION_BYTES = {"fp32": 4, "tf32": 4, "fp64": 8, "bf16": 2, "fp16": 2}
_STATES = {"sgd": 0, "adam": 2, "adamw": 2, "ntasgd": 1}  # optimizer state elements per parameter
_ALIGNED = 8  # elements for each place of a label that a transcription keeps: alpha, beta, what is emitted, and what becomes of them
_SHAPES = 3  # representative batch shapes when sequences differ in length


@dataclass(frozen=True)
class BatchShape:
    """The lanes and steps of a batch, and the share of all steps that lies in batches of this shape."""

    lanes: int
    steps: int
    share: float = 1.0

    def __str__(self) -> str:
        return f"{self.lanes} lane{'s' * (self.lanes > 1)} x {self.steps} steps"


@dataclass(frozen=True)
class Units:
    """The units of a model, and what the spec fixes: batch, precision, optimizer."""

    units: tuple[Unit, ...]
    shapes: tuple[BatchShape, ...]
    precision: str
    optimizer: str
    states: int = 0  # optimizer state elements per parameter
    tied: int = 0  # parameters shared by the encoder and the head
    accumulate: int = 1
    pooled: bool = False  # the head scores whole sequences
    whole: bool = False  # layers are bidirectional, or a front or the head read whole sequences, so time cannot be cut into chunks
    streams: bool = True
    outer: int = 0  # copies of the weights besides, on replicas that do not exchange at every step (`train.sync`)
    whole_head: bool = False  # the head reads whole sequences, so that stages cannot share it
    stride: int = 1  # steps of the data that a front makes one of; shapes are those after it

    def __len__(self) -> int:
        return len(self.units)

    @property
    def layers(self) -> int:
        return len(self.units) - 2

    def rows_of(self, unit: Unit, steps: int) -> int:
        """How many rows of each lane a unit computes for this many steps; of a head that pools, one."""
        if unit.width_out == 0 and self.pooled and not self.whole_head:
            return 1
        return steps * (self.stride if unit.front else 1)

    @property
    def counted(self) -> str:
        """What one step of a lane is called: tokens for text, steps for numeric data."""
        return "steps" if self.units[0].kind == "numbers" else "tokens"

    @property
    def activation_bytes(self) -> int:
        """Bytes per activation element."""
        return _ACTIVATION_BYTES[self.precision]

    @property
    def parameter_bytes(self) -> int:
        """Bytes per element of parameters, gradients and optimizer state."""
        return 8 if self.precision == "fp64" else 4

    @property
    def lanes(self) -> int:
        """Lanes that can be divided among replicas: those of the smallest batch, since every replica needs at least one."""
        return min(shape.lanes for shape in self.shapes)

    @property
    def tokens(self) -> float:
        """Average number of steps, over all lanes, per optimizer step."""
        return self.stride * self.accumulate / sum(shape.share / (shape.lanes * shape.steps) for shape in self.shapes)

    def parameters(self, first: int, last: int, *, share_head: bool = False) -> int:
        """Number of parameters held by a stage with units [first, last)."""
        head = len(self.units) - 1
        also = share_head and last <= head
        total = self._sums[last] - self._sums[first] + (self.units[head].parameters if also else 0)
        return total + (self.tied if first == 0 or last > head or also else 0)

    @cached_property
    def _sums(self) -> list[int]:
        """Prefix sums of the units' parameters."""
        return list(accumulate((unit.parameters for unit in self.units), initial=0))

    def common(self, edges: tuple[int, ...], *, share_head: bool = False) -> tuple[int, tuple[int, ...]]:
        """The number of parameters held by several stages (tied weights, a shared head), and those stages."""
        last, head = len(edges) - 2, len(self.units) - 1
        if last == 0:
            return 0, ()
        if share_head:
            return self.units[head].parameters + self.tied, tuple(range(last + 1))
        return (self.tied, (0, last)) if self.tied else (0, ())

    def micro_batches(self, plan: Plan, lanes: int) -> list[int]:
        """Lanes in each micro-batch of a replica with `lanes` lanes."""
        parts = min(plan.micro_batches, lanes)
        return [lanes * (part + 1) // parts - lanes * part // parts for part in range(parts)]

    @staticmethod
    def of(spec: Spec, facts: DataFacts) -> Units:
        """The units of the model that a spec describes for its data.

        A precision of `auto` counts as fp32, which it is on devices that are not known to be made for bf16.
        """
        spec = with_precision(resolve_for_data(spec, facts), suited(made_for_bf16=False))
        model, train = spec.model, spec.train
        encoder = encoder_unit(spec, facts)
        units, width = [encoder], encoder.width_out
        _, between, last = model.dropouts(tokens=facts.vocabulary > 0)
        for layer, hidden in enumerate(model.widths):
            out = (model.projection or hidden) * (2 if model.bidirectional else 1)
            dropped = between if layer < model.layers - 1 else last
            units.append(layer_unit(spec, layer, width, hidden, out, out if dropped else 0))
            width = out
        tied = facts.vocabulary * width if model.tie else 0
        if tied:
            units[0] = replace(encoder, parameters=0)
        stride = total_stride(model.front_layers)
        return Units(
            (*units, _head(spec, facts, width, tied)),
            tuple(replace(shape, steps=-(-shape.steps // stride)) for shape in _shapes(spec, facts)),
            train.precision,
            train.optimizer,
            # An average of the weights is optimizer state, too.
            (1 if train.optimizer == "sgd" and train.momentum else _STATES[train.optimizer]) + (train.ema is not None),
            tied,
            train.accumulate,
            spec.pooled or spec.task == "transcription",
            model.bidirectional or spec.reads_whole,
            spec.streams,
            outer=_outer_copies(train),
            whole_head=model.crf is True or spec.task == "transcription",
            stride=stride,
        )


def unit_names(units: int, first: int, last: int) -> str:
    """Describe units [first, last) of `units`: `encoder, layers 1-3`."""
    head = units - 1
    low, high = max(first, 1), min(last, head)
    layers = [] if high <= low else [f"layer {low}"] if high - low == 1 else [f"layers {low}-{high - 1}"]
    return ", ".join(["encoder"] * (first == 0) + layers + ["head"] * (last > head))


def _outer_copies(train: TrainSpec) -> int:
    """Copies of the weights that replicas hold to exchange them: what they agreed on, its momentum, and what travels."""
    if train.sync == "step":
        return 0
    if train.sync == "async":
        return 4  # gradients in a row, weights that come back, in parts and in a row, and at most one more for the share
    momentum = train.exchange_momentum
    return 3 + (1 if momentum else 0)


def _head(spec: Spec, facts: DataFacts, width: int, tied: int) -> Unit:
    """The head, which reads the last layer's output; weights tied to the encoder are not its own."""
    model, transcribes = spec.model, spec.task == "transcription"
    kind, outputs = _outputs(spec, facts)
    pooled = spec.pooled and not transcribes
    past = spec.past_steps if spec.task == "forecasting" else 0
    line = facts.outputs * spec.data.horizon * (past + 1) if past and model.linear else 0
    read = 2 * width if pooled and model.pool == "mean_max" else width
    query = width if pooled and model.pool == "attention" else 0
    paths = _ALIGNED * model.upsample * (2 * facts.most_labels + 1) if transcribes else 0
    head = Unit(
        "head",
        kind,
        read + past,  # the last values are multiplied with as many weights for each output
        outputs,
        width,
        0,
        outputs * read + outputs - tied + query + line,
        kept=0 if pooled else outputs * (3 if transcribes else 1) + facts.outputs * past,
        deferred=0 if pooled else outputs,
        work=0 if pooled else outputs + paths,
        carry=read if pooled else 0,
    )
    if model.crf:  # at every step, scores are multiplied with those of all pairs of labels; sums over paths are there while it runs
        own = outputs * (outputs + 2 + model.word_scores)
        return replace(head, inputs=read + 2 * outputs, parameters=head.parameters + own, kept=4 * outputs, work=14 * outputs)
    if model.softmax == "adaptive":
        return _adaptive(head, width, model.cutoffs_of(facts.vocabulary), facts.vocabulary)
    return head


def _outputs(spec: Spec, facts: DataFacts) -> tuple[str, int]:
    """The kind of the head and its number of outputs."""
    kind = "softmax"
    match spec.task:
        case "language":
            outputs = facts.vocabulary
        case "tagging" | "classification":
            outputs = len(facts.labels)
        case "transcription":
            outputs = spec.model.upsample * (len(facts.labels) + 1) if facts.labels else 0
        case "regression":
            kind, outputs = "linear", facts.outputs
        case "forecasting":
            each = PARAMETERS.get(spec.data.distribution) or spec.data.quantiles or (0.5,)
            kind, outputs = "linear", spec.data.horizon * facts.outputs * len(each)
    if outputs < 1:
        raise PlanError(
            f"the data has nothing for {spec.task} to predict (vocabulary, labels or outputs); pass the data's facts, or the data itself"
        )
    return kind, outputs


def _adaptive(head: Unit, width: int, cutoffs: tuple[int, ...], vocabulary: int) -> Unit:
    """The head as an adaptive softmax. Which clusters a step needs depends on its target: a quarter of the steps is taken to need each."""
    sizes = [high - low for low, high in pairwise((*cutoffs, vocabulary))]
    narrow = [width // 4 ** (number + 1) for number in range(len(sizes))]
    first = cutoffs[0] + len(cutoffs)
    scored = first + sum(sizes) // 4
    parameters = first * width + sum(each * (width + size) for each, size in zip(narrow, sizes, strict=True))
    return replace(head, outputs=scored, parameters=parameters, kept=scored, deferred=scored, work=scored)


def _shapes(spec: Spec, facts: DataFacts) -> tuple[BatchShape, ...]:
    """The batch shapes of a spec: one for streams; for sequences a few, each representing an equal share of all steps."""
    if spec.streams:
        return (BatchShape(spec.lanes, spec.steps + (spec.data.warmup if spec.random_windows else 0)),)
    total = sum(length * count for length, count in facts.histogram)
    if not total:
        steps = facts.longest or (facts.steps // facts.sequences if facts.sequences else 0) or 64
        return (BatchShape(max(1, spec.tokens // steps), min(steps, spec.tokens)),)
    lengths: list[int] = []
    passed, bins = 0, iter(sorted(facts.histogram))
    length = 1
    for part in range(_SHAPES):
        while passed < total * (2 * part + 1) / (2 * _SHAPES):
            length, count = next(bins)
            passed += length * count
        lengths.append(max(1, length))
    # A sequence longer than the token budget forms a batch by itself.
    return tuple(BatchShape(max(1, spec.tokens // steps), steps, lengths.count(steps) / _SHAPES) for steps in sorted(set(lengths)))
