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
Ints = NDArray[np.int64]
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


def scales_of(
    rows: Values, starts: Ints, lengths: Ints, *, season: int = 0, counted: Sequence[int] = (), missing: NDArray[np.bool_] | None = None
) -> tuple[Values, Values]:
    """Return the mean and the std [series, columns] of series that are rows of `rows`: with a season, the mean absolute change over it in
    place of std. Values that are `missing` do not count; columns that are `counted` are not shifted, and in units of their mean absolute
    value, so that 0 stays 0.
    """
    if len(rows) > (total := int(lengths.sum())):
        at = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(total)
        rows, missing = rows[at], None if missing is None else missing[at]
    begins = np.cumsum(lengths) - lengths
    sizes = np.maximum(lengths, 1)[:, None].astype(np.float64)
    present = np.ones(rows.shape, np.bool_)
    first = rows[begins]
    if missing is not None:
        present[:, : missing.shape[1]] = ~missing
        there = np.add.reduceat(present, begins, axis=0, dtype=np.int64)
        present |= np.repeat(there == 0, lengths, axis=0)  # what is missing throughout is as it was filled in
        sizes = np.where(there == 0, sizes, there)
        places = np.where(present, np.arange(len(rows))[:, None], len(rows))
        first = np.take_along_axis(rows, np.minimum.reduceat(places, begins, axis=0), axis=0)
    # Relative to the first value, so that a constant column has a deviation of exactly zero, without rounding error.
    beyond = np.where(present, rows - np.repeat(first, lengths, axis=0), 0.0)
    mean = np.add.reduceat(beyond, begins, axis=0) / sizes
    spread = np.where(present, beyond - np.repeat(mean, lengths, axis=0), 0.0)
    std = np.sqrt(np.add.reduceat(spread * spread, begins, axis=0) / sizes)
    std = np.where(std > NOISE * np.maximum.reduceat(np.where(present, np.abs(rows), 0.0), begins, axis=0), std, 1.0)
    mean = first + mean
    for place in counted:
        size = np.add.reduceat(np.abs(rows[:, place]), begins) / lengths
        mean[:, place], std[:, place] = 0.0, np.where(size > 0, size, 1.0)
    if season and not counted:
        # A column that repeats every season up to rounding error has no change to speak of.
        change = _changes(rows, begins, lengths, season, present)
        std = np.where(change > LEAST_CHANGE * std, change, std)
    return mean, std


def _changes(rows: Values, begins: Ints, lengths: Ints, season: int, present: NDArray[np.bool_]) -> Values:
    """The mean absolute change over a season, [series, columns]; 0 if there is none."""
    later = np.arange(len(rows)) - np.repeat(begins, lengths) >= season
    before = np.maximum(np.arange(len(rows)) - season, 0)
    both = later[:, None] & present & present[before]
    changes = np.add.reduceat(np.where(both, np.abs(rows - rows[before]), 0.0), begins, axis=0)
    return np.asarray(changes / np.maximum(np.add.reduceat(both, begins, axis=0, dtype=np.int64), 1), np.float64)


def scale_of(rows: Values, counted: Sequence[int] = (), missing: NDArray[np.bool_] | None = None) -> Scale:
    """Return (mean, std) of each column of some rows, as `scales_of`."""
    mean, std = scales_of(rows, np.zeros(1, np.int64), np.array([len(rows)]), counted=counted, missing=missing)
    return tuple(mean[0].tolist()), tuple(std[0].tolist())


def standardise(rows: NDArray[Any], mean: tuple[float, ...] | Values, std: tuple[float, ...] | Values) -> NDArray[np.float32]:
    """Shift and scale in float64, so that large offsets lose no precision, then cast to float32; NaN stays NaN."""
    scaled: NDArray[np.float32] = ((rows - np.array(mean)) / np.array(std)).astype(np.float32)
    return scaled
