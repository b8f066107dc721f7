"""The scale of the last values: mean and deviation of a window that moves along a series (`data.standardize: window`). NumPy only.

At row t of a series x, whose first row is 0, with the last N values x[t-N+1], …, x[t], where a row before the first counts as the first
(x[i] = x[0] for i < 0), so that there are always N values:

    mean      = sum of the N values / N
    variance  = sum of (value - mean)² / N
    deviation = sqrt(max(variance, LEAST_DEVIATION²))

Values are those of `Sequences.inputs`, in units of train's deviation, so a stretch that hardly changes is not blown up more than
1 / LEAST_DEVIATION times. Nothing after row t is read. Shapes: R rows, C columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from carrywave.data.sequences import Ints, Sequences
from carrywave.spec.step_inputs import LEAST_DEVIATION


def window_scale(values_RC: NDArray[Any], steps: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return mean and deviation [R, C] at every row of one series."""
    # Relative to the first value, so that rows before the first add nothing to the sums, and a large offset costs no digits.
    first_C = np.asarray(values_RC[:1], np.float64)
    gap_RC = np.asarray(values_RC, np.float64) - first_C
    mean_RC = _moving_sum(gap_RC, steps) / steps
    variance_RC = _moving_sum(gap_RC**2, steps) / steps - mean_RC**2
    return mean_RC + first_C, np.sqrt(np.maximum(variance_RC, LEAST_DEVIATION**2))


def _moving_sum(values_RC: NDArray[np.float64], steps: int) -> NDArray[np.float64]:
    sums = np.cumsum(values_RC, axis=0)
    sums[steps:] -= sums[:-steps].copy()
    return sums


class WindowScale:
    """Mean and deviation at any row of a part's sequences, computed once for all of them."""

    def __init__(self, data: Sequences, columns: Ints, steps: int) -> None:
        order = np.argsort(data.starts, kind="stable")
        self._starts, lengths = data.starts[order], data.lengths[order]
        self._places = np.cumsum(lengths) - lengths  # where each sequence begins below
        self._mean_RC, self._deviation_RC = (np.empty((int(lengths.sum()), len(columns)), np.float32) for _ in range(2))
        firsts = self._starts if data.firsts is None else data.firsts[order]
        for start, length, first, place in zip(self._starts, lengths, firsts, self._places, strict=True):
            rows, before = slice(int(place), int(place + length)), int(min(start - first, steps - 1))
            mean_RC, deviation_RC = window_scale(data.inputs[start - before : start + length][:, columns], steps)
            self._mean_RC[rows], self._deviation_RC[rows] = mean_RC[before:], deviation_RC[before:]

    def __call__(self, rows: Ints) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return mean and deviation [..., columns] at the given rows of `data.inputs`."""
        which = np.searchsorted(self._starts, rows, side="right") - 1
        at = self._places[which] + rows - self._starts[which]
        return self._mean_RC[at], self._deviation_RC[at]
