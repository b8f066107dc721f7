"""Interpolates the time of a call from samples of other sizes.

A sample of the same size is used as is. Otherwise a sum of terms (per call, per step, per multiplication), fitted to all samples, gives
the time; it extrapolates sensibly but is wrong where data no longer fits in a cache or the kernel changes. Its relative errors at the
nearby samples are therefore applied as a correction. Samples that differ in their steps alone lie on a line, and count with what that line
says for the steps asked for. Pure Python: there are only a few hundred samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from carrywave.cells.cell import names
from carrywave.plan.cost.profile import Sample

_SWEEPS = 400
_NEAR = 1e-9


class Size(NamedTuple):
    """The dimensions that a call's time depends on; see `profile.Sample`."""

    inputs: int
    outputs: int
    lanes: int
    steps: int
    projection: int = 0
    layers: int = 1


class Seconds(NamedTuple):
    """Times of a unit or stage on one chunk: forward, backward on the critical path, and the weight gradients that can be deferred."""

    forward: float
    backward: float
    deferred: float

    def __add__(self, other: object) -> Seconds:
        assert isinstance(other, Seconds)
        return Seconds(self.forward + other.forward, self.backward + other.backward, self.deferred + other.deferred)

    def times(self, factor: float) -> Seconds:
        """All times multiplied by `factor`."""
        return Seconds(self.forward * factor, self.backward * factor, self.deferred * factor)

    @property
    def all(self) -> float:
        return self.forward + self.backward + self.deferred


NOTHING = Seconds(0.0, 0.0, 0.0)

Terms = Callable[[Size], tuple[float, ...]]


def _tokens(size: Size) -> int:
    return size.steps * size.lanes


def _layer(size: Size) -> tuple[float, ...]:
    """One call; the gradient of the input weights; steps; the recurrent weights read at every step; cells; the extra cost of the
    recurrent product, which has only the lanes of one step to work on; both products.
    """
    hidden, back = size.outputs, size.projection or size.outputs
    cells = _tokens(size) * hidden
    return (1.0, hidden * size.inputs, size.steps, size.steps * hidden * back, cells, cells * back, cells * (back + size.inputs))


def _rows(size: Size) -> tuple[float, ...]:
    """One call; the gradient of the whole matrix; elements looked up."""
    return (1.0, size.inputs * size.outputs, _tokens(size) * size.outputs)


def _product(size: Size) -> tuple[float, ...]:
    """One call; the gradient of the whole matrix; output elements; multiplications."""
    return (1.0, size.inputs * size.outputs, _tokens(size) * size.outputs, _tokens(size) * size.inputs * size.outputs)


def _tensors(size: Size) -> tuple[float, ...]:
    """One call; tensors; elements in all of them."""
    return (1.0, size.inputs, size.outputs)


def _elements(size: Size) -> tuple[float, ...]:
    return (1.0, _tokens(size) * size.outputs)


TERMS: dict[str, Terms] = {
    **dict.fromkeys(names(), _layer),
    "embedding": _rows,
    "softmax": _product,
    "linear": _product,
    "dropout": _elements,
    "norm": _elements,
    "optimizer": _tensors,
}


class Fit:
    """Predicts the times of one kind of call in one precision from its samples."""

    def __init__(self, kind: str, samples: Sequence[Sample]) -> None:
        self.terms = TERMS[kind]
        self.recurrent = kind in names()
        # Deferrable weight gradients are fitted apart from the rest of backward: the two scale differently.
        times = [Seconds(s.forward_seconds, s.backward_seconds - s.deferred_seconds, s.deferred_seconds) for s in samples]
        self.times = dict(zip(map(self._seen, map(size_of, samples)), times, strict=True))  # the samples; also caches predictions
        rows = [self.terms(size) for size in self.times]
        self.factors = [_solve(rows, [time[part] for time in self.times.values()]) for part in range(3)]
        lines: dict[Size, dict[int, Seconds]] = {}
        for size, time in self.times.items():
            lines.setdefault(size._replace(steps=1), {})[size.steps] = time
        self.lines = [(size, self._coordinates(size), sorted(line.items())) for size, line in lines.items()]

    def __call__(self, size: Size) -> Seconds:
        """Predicted times of a call of this size: the fit, times an inverse-distance-weighted correction."""
        size = self._seen(size)
        if (timed := self.times.get(size)) is not None:
            return timed
        coordinates = self._coordinates(size)
        total, sums = 0.0, [0.0, 0.0, 0.0]
        for other, other_coordinates, line in self.lines:
            beyond = 0.5 * math.log2(size.steps / min(max(size.steps, line[0][0]), line[-1][0]))  # the end of the line
            apart = sum((a - b) ** 2 for a, b in zip(coordinates, other_coordinates, strict=True)) + beyond**2
            weight = 1.0 / (apart * apart + _NEAR)
            total += weight
            steps, time = line[0] if len(line) == 1 else (size.steps, _along(line, size.steps))
            fitted = self._fitted(other._replace(steps=steps))
            for part in range(3):
                sums[part] += weight * _log_ratio(time[part], fitted[part])
        fitted = self._fitted(size)
        predicted = self.times[size] = Seconds(*(fitted[part] * math.exp(sums[part] / total) for part in range(3)))
        return predicted

    def _fitted(self, size: Size) -> Seconds:
        row = self.terms(size)
        return Seconds(*(_dot(factors, row) for factors in self.factors))

    def _seen(self, size: Size) -> Size:
        """A size as this kind of call sees it: only cells go from step to step; to all others, every step of a lane is one more row."""
        return size if self.recurrent else size._replace(lanes=1, steps=_tokens(size))

    def _coordinates(self, size: Size) -> tuple[float, ...]:
        """Coordinates of a size, in doublings, for distances between sizes. A layer's units weigh most: its kernel depends on them, while
        the input's width only adds a product.
        """
        return (
            0.5 * math.log2(size.inputs + 1),
            (3 if self.recurrent else 1) * math.log2(size.outputs),
            math.log2(size.lanes),
            math.log2(size.projection + 1),
            2 * math.log2(size.layers),
        )


def _along(line: Sequence[tuple[int, Seconds]], steps: int) -> Seconds:
    """The time for this many steps on the line through the nearest samples; with fewer steps than they have, never below their share."""
    (few, less), (many, more) = next((pair for pair in pairwise(line) if steps <= pair[1][0]), line[-2:])
    share = (steps - few) / (many - few)
    return Seconds(*(max(a + (b - a) * share, a * min(1.0, steps / few)) for a, b in zip(less, more, strict=True)))


def size_of(sample: Sample) -> Size:
    """The size of the call that a sample timed."""
    return Size(sample.inputs, sample.outputs, sample.lanes, sample.steps, sample.projection, sample.layers)


def _log_ratio(real: float, fitted: float) -> float:
    return math.log(real / fitted) if real > 0 and fitted > 0 else 0.0


def _dot(factors: Sequence[float], row: Sequence[float]) -> float:
    return sum(factor * term for factor, term in zip(factors, row, strict=True))


def _solve(rows: Sequence[Sequence[float]], times: Sequence[float]) -> list[float]:
    """Non-negative least squares on relative errors, by coordinate descent; factors ≥ 0 ensure that more work never takes less time.

    If the samples do not determine which term accounts for the time, the last terms win: these are the products, which grow with every
    dimension, so that a few samples cannot make a call's time seem independent of its size.
    """
    width = len(rows[0]) if rows else 0
    used = [(row, time) for row, time in zip(rows, times, strict=True) if time > 0]
    if not used:
        return [0.0] * width
    scaled = [[term / time for term in row] for row, time in used]
    sizes = [max(row[k] for row in scaled) or 1.0 for k in range(width)]
    scaled = [[term / size for term, size in zip(row, sizes, strict=True)] for row in scaled]
    gram = [[sum(row[a] * row[b] for row in scaled) for b in range(width)] for a in range(width)]
    wanted = [sum(row[k] for row in scaled) for k in range(width)]
    factors = [0.0] * width
    for _ in range(_SWEEPS):
        moved = 0.0
        for k in reversed(range(width)):
            if gram[k][k] <= 0:
                continue
            step = (wanted[k] - sum(gram[k][j] * factors[j] for j in range(width))) / gram[k][k]
            new = max(0.0, factors[k] + step)
            moved = max(moved, abs(new - factors[k]))
            factors[k] = new
        if moved < 1e-9:
            break
    return [factor / size for factor, size in zip(factors, sizes, strict=True)]
