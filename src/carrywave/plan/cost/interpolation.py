"""Seconds of a call from samples of other sizes: exact where one matches, else a sum of terms that has the right shape, put right by
the samples that are near.

A sum of terms (a call, a step, a product) fitted to all samples goes on sensibly where there are none, and errs where a cache ends or a
kernel changes. What it errs by at the samples is therefore carried over to their neighbours. Pure Python: there are a few dozen samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from carrywave.plan.cost.profile import Sample

_SWEEPS = 400
_NEAR = 1e-9


class Size(NamedTuple):
    """What a call's time depends on; see `profile.Sample`."""

    inputs: int
    outputs: int
    lanes: int
    steps: int
    projection: int = 0
    layers: int = 1


class Seconds(NamedTuple):
    """Of one unit or stage on one chunk: forward, the backward that others wait for, and weights' gradients that can be put off."""

    forward: float
    backward: float
    put_off: float

    def __add__(self, other: object) -> Seconds:
        assert isinstance(other, Seconds)
        return Seconds(self.forward + other.forward, self.backward + other.backward, self.put_off + other.put_off)

    def times(self, factor: float) -> Seconds:
        """All of it so many times as long."""
        return Seconds(self.forward * factor, self.backward * factor, self.put_off * factor)

    @property
    def all(self) -> float:
        return self.forward + self.backward + self.put_off


NOTHING = Seconds(0.0, 0.0, 0.0)

Terms = Callable[[Size], tuple[float, ...]]


def _tokens(size: Size) -> int:
    return size.steps * size.lanes


def _lstm(size: Size) -> tuple[float, ...]:
    """A call, and a gradient of the inputs' weights; a step, and the recurrent weights read at each; cells; what the recurrent product
    takes more, for it has only the lanes of a step at once; both products.
    """
    hidden, back = size.outputs, size.projection or size.outputs
    cells = _tokens(size) * hidden
    return (1.0, hidden * size.inputs, size.steps, size.steps * hidden * back, cells, cells * back, cells * (back + size.inputs))


def _rows(size: Size) -> tuple[float, ...]:
    """A call; a gradient of the whole matrix; numbers looked up."""
    return (1.0, size.inputs * size.outputs, _tokens(size) * size.outputs)


def _product(size: Size) -> tuple[float, ...]:
    """A call; a gradient of the whole matrix; results; the product."""
    return (1.0, size.inputs * size.outputs, _tokens(size) * size.outputs, _tokens(size) * size.inputs * size.outputs)


def _tensors(size: Size) -> tuple[float, ...]:
    """A call; tensors; numbers in all of them."""
    return (1.0, size.inputs, size.outputs)


def _elements(size: Size) -> tuple[float, ...]:
    return (1.0, _tokens(size) * size.outputs)


TERMS: dict[str, Terms] = {
    "lstm": _lstm,
    "embedding": _rows,
    "softmax": _product,
    "linear": _product,
    "dropout": _elements,
    "norm": _elements,
    "optimizer": _tensors,
}


class Fit:
    """The times of one kind of call in one precision."""

    def __init__(self, kind: str, samples: Sequence[Sample]) -> None:
        self.terms = TERMS[kind]
        self.sizes = [size_of(sample) for sample in samples]
        # Backward apart from what can be put off: the two scale differently.
        times = [Seconds(s.forward_seconds, s.backward_seconds - s.put_off_seconds, s.put_off_seconds) for s in samples]
        self.known = dict(zip(self.sizes, times, strict=True))  # and what was worked out from them
        rows = [self.terms(size) for size in self.sizes]
        self.factors = [_solve(rows, [time[part] for time in times]) for part in range(3)]
        self.places = [_place(size) for size in self.sizes]
        self.off = [
            tuple(_log_ratio(time[part], _dot(self.factors[part], row)) for part in range(3)) for time, row in zip(times, rows, strict=True)
        ]

    def __call__(self, size: Size) -> Seconds:
        """The seconds of a call of this size."""
        if (known := self.known.get(size)) is not None:
            return known
        place, row = _place(size), self.terms(size)
        total, sums = 0.0, [0.0, 0.0, 0.0]
        for other, off in zip(self.places, self.off, strict=True):
            apart = sum((a - b) ** 2 for a, b in zip(place, other, strict=True))
            weight = 1.0 / (apart * apart + _NEAR)
            total += weight
            for part in range(3):
                sums[part] += weight * off[part]
        found = Seconds(*(_dot(self.factors[part], row) * math.exp(sums[part] / total) for part in range(3)))
        self.known[size] = found
        return found


def size_of(sample: Sample) -> Size:
    """The size of a sample's call."""
    return Size(sample.inputs, sample.outputs, sample.lanes, sample.steps, sample.projection, sample.layers)


def _place(size: Size) -> tuple[float, ...]:
    """Where a size stands among others, in doublings. Kernels change with widths more than with steps."""
    return (
        math.log2(size.inputs + 1),
        2 * math.log2(size.outputs),
        math.log2(size.lanes),
        0.5 * math.log2(size.steps),
        math.log2(size.projection + 1),
        2 * math.log2(size.layers),
    )


def _log_ratio(real: float, fitted: float) -> float:
    return math.log(real / fitted) if real > 0 and fitted > 0 else 0.0


def _dot(factors: Sequence[float], row: Sequence[float]) -> float:
    return sum(factor * term for factor, term in zip(factors, row, strict=True))


def _solve(rows: Sequence[Sequence[float]], times: Sequence[float]) -> list[float]:
    """Factors of at least zero, so that more work never takes less time, that make relative errors least, term after term.

    Where samples leave open which term the time goes to, it goes to the last ones: products, which grow with everything, so that a few
    samples do not make a call seem free of its size.
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
