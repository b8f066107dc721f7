"""`Units` are what a plan cuts: the encoder, each layer, the head; their sizes, parameters, and what a step of a lane leaves in memory.

All of it follows from the spec and the facts of the data; nothing is built. Counts are in numbers; the precision says how wide they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import Literal

from carrywave.errors import PlanError
from carrywave.plan.canonical_shards import REPLICAS, SHARDS
from carrywave.plan.cost.profile import Kind
from carrywave.plan.plan import Plan
from carrywave.spec.batches import fitted
from carrywave.spec.facts import DataFacts
from carrywave.spec.spec import Spec

_ACTIVATION_BYTES = {"fp32": 4, "tf32": 4, "fp64": 8, "bf16": 2, "fp16": 2}
_STATES = {"sgd": 0, "adam": 2, "adamw": 2, "ntasgd": 1}  # numbers beside each parameter
_SHAPES = 3  # of batches that stand for all, where sequences differ in length


@dataclass(frozen=True)
class Unit:
    """The encoder, a layer or the head."""

    name: str
    kind: Kind | Literal["numbers"]  # numbers enter as they are
    inputs: int  # as in a `Sample`
    outputs: int
    width_in: int  # of what comes from the unit before; 0 for the encoder
    width_out: int  # of what goes to the next; 0 for the head
    parameters: int  # without those it shares with another unit
    kept: int  # numbers a lane and step, from forward to backward, beside what enters
    owed: int = 0  # numbers a lane and step, from backward until put-off gradients of weights are paid
    carry: int = 0  # numbers a lane
    work: int = 0  # numbers a lane and step, while it is at work
    projection: int = 0
    directions: int = 1
    dropout: int = 0  # width of what is dropped behind it
    norm: int = 0  # width of what is normalised behind it
    tensors: int = 0  # that its parameters are in


@dataclass(frozen=True)
class BatchShape:
    """Batches of so many lanes and steps, and what part of all steps they are."""

    lanes: int
    steps: int
    share: float = 1.0


@dataclass(frozen=True)
class Units:
    """The units of a model, and what is fixed by the spec: batch, precision, optimizer."""

    units: tuple[Unit, ...]
    shapes: tuple[BatchShape, ...]
    precision: str
    optimizer: str
    states: int = 0  # numbers that the optimizer keeps beside each parameter
    tied: int = 0  # parameters that encoder and head share
    accumulate: int = 1
    pooled: bool = False  # the head scores whole sequences
    whole: bool = False  # layers read both ways, so that time is not cut
    streams: bool = True
    reproducible: bool = False

    def __len__(self) -> int:
        return len(self.units)

    @property
    def layers(self) -> int:
        return len(self.units) - 2

    @property
    def counted(self) -> str:
        """What a step of a lane is called: text has tokens, numbers have steps."""
        return "steps" if self.units[0].kind == "numbers" else "tokens"

    @property
    def activation_bytes(self) -> int:
        """Of a number on its way through the layers."""
        return _ACTIVATION_BYTES[self.precision]

    @property
    def parameter_bytes(self) -> int:
        """Of a parameter, its gradient, and each number that the optimizer keeps."""
        return 8 if self.precision == "fp64" else 4

    @property
    def lanes(self) -> int:
        """That can be shared out: of the batch with the fewest, for each replica must have one."""
        return min(shape.lanes for shape in self.shapes)

    @property
    def tokens(self) -> float:
        """Steps of all lanes in an optimizer step, on average."""
        return self.accumulate / sum(shape.share / (shape.lanes * shape.steps) for shape in self.shapes)

    def parameters(self, first: int, last: int, *, share_head: bool = False) -> int:
        """Those that a stage of units [first, last) holds."""
        head = len(self.units) - 1
        also = share_head and last <= head
        total: int = self._sums[last][0] - self._sums[first][0] + (self.units[head].parameters if also else 0)
        return total + (self.tied if first == 0 or last > head or also else 0)

    def tensors(self, first: int, last: int, *, share_head: bool = False) -> int:
        """That the parameters of a stage of units [first, last) are in."""
        head = len(self.units) - 1
        also = self.units[head].tensors if share_head and last <= head else 0
        return self._sums[last][1] - self._sums[first][1] + also - (bool(self.tied) and first == 0 and (last > head or share_head))

    def alike(self, first: int, last: int) -> tuple[int, int]:
        """The first units that are like [first, last), so that what is known of those holds for these: equal layers repeat."""
        begin, end = self._run_of[first]
        return (begin, begin + last - first) if last <= end else (first, last)

    @cached_property
    def _sums(self) -> list[tuple[int, int]]:
        """Parameters and tensors of all units before each, and of all."""
        each = ((unit.parameters, unit.tensors) for unit in self.units)
        return list(accumulate(each, lambda sofar, one: (sofar[0] + one[0], sofar[1] + one[1]), initial=(0, 0)))

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """Neighbours that are equal but for their names: [first, last) of each run of them."""
        found = [0]
        for _, several in groupby(self.units, key=lambda unit: replace(unit, name="")):
            found.append(found[-1] + len(list(several)))
        return list(pairwise(found))

    @cached_property
    def _run_of(self) -> list[tuple[int, int]]:
        """For each unit, the run that it is in."""
        return [run for run in self.runs for _ in range(*run)]

    def common(self, edges: tuple[int, ...], *, share_head: bool = False) -> tuple[int, tuple[int, ...]]:
        """Parameters that several stages hold, and those stages: of a tied matrix, of a head that is shared."""
        last, head = len(edges) - 2, len(self.units) - 1
        if last == 0:
            return 0, ()
        if share_head:
            return self.units[head].parameters + self.tied, tuple(range(last + 1))
        return (self.tied, (0, last)) if self.tied else (0, ())

    def slices(self, plan: Plan, lanes: int) -> list[int]:
        """Lanes of each slice of a replica that has so many: shards, where a run is to be reproducible."""
        parts = SHARDS // plan.replicas if self.reproducible and plan.replicas in REPLICAS else plan.slices
        parts = min(parts, lanes)
        return [lanes * (part + 1) // parts - lanes * part // parts for part in range(parts)]

    @staticmethod
    def of(spec: Spec, facts: DataFacts) -> Units:
        """The units of the model that a spec and its data ask for."""
        spec = fitted(spec, facts)
        model = spec.model
        encoder = _encoder(spec, facts)
        directions = 2 if model.bidirectional else 1
        units, width = [encoder], encoder.width_out
        hidden_dropout = model.dropout if model.dropout_hidden is None else model.dropout_hidden
        for layer, hidden in enumerate(model.widths):
            out = (model.projection or hidden) * directions
            dropped = hidden_dropout if layer < model.layers - 1 else _or(model.dropout_output, model.dropout)
            units.append(_layer(spec, layer, width, hidden, out, out if dropped else 0))
            width = out
        head, outputs = _head(spec, facts)
        tied = facts.vocabulary * width if model.tie else 0
        pooled = spec.task in ("classification", "regression")
        units.append(
            Unit(
                "head",
                head,
                width,
                outputs,
                width,
                0,
                outputs * width + outputs - tied,
                kept=0 if pooled else outputs,
                owed=0 if pooled else outputs,
                work=0 if pooled else outputs,
                carry=width if pooled else 0,
                tensors=2,
            )
        )
        if tied:
            units[0] = replace(encoder, parameters=0)
        return Units(
            tuple(units),
            _shapes(spec, facts),
            spec.train.precision,
            spec.train.optimizer,
            1 if spec.train.optimizer == "sgd" and spec.train.momentum else _STATES[spec.train.optimizer],
            tied,
            spec.train.accumulate,
            pooled,
            model.bidirectional,
            spec.streams,
            spec.train.reproducible,
        )


def _or(given: float | None, otherwise: float) -> float:
    return otherwise if given is None else given


def _encoder(spec: Spec, facts: DataFacts) -> Unit:
    model = spec.model
    if facts.vocabulary:
        width = model.embedding or model.widths[0]
        dropped = width if _or(model.dropout_input, model.dropout) or model.dropout_words else 0
        size = facts.vocabulary * width
        return Unit(
            "encoder",
            "embedding",
            facts.vocabulary,
            width,
            0,
            width,
            size,
            kept=dropped + 2,
            owed=width + 2,
            work=width,
            dropout=dropped,
            tensors=1,
        )
    if not facts.features:
        raise PlanError("the data has neither tokens nor features, so that nothing enters the model; give its facts, or the data itself")
    width = 2 * facts.features if spec.task == "forecasting" and spec.data.residual == "season" else facts.features
    return Unit("encoder", "numbers", width, width, 0, width, 0, kept=width, dropout=width if model.dropout_input else 0)


def _layer(spec: Spec, layer: int, width: int, hidden: int, out: int, dropout: int) -> Unit:
    model = spec.model
    directions, back = 2 if model.bidirectional else 1, model.projection or hidden
    one = 4 * hidden * (width + back + 2) + model.projection * hidden
    norm = out if model.layer_norm else 0
    parameters = directions * one + 2 * norm + (directions * (back + hidden) if model.learned_carry else 0)
    # Gates, cells, their tanh, and outputs (before the projection as well); then what dropout and norm leave.
    kept = directions * (6 * hidden + (hidden if model.projection else 0)) + out + dropout + norm
    return Unit(
        f"layer {layer + 1}",
        "lstm",
        width,
        hidden,
        width,
        out,
        parameters,
        kept,
        owed=directions * (4 * hidden + back) + width,
        carry=directions * (back + hidden),
        work=directions * 6 * hidden + width,
        projection=model.projection,
        directions=directions,
        dropout=dropout,
        norm=norm,
        tensors=directions * (4 + bool(model.projection)) + 2 * bool(norm) + 2 * model.learned_carry,
    )


def _head(spec: Spec, facts: DataFacts) -> tuple[Kind, int]:
    """The kind of the head and how many numbers it puts out."""
    match spec.task:
        case "language":
            kind, outputs = "softmax", facts.vocabulary
        case "tagging" | "classification":
            kind, outputs = "softmax", len(facts.labels)
        case "regression":
            kind, outputs = "linear", facts.outputs
        case "forecasting":
            kind, outputs = "linear", spec.data.horizon * facts.outputs * len(spec.data.quantiles or (0.5,))
    if outputs < 1:
        raise PlanError(
            f"the data has nothing that {spec.task} could learn to say (vocabulary, labels or outputs); give its facts, or the data itself"
        )
    return "softmax" if kind == "softmax" else "linear", outputs


def _shapes(spec: Spec, facts: DataFacts) -> tuple[BatchShape, ...]:
    """The batches of a spec: one for streams; for sequences a few, each of which stands for an equal part of all steps."""
    if spec.streams:
        return (BatchShape(spec.lanes, spec.steps),)
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
    # A sequence longer than the budget is a batch of its own.
    return tuple(BatchShape(max(1, spec.tokens // steps), steps, lengths.count(steps) / _SHAPES) for steps in sorted(set(lengths)))
