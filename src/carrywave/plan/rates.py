"""Seconds of a call from a few measured constants: of a layer, a head, an embedding, what lies between them, and the optimizer.

A call's time is a sum of terms, each a count that follows from its size times a constant of the device: the call itself, steps that follow
one another, recurrent weights that are read at each of them, elements, multiplications. The constants are fitted to timed calls. They rank
plans well, but are wrong where a kernel changes with the size: how far they are from the calls they were fitted to is kept with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import ConfigDict, Field, Strict

CallKind = Literal["layer", "head", "embedding", "plain", "update"]  # plain: dropout and norms; update: norm, clipping and optimizer
Constant = Annotated[float, Strict(), Field(ge=0, allow_inf_nan=False)]
Precision = Literal["fp32", "tf32", "fp64", "bf16", "fp16"]

# The terms of `CallSize` that a kind of call has: to look up rows or to drop elements needs no products.
_TERMS: dict[CallKind, tuple[int, ...]] = {
    "layer": (0, 1, 2, 3, 4, 5),
    "head": (0, 3, 4, 5),
    "embedding": (0, 3, 4),
    "plain": (0, 4),
    "update": (0, 4),
}
_SWEEPS = 400
_QUANTILE = 0.9  # of the errors: nine of ten timed calls are nearer


class Seconds(NamedTuple):
    """Times of a unit or stage on one chunk: forward, backward on the critical path, and the weight gradients that can be deferred."""

    forward: float
    backward: float
    deferred: float

    def plus(self, other: Seconds) -> Seconds:
        """Both, one after the other."""
        return Seconds(self.forward + other.forward, self.backward + other.backward, self.deferred + other.deferred)

    def times(self, factor: float) -> Seconds:
        """All times multiplied by `factor`."""
        return Seconds(self.forward * factor, self.backward * factor, self.deferred * factor)

    @property
    def all(self) -> float:
        """Seconds of forward and backward together."""
        return self.forward + self.backward + self.deferred


NOTHING = Seconds(0.0, 0.0, 0.0)


class CallSize(NamedTuple):
    """What the time of a call depends on. Of a layer, `outputs` are its gates; of an update, its parameters."""

    inputs: int
    outputs: int
    lanes: int
    steps: int
    recurrent: int = 0  # weights that are multiplied with the state at every step; 0: steps do not follow one another

    @property
    def terms(self) -> tuple[float, ...]:
        """The counts that the constants of a `Rate` are multiplied with, in its order."""
        rows, matrix = self.lanes * self.steps, self.inputs * self.outputs + self.recurrent
        in_turn = self.steps if self.recurrent else 0
        return 1.0, in_turn, in_turn * self.recurrent, matrix, rows * self.outputs, rows * matrix


class TimedCall(NamedTuple):
    """Forward and backward of a call, as it was timed."""

    size: CallSize
    forward_seconds: float
    seconds: float  # of both


@dataclass(frozen=True)
class Rate:
    """What one kind of call takes on a device, forward and backward, while `workers` workers of its host do the same."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    kind: CallKind
    precision: Precision
    call_seconds: Constant = 0.0
    step_seconds: Constant = 0.0
    weight_seconds: Constant = 0.0  # for each recurrent weight at each step
    matrix_seconds: Constant = 0.0  # for each weight, once: its gradient is written
    element_seconds: Constant = 0.0  # for each number that comes out
    product_seconds: Constant = 0.0  # for each multiplication
    forward_share: Annotated[float, Strict(), Field(ge=0, le=1)] = 1 / 3
    workers: Annotated[int, Strict(), Field(ge=1)] = 1
    error: Constant = 0.0  # nine of ten timed calls are within this fraction

    @property
    def constants(self) -> tuple[float, ...]:
        """In the order of `CallSize.terms`."""
        return (
            self.call_seconds,
            self.step_seconds,
            self.weight_seconds,
            self.matrix_seconds,
            self.element_seconds,
            self.product_seconds,
        )

    def of(self, size: CallSize) -> Seconds:
        """The times of a call. Weight gradients are the matrix and a third of the products; they can be deferred."""
        terms = size.terms
        each = [constant * term for constant, term in zip(self.constants, terms, strict=True)]
        whole = sum(each)
        forward, deferred = self.forward_share * whole, each[3] + each[5] / 3
        return Seconds(forward, max(0.0, whole - forward - deferred), min(deferred, whole - forward))


def fit(kind: CallKind, precision: Precision, calls: Sequence[TimedCall], workers: int = 1) -> Rate:
    """The constants that come nearest to timed calls."""
    rows = [[term if number in _TERMS[kind] else 0.0 for number, term in enumerate(call.size.terms)] for call in calls]
    seconds = [call.seconds for call in calls]
    constants = _solve(rows, seconds)
    predicted = [sum(one * other for one, other in zip(constants, row, strict=True)) for row in rows]
    errors = sorted(abs(guess / real - 1) for guess, real in zip(predicted, seconds, strict=True))
    shares = sorted(call.forward_seconds / call.seconds for call in calls)
    error = errors[min(len(errors) - 1, int(_QUANTILE * len(errors)))]
    share = min(1.0, shares[len(shares) // 2])
    call, step, weight, matrix, element, product = constants
    return Rate(kind, precision, call, step, weight, matrix, element, product, share, workers, error)


def _solve(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Non-negative least squares on relative errors, by coordinate descent: constants ≥ 0 ensure that more work never takes less time.

    Where timed calls do not tell which term takes the time, the last terms win: products grow with every dimension, so that a few calls
    cannot make the time seem independent of the size.
    """
    import numpy as np  # only measuring needs it

    scaled = np.array(rows) / np.array(seconds)[:, None]
    sizes = np.maximum(scaled.max(axis=0), 1e-300)
    scaled /= sizes
    gram, wanted = scaled.T @ scaled, scaled.sum(axis=0)
    factors = np.zeros(len(wanted))
    for _ in range(_SWEEPS):
        for k in reversed(range(len(wanted))):
            if gram[k, k] > 0:
                factors[k] = max(0.0, factors[k] + (wanted[k] - gram[k] @ factors) / gram[k, k])
    return [float(each) for each in factors / sizes]
