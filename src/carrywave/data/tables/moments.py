"""Mean and deviation of columns, gathered block by block in float64, and what is done with them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from carrywave.errors import DataError

LARGEST = 1e25  # beyond this a number is refused where it enters
WHOLE = 2**53  # up to which float64 holds every whole number
TOO_WHOLE = "a whole number beyond 2**53, which would be rounded; subtract what all have in common, or give it as a float"
FARTHEST = 1e38  # in deviations, beyond which a number is refused: float32 ends soon after
NOISE = 8 * float(np.finfo(np.float64).eps)  # of the largest number: a deviation below it is rounding
GROWN = 2.0**400  # squares of deviations are kept times its square, so that neither those of 1e-270 vanish nor those of 1e25 overflow


def unusable(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Where numbers are NaN, infinite or absurdly large."""
    refused: NDArray[np.bool_] = ~(np.abs(values) <= LARGEST)
    return refused


def too_whole(values: NDArray[Any]) -> int | None:
    """The first of whole numbers that float64 would round, where there is one; values of another kind are rounded already."""
    if values.dtype.kind not in "iu" or not values.size or (int(values.max()) <= WHOLE and int(values.min()) >= -WHOLE):
        return None
    flat = values.reshape(-1)
    return int(flat[int(np.argmax((flat > WHOLE) | (flat < -WHOLE if values.dtype.kind == "i" else False)))])


class Moments:
    """Count, mean and sum of squared deviations, merged by Chan's rule: exact to rounding however the rows are cut.

    All is counted from the first row, so that of a constant column nothing is left, not even rounding.
    """

    def __init__(self) -> None:
        self.count = 0
        self._first: NDArray[np.float64] = np.zeros(0)
        self._mean: NDArray[np.float64] = np.zeros(0)
        self._square: NDArray[np.float64] = np.zeros(0)
        self._largest: NDArray[np.float64] = np.zeros(0)

    def add(self, rows: NDArray[np.float64]) -> None:
        """Adds rows [rows, columns]."""
        if not len(rows):
            return
        if not self.count:
            self._first = np.array(rows[0])
            self._mean, self._square, self._largest = (np.zeros_like(self._first) for _ in range(3))
        beyond = rows - self._first
        mean = beyond.mean(axis=0)
        square = (((beyond - mean) * GROWN) ** 2).sum(axis=0)
        total = self.count + len(rows)
        delta = mean - self._mean
        self._mean = self._mean + delta * (len(rows) / total)
        self._square = self._square + square + (delta * GROWN) ** 2 * (self.count * len(rows) / total)
        self._largest = np.maximum(self._largest, np.abs(rows).max(axis=0))
        self.count = total

    def scale(self, *, wanted: bool, columns: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """(mean, std) of each column; a constant column keeps std 1. Zeros and ones where no scaling is wanted."""
        if not wanted or not self.count:
            return (0.0,) * columns, (1.0,) * columns
        std = np.sqrt(self._square / self.count) / GROWN
        # What was constant before it was calculated with differs by rounding; dividing by that would blow up noise.
        std = np.where(std > NOISE * self._largest, std, 1.0)
        return tuple(float(value) for value in self._first + self._mean), tuple(float(value) for value in std)


def own_scale(rows: NDArray[np.float64]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(mean, std) of the columns of one sequence."""
    moments = Moments()
    moments.add(rows)
    return moments.scale(wanted=True, columns=rows.shape[1])


def standardise(rows: NDArray[Any], mean: tuple[float, ...], std: tuple[float, ...], where: str) -> NDArray[np.float32]:
    """Shifted and scaled in float64, so that large offsets lose nothing, then float32; `where` is how an error names the rows."""
    with np.errstate(over="ignore"):  # refused below
        scaled: NDArray[np.float64] = (rows - np.array(mean)) / np.array(std)
    if scaled.size and max(scaled.max(), -scaled.min()) > FARTHEST:
        raise DataError(f"{where} holds a number more than {FARTHEST:g} deviations of the training data from its mean; check its units")
    return scaled.astype(np.float32)
