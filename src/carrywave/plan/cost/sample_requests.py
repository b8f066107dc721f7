"""What has to be timed for a model to be planned: its own units, at the lanes and chunks that plans would give them. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from carrywave.plan.cost.profile import Kind, Sample
from carrywave.plan.cost.units import BatchShape, Units

CHUNKS = (1, 4, 16)  # that a window is cut into; what lies between is interpolated
LEAST_STEPS = 2
# Multiplications of a call that is timed: larger ones are timed on fewer steps, and take as much longer as they are larger.
LARGEST = {"cpu": 2e9, "cuda": 1e13}
# Parameters, and layers that have them; more take as much longer as they are more. A GPU is hardly at work with few, and takes all
# tensors at once.
OPTIMIZER_SIZES = {"cpu": ((100_000, 1), (100_000, 8), (3_000_000, 1)), "cuda": ((3_000_000, 1), (30_000_000, 1))}
REDUCED_BYTES = (64, 1 << 16, 1 << 20, 8 << 20)


@dataclass(frozen=True)
class Ask:
    """One call to be timed; see `plan.profile.Sample`."""

    kind: Kind
    inputs: int
    outputs: int
    lanes: int
    steps: int
    projection: int = 0
    precision: str = "fp32"
    whole: bool = True  # time is not cut
    layers: int = 1  # of an lstm: so many in one call, which may run at the same time
    nothing: bool = False  # a task with no unit in it

    @staticmethod
    def of(known: dict[str, Any]) -> Ask:
        """An ask from what JSON made of it."""
        return Ask(**known)

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    def twice(self) -> Ask:
        """The same with twice the steps."""
        return replace(self, steps=2 * self.steps)

    @property
    def size(self) -> tuple[object, ...]:
        """What tells samples of one kind apart."""
        return called(self)

    @property
    def work(self) -> float:
        """Multiplications, roughly: forward and backward."""
        tokens = self.lanes * self.steps
        if self.kind == "lstm":
            return 12.0 * self.layers * tokens * self.outputs * (self.inputs + (self.projection or self.outputs))
        if self.kind in ("softmax", "linear"):
            return 3.0 * tokens * self.inputs * self.outputs
        return 1.0 * tokens * self.outputs

    def sample(self, forward_seconds: float, backward_seconds: float, put_off_seconds: float) -> Sample:
        """What came of it."""
        return Sample(
            self.kind,
            self.precision,  # type: ignore[arg-type]
            self.inputs,
            self.outputs,
            self.lanes,
            self.steps,
            forward_seconds,
            backward_seconds,
            put_off_seconds,
            self.projection,
            self.layers,
        )


def called(one: Ask | Sample) -> tuple[object, ...]:
    """What an ask and the sample that came of it have in common."""
    return one.kind, one.precision, one.inputs, one.outputs, one.lanes, one.steps, one.projection, one.layers


def asks_of(units: Units, workers: int, kind: str = "cpu") -> list[Ask]:
    """Calls that plans of so many workers of a host would make: shares of the lanes, chunks of the window."""
    found: dict[tuple[object, ...], Ask] = {}
    for shape in units.shapes:
        # All lanes in a pipeline, a share on replicas.
        for lanes in sorted({shape.lanes, -(-shape.lanes // workers)}, reverse=True):
            # One worker does not cut time; a shorter call tells what of a call does not grow with it.
            for chunks in (1,) if units.whole else CHUNKS[:2] if workers == 1 else CHUNKS:
                steps = -(-shape.steps // chunks)
                if chunks > 1 and steps < LEAST_STEPS:
                    continue
                for each in _of_units(units, lanes, steps, chunks == 1):
                    ask = _lighter(each, LARGEST[kind])
                    found.setdefault(ask.size, ask)
        if kind == "cuda" and workers == 1:
            for ask in _side_by_side(units, shape):
                found.setdefault(ask.size, ask)
    return list(found.values())


def _side_by_side(units: Units, shape: BatchShape) -> Iterable[Ask]:
    """Equal layers in one call: on a GPU they may run at the same time."""
    layers = [unit for unit in units.units if unit.kind == "lstm"]
    equal = [unit for unit in layers if (unit.inputs, unit.outputs) == (layers[-1].inputs, layers[-1].outputs)]
    if len(equal) > 1 and not equal[0].projection and equal[0].directions == 1:
        last = equal[-1]
        yield Ask("lstm", last.inputs, last.outputs, shape.lanes, shape.steps, precision=units.precision, layers=len(equal))


def _of_units(units: Units, lanes: int, steps: int, whole: bool) -> Iterable[Ask]:
    for unit in units.units:
        if unit.kind != "numbers":
            rows = 1 if units.pooled and unit.width_out == 0 else steps
            yield Ask(unit.kind, unit.inputs, unit.outputs, lanes, rows, unit.projection, units.precision, whole)
        for kind, width in (("dropout", unit.dropout), ("norm", unit.norm)):
            if width:
                yield Ask(kind, width, width, lanes, steps, 0, units.precision, whole)  # type: ignore[arg-type]


def _lighter(ask: Ask, largest: float) -> Ask:
    """An ask that does not take too long: of fewer steps."""
    if ask.work <= largest:
        return ask
    return replace(ask, steps=max(LEAST_STEPS, min(ask.steps, round(ask.steps * largest / ask.work))))
