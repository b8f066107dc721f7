"""Mean and standard deviation of columns, accumulated block by block in float64, and standardisation with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carrywave.errors import DataError

LARGEST = 1e25  # larger magnitudes are rejected on input
LEAST_CHANGE = 1e-3  # of a deviation: the scale of a series that is nearly the same in every season
WHOLE = 2**53  # float64 represents every integer up to here
TOO_WHOLE = "a whole number beyond 2**53 that would be rounded; subtract a common offset from all values, or use a float"
FARTHEST = 1e38  # larger values, in standard deviations, are rejected: float32 ends at 3.4e38
NOISE = 8 * float(np.finfo(np.float64).eps)  # relative to the largest magnitude: a standard deviation below this is rounding error
VISIBLE = 1e-3  # of a column's deviation: values that lose more when they are rounded to float32 are rejected
GROWN = 2.0**400  # deviations are multiplied by this before squaring, so that neither 1e-270 underflows nor 1e25 overflows


def unusable(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return a mask of numbers that are NaN, infinite or absurdly large."""
    refused: NDArray[np.bool_] = ~(np.abs(values) <= LARGEST)
    return refused


def too_whole(values: NDArray[Any]) -> int | None:
    """Return the first integer that float64 would round, or None; values of other dtypes are already rounded."""
    if values.dtype.kind not in "iu" or not values.size or (int(values.max()) <= WHOLE and int(values.min()) >= -WHOLE):
        return None
    flat = values.reshape(-1)
    return int(flat[int(np.argmax((flat > WHOLE) | (flat < -WHOLE if values.dtype.kind == "i" else False)))])


class Moments:
    """Count, mean and sum of squared deviations, merged by Chan's rule: exact up to rounding, however the rows are split into blocks.

    Values are taken relative to the first row, so a constant column has a deviation of exactly zero, without rounding error.
    """

    def __init__(self) -> None:
        self.count = 0
        self._first: NDArray[np.float64] = np.zeros(0)
        self._mean: NDArray[np.float64] = np.zeros(0)
        self._square: NDArray[np.float64] = np.zeros(0)
        self._largest: NDArray[np.float64] = np.zeros(0)
        self._lost: NDArray[np.float64] = np.zeros(0)  # squared differences from the values in float32

    def add(self, rows: NDArray[np.float64]) -> None:
        """Add rows [rows, columns]."""
        if not len(rows):
            return
        if not self.count:
            self._first = np.array(rows[0])
            self._mean, self._square, self._largest, self._lost = (np.zeros_like(self._first) for _ in range(4))
        beyond = rows - self._first
        mean = beyond.mean(axis=0)
        square = (((beyond - mean) * GROWN) ** 2).sum(axis=0)
        total = self.count + len(rows)
        delta = mean - self._mean
        self._mean = self._mean + delta * (len(rows) / total)
        self._square = self._square + square + (delta * GROWN) ** 2 * (self.count * len(rows) / total)
        self._largest = np.maximum(self._largest, np.abs(rows).max(axis=0))
        self._lost = self._lost + (((rows.astype(np.float32) - rows) * GROWN) ** 2).sum(axis=0)
        self.count = total

    def scale(self, *, wanted: bool, columns: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return (mean, std) of each column, with std 1 for a constant column; zeros and ones if no scaling is wanted."""
        if not wanted or not self.count:
            return (0.0,) * columns, (1.0,) * columns
        std = np.where(self._constant, 1.0, self._std)
        return tuple(float(value) for value in self._first + self._mean), tuple(float(value) for value in std)

    def check_unscaled(self, columns: Sequence[str], where: str) -> None:
        """Reject values that are not standardised and, in float32, lose a visible part of what distinguishes them."""
        if not self.count:
            return
        lost = np.where(self._constant, 0.0, np.sqrt(self._lost / self.count) / GROWN / np.where(self._constant, 1.0, self._std))
        if (lost > VISIBLE).any():
            place = int(np.argmax(lost))
            size = f"values up to {self._largest[place]:.6g} with a deviation of {self._std[place]:.3g}"
            fact = f"{where}: {columns[place]} has {size}, of which float32 would lose {lost[place]:.2g} to rounding"
            raise DataError(f"{fact}; remove data.standardize=false, or subtract a common offset from all values")

    @property
    def _std(self) -> NDArray[np.float64]:
        std: NDArray[np.float64] = np.sqrt(self._square / self.count) / GROWN
        return std

    @property
    def _constant(self) -> NDArray[np.bool_]:
        """Columns that are constant up to rounding error: dividing by that error would amplify noise."""
        constant: NDArray[np.bool_] = ~(self._std > NOISE * self._largest)
        return constant


def own_scale(
    rows: NDArray[np.float64], season: int = 0, counted: Sequence[int] = (), missing: NDArray[np.bool_] | None = None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return (mean, std) of the columns of one sequence; with a season, the mean absolute change over it in place of std. Columns that
    are `counted` are not shifted: their scale is (0, mean absolute value). Values that are `missing`, of the first columns, do not count.
    """
    mean, std = moments_of(rows).scale(wanted=True, columns=rows.shape[1])
    if missing is not None and missing.any():
        mean, std = of_present(rows, missing, (mean, std))
    if counted:
        return with_counts((mean, std), counted, np.abs(rows).mean(axis=0))
    if not season or len(rows) <= season:
        return mean, std
    changes = np.abs(rows[season:] - rows[:-season])
    change = changes.mean(axis=0)
    if missing is not None:
        for column in np.flatnonzero(missing.any(axis=0)):
            both = ~(missing[season:, column] | missing[:-season, column])
            change[column] = changes[both, column].mean() if both.any() else 0.0
    # A column that repeats every season up to rounding error has no change to speak of.
    return mean, tuple(float(each) if each > LEAST_CHANGE * one else one for each, one in zip(change, std, strict=True))


def of_present(
    rows: NDArray[np.float64], missing: NDArray[np.bool_], scale: tuple[tuple[float, ...], tuple[float, ...]]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return a scale of columns with that of the values which are there, in columns that lack some of them."""
    mean, std = (list(values) for values in scale)
    for column in np.flatnonzero(missing.any(axis=0)):
        present = rows[~missing[:, column], column]
        if len(present):
            (mean[column],), (std[column],) = moments_of(present[:, None]).scale(wanted=True, columns=1)
    return tuple(mean), tuple(std)


def with_counts(
    scale: tuple[tuple[float, ...], tuple[float, ...]], counted: Sequence[int], size: NDArray[np.float64]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return a scale in which counts are in units of their mean absolute value, `size` [columns], and 0 stays 0; 1 if all of them are 0."""
    mean, std = (list(values) for values in scale)
    for place in counted:
        mean[place], std[place] = 0.0, float(size[place]) or 1.0
    return tuple(mean), tuple(std)


def moments_of(rows: NDArray[np.float64]) -> Moments:
    """Return the moments of the columns of one sequence."""
    moments = Moments()
    moments.add(rows)
    return moments


def standardise(rows: NDArray[Any], mean: tuple[float, ...], std: tuple[float, ...], where: str) -> NDArray[np.float32]:
    """Shift and scale in float64, so that large offsets lose no precision, then cast to float32; `where` locates the rows in errors."""
    with np.errstate(over="ignore"):  # checked below
        scaled: NDArray[np.float64] = (rows - np.array(mean)) / np.array(std)
    if scaled.size and max(scaled.max(), -scaled.min()) > FARTHEST:
        raise DataError(f"{where} contains a number more than {FARTHEST:g} standard deviations from the training mean; check its units")
    return scaled.astype(np.float32)
