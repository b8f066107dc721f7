"""Mean and standard deviation of columns, in float64, and standardisation with them."""

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
    absent = np.zeros((0, 0), np.bool_) if missing is None else np.pad(missing, ((0, 0), (0, rows.shape[1] - missing.shape[1])))
    first = rows[begins]
    if absent.size:
        there = np.add.reduceat(~absent, begins, axis=0, dtype=np.int64)
        absent &= np.repeat(there > 0, lengths, axis=0)  # what is missing throughout is as it was filled in
        sizes = np.where(there == 0, sizes, there)
        places = np.where(absent, len(rows), np.arange(len(rows))[:, None])
        first = np.take_along_axis(rows, np.minimum.reduceat(places, begins, axis=0), axis=0)
    # Relative to the first value, so that a constant column has a deviation of exactly zero, without rounding error.
    beyond = rows - np.repeat(first, lengths, axis=0)
    beyond[absent if absent.size else slice(0)] = 0.0
    mean = np.add.reduceat(beyond, begins, axis=0) / sizes
    beyond -= np.repeat(mean, lengths, axis=0)
    beyond[absent if absent.size else slice(0)] = 0.0
    std = np.sqrt(np.add.reduceat(np.square(beyond, out=beyond), begins, axis=0) / sizes)
    std = np.where(std > NOISE * np.maximum.reduceat(np.abs(rows), begins, axis=0), std, 1.0)
    mean = first + mean
    for place in counted:
        size = np.add.reduceat(np.abs(rows[:, place]), begins) / lengths
        mean[:, place], std[:, place] = 0.0, np.where(size > 0, size, 1.0)
    if season and not counted:
        # A column that repeats every season up to rounding error has no change to speak of.
        change = _changes(rows, begins, lengths, season, ~absent if absent.size else np.ones(rows.shape, np.bool_))
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
