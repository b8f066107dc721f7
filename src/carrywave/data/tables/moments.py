"""Mean and standard deviation of columns, accumulated block by block in float64, and standardisation with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGEST = 1e25  # larger magnitudes, such as the 9.97e36 that stands for nothing in netCDF files, are rejected on input
LEAST_CHANGE = 1e-3  # of a deviation: the scale of a series that is nearly the same in every season
NOISE = 8 * float(np.finfo(np.float64).eps)  # relative to the largest magnitude: a standard deviation below this is rounding error

Values = NDArray[np.float64]
Scale = tuple[tuple[float, ...], tuple[float, ...]]  # mean and deviation of each column


def unusable(values: Values) -> NDArray[np.bool_]:
    """Return a mask of numbers that are NaN, infinite or absurdly large."""
    refused: NDArray[np.bool_] = ~(np.abs(values) <= LARGEST)
    return refused


class Moments:
    """Count, mean and sum of squared deviations, merged by Chan's rule: exact up to rounding, however the rows are split into blocks.

    Values are taken relative to the first row, so a constant column has a deviation of exactly zero, without rounding error.
    """

    def __init__(self) -> None:
        self.count = 0
        self._first, self._mean, self._square, self._largest = (np.zeros(0) for _ in range(4))

    def add(self, rows: Values) -> None:
        """Add rows [rows, columns]."""
        if not len(rows):
            return
        if not self.count:
            self._first = np.array(rows[0])
            self._mean, self._square, self._largest = (np.zeros_like(self._first) for _ in range(3))
        beyond = rows - self._first
        mean = beyond.mean(axis=0)
        total = self.count + len(rows)
        delta = mean - self._mean
        self._mean = self._mean + delta * (len(rows) / total)
        self._square = self._square + ((beyond - mean) ** 2).sum(axis=0) + delta**2 * (self.count * len(rows) / total)
        self._largest = np.maximum(self._largest, np.abs(rows).max(axis=0))
        self.count = total

    def scale(self, *, wanted: bool, columns: int) -> Scale:
        """Return (mean, std) of each column, with std 1 for one that is constant up to rounding error: dividing by that would amplify
        noise. Zeros and ones if no scaling is wanted.
        """
        if not wanted or not self.count:
            return (0.0,) * columns, (1.0,) * columns
        std = np.sqrt(self._square / self.count)
        std = np.where(std > NOISE * self._largest, std, 1.0)
        return tuple((self._first + self._mean).tolist()), tuple(std.tolist())


def scale_of(blocks: Sequence[Values], counted: Sequence[int] = (), missing: Sequence[NDArray[np.bool_]] = ()) -> Scale:
    """Return (mean, std) of the columns of all rows of some blocks. Values that are `missing` do not count; columns that are `counted` are
    not shifted, and in units of their mean absolute value, so that 0 stays 0.
    """
    moments = Moments()
    for rows in blocks:
        moments.add(rows)
    mean, std = map(list, moments.scale(wanted=True, columns=blocks[0].shape[1]))
    lacking = np.concatenate(missing) if missing else np.zeros((0, 0), np.bool_)
    for column in np.flatnonzero(lacking.any(axis=0)):
        present = Moments()
        present.add(np.concatenate([rows[:, column] for rows in blocks])[~lacking[:, column], None])
        if present.count:
            (mean[column],), (std[column],) = present.scale(wanted=True, columns=1)
    if counted:
        size = np.sum([np.abs(rows).sum(axis=0) for rows in blocks], axis=0) / max(moments.count, 1)
        for place in counted:
            mean[place], std[place] = 0.0, float(size[place]) or 1.0
    return tuple(mean), tuple(std)


def own_scale(rows: Values, season: int = 0, counted: Sequence[int] = (), missing: NDArray[np.bool_] | None = None) -> Scale:
    """Return the scale of one sequence, as `scale_of` does; with a season, the mean absolute change over it in place of std."""
    mean, std = scale_of([rows], counted, [] if missing is None else [missing])
    if counted or not season or len(rows) <= season:
        return mean, std
    changes = np.abs(rows[season:] - rows[:-season])
    change = changes.mean(axis=0)
    if missing is not None:
        for column in np.flatnonzero(missing.any(axis=0)):
            both = ~(missing[season:, column] | missing[:-season, column])
            change[column] = changes[both, column].mean() if both.any() else 0.0
    # A column that repeats every season up to rounding error has no change to speak of.
    return mean, tuple(float(each) if each > LEAST_CHANGE * one else one for each, one in zip(change, std, strict=True))


def standardise(rows: NDArray[Any], mean: tuple[float, ...], std: tuple[float, ...]) -> NDArray[np.float32]:
    """Shift and scale in float64, so that large offsets lose no precision, then cast to float32; NaN stays NaN."""
    scaled: NDArray[np.float32] = ((rows - np.array(mean)) / np.array(std)).astype(np.float32)
    return scaled
