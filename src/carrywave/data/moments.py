"""Mean and deviation of columns, gathered block by block in float64, and what is done with them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

# Beyond this a number is refused where it enters: whatever train's deviation (never below 1e-12), what is scaled fits float32.
LARGEST = 1e25


def unusable(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Where numbers are NaN, infinite or absurdly large."""
    refused: NDArray[np.bool_] = ~(np.abs(values) <= LARGEST)
    return refused


class Moments:
    """Count, mean and sum of squared deviations, merged by Chan's rule: exact to rounding however the rows are cut."""

    def __init__(self) -> None:
        self.count = 0
        self._mean: NDArray[np.float64] = np.zeros(0)
        self._square: NDArray[np.float64] = np.zeros(0)

    def add(self, rows: NDArray[np.float64]) -> None:
        """Adds rows [rows, columns]."""
        if not len(rows):
            return
        mean = rows.mean(axis=0)
        square = ((rows - mean) ** 2).sum(axis=0)
        if not self.count:
            self.count, self._mean, self._square = len(rows), mean, square
            return
        total = self.count + len(rows)
        delta = mean - self._mean
        self._mean = self._mean + delta * (len(rows) / total)
        self._square = self._square + square + delta**2 * (self.count * len(rows) / total)
        self.count = total

    def scale(self, *, wanted: bool, columns: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """(mean, std) of each column; a constant column keeps std 1. Zeros and ones where no scaling is wanted."""
        if not wanted or not self.count:
            return (0.0,) * columns, (1.0,) * columns
        std = np.sqrt(self._square / self.count)
        # Rounding leaves a trace of deviation in a constant column; dividing by it would blow up noise.
        std = np.where(std > 1e-12 * np.maximum(1.0, np.abs(self._mean)), std, 1.0)
        return tuple(float(value) for value in self._mean), tuple(float(value) for value in std)


def own_scale(rows: NDArray[np.float64]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(mean, std) of the columns of one sequence."""
    moments = Moments()
    moments.add(rows)
    return moments.scale(wanted=True, columns=rows.shape[1])


def standardise(rows: NDArray[Any], mean: tuple[float, ...], std: tuple[float, ...]) -> NDArray[np.float32]:
    """Shifted and scaled in float64, so that large offsets lose nothing, then float32."""
    scaled: NDArray[np.float32] = ((rows - np.array(mean)) / np.array(std)).astype(np.float32)
    return scaled
