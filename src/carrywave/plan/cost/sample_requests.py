"""Lists the calls that must be timed to plan a model: its own units, at the lanes and chunk sizes that plans would use. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from carrywave.cells.cell import by_name, names
from carrywave.plan.cost.profile import CallKind, Sample
from carrywave.plan.cost.units import BatchShape, Units

# Numbers of chunks per window that are timed; others are interpolated. On a GPU even chunks of a few steps pay.
CHUNKS = {"cpu": (1, 4, 16), "cuda": (1, 4, 16, 32)}
LEAST_STEPS = 2
# Most multiplications in a timed call: larger calls are timed on fewer steps and extrapolated linearly.
LARGEST = {"cpu": 2e9, "cuda": 1e12}
# Most weights of several layers that are timed in one call.
LARGEST_WEIGHTS = 4e8
# (parameters, layers they are spread over); larger counts are extrapolated linearly. Small updates do not occupy a GPU, and it updates
# all tensors at once, so only the parameters vary there.
OPTIMIZER_SIZES = {"cpu": ((100_000, 1), (100_000, 8), (3_000_000, 1)), "cuda": ((100_000, 1), (3_000_000, 1), (30_000_000, 1))}
REDUCED_BYTES = (64, 1 << 16, 1 << 20, 8 << 20)


@dataclass(frozen=True)
class Ask:
    """A request to time one call; see `plan.cost.profile.Sample`."""

    kind: CallKind
    inputs: int
    outputs: int
    lanes: int
    steps: int
    projection: int = 0
    precision: str = "fp32"
    chunks: int = 1  # equal ones in the window, of which this is one
    layers: int = 1  # recurrent layers in one call, which may run concurrently
    nothing: bool = False  # a task without any unit, to time the overhead

    def twice(self) -> Ask:
        """The same request with twice the steps."""
        return replace(self, steps=2 * self.steps)

    @property
    def whole(self) -> bool:
        """True if the window is one chunk."""
        return self.chunks == 1

    @property
    def size(self) -> tuple[object, ...]:
        """The key that identifies the call."""
        return called(self)

    @property
    def work(self) -> float:
        """Approximate multiplications of forward and backward."""
        tokens = self.lanes * self.steps
        if self.kind in names():
            return 3.0 * self.layers * tokens * by_name(self.kind).multiply_adds(self.inputs, self.outputs, self.projection)
        if self.kind in ("softmax", "linear"):
            return 3.0 * tokens * self.inputs * self.outputs
        return 1.0 * tokens * self.outputs

    def sample(self, forward_seconds: float, backward_seconds: float, deferred_seconds: float) -> Sample:
        """The sample that answers this request."""
        return Sample(
            self.kind,
            self.precision,  # type: ignore[arg-type]
            self.inputs,
            self.outputs,
            self.lanes,
            self.steps,
            forward_seconds,
            backward_seconds,
            deferred_seconds,
            self.projection,
            self.layers,
        )


def called(one: Ask | Sample) -> tuple[object, ...]:
    """The key shared by a request and the sample that answers it."""
    return one.kind, one.precision, one.inputs, one.outputs, one.lanes, one.steps, one.projection, one.layers


def asks_of(units: Units, workers: int, kind: str = "cpu") -> list[Ask]:
    """The calls that plans with `workers` workers on a host would make, for their shares of the lanes and chunks of the window."""
    by_size: dict[tuple[object, ...], Ask] = {}
    for shape in units.shapes:
        # A pipeline has all lanes, each replica a share of them.
        for lanes in sorted({shape.lanes, -(-shape.lanes // workers)}, reverse=True):
            # One worker does not cut time, but a shorter call reveals the fixed cost per call. On a GPU, recorded chunks are timed even so:
            # one GPU may be all that there is to plan for several.
            for chunks in (1,) if units.whole else CHUNKS[kind][:2] if workers == 1 and kind == "cpu" else CHUNKS[kind]:
                steps = -(-shape.steps // chunks)
                if chunks > 1 and steps < LEAST_STEPS:
                    continue
                for each in _of_units(units, lanes, steps, chunks):
                    ask = lighter_ask(each, LARGEST[kind])
                    by_size.setdefault(ask.size, ask)
        if kind == "cuda" and workers == 1:
            for ask in _side_by_side(units, shape):
                by_size.setdefault(ask.size, ask)
    return list(by_size.values())


def _side_by_side(units: Units, shape: BatchShape) -> Iterable[Ask]:
    """Requests for several equal layers in one call: on a GPU they may run concurrently."""
    layers = [unit for unit in units.units if unit.cell is not None and unit.cell.has_kernels(units.precision) and not unit.launches]
    equal = [unit for unit in layers if (unit.inputs, unit.outputs) == (layers[-1].inputs, layers[-1].outputs)]
    if len(equal) > 1 and not equal[0].projection and equal[0].directions == 1:
        last = equal[-1]
        weights = by_name(last.kind).multiply_adds(last.inputs, last.outputs)
        several = max(2, min(len(equal), round(LARGEST_WEIGHTS / weights)))
        ask = Ask(last.kind, last.inputs, last.outputs, shape.lanes, shape.steps, precision=units.precision, layers=several)
        yield lighter_ask(ask, LARGEST["cuda"])


def _of_units(units: Units, lanes: int, steps: int, chunks: int) -> Iterable[Ask]:
    for unit in units.units:
        if unit.kind != "numbers":
            rows = units.rows_of(unit, steps)
            yield Ask(unit.kind, unit.inputs, unit.outputs, lanes, rows, unit.projection, units.precision, chunks)
        for kind, width in (("dropout", unit.dropout), ("norm", unit.norm)):
            if width:
                yield Ask(kind, width, width, lanes, steps, 0, units.precision, chunks)
        if unit.dropped_rows:
            width = unit.projection or unit.outputs
            yield Ask("dropout", width, width, unit.dropped_rows, 1, 0, units.precision)
        for layer in unit.front:
            rows = steps * layer.times
            yield Ask("linear", layer.inputs, layer.channels, lanes, rows, 0, units.precision, chunks)
            for kind in ("norm", "dropout") if layer.dropped else ("norm",):
                yield Ask(kind, layer.channels, layer.channels, lanes, rows, 0, units.precision, chunks)


def lighter_ask(ask: Ask, largest: float) -> Ask:
    """The request with fewer steps if it would take too long."""
    if ask.work <= largest:
        return ask
    return replace(ask, steps=max(LEAST_STEPS, min(ask.steps, round(ask.steps * largest / ask.work))))
