"""Fill what a table lacks, as asked: empty cells, and rows that a regular spacing of times implies. Notes give numbers and places.

Shapes: N rows, C columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carrywave.data.sequences import Ints
from carrywave.data.tables.times import Times
from carrywave.errors import DataError

MOST_TIMES, MOST_ROWS = 10, 1 << 20  # gaps may multiply the rows by this, and any table may grow to this many

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Regular:
    """A table's rows with those that were missing."""

    source: Ints  # for each row, the row it was before, or -1
    times: Times
    codes: Ints  # the series of each row


def regular(times: Times, codes: Ints, name: str) -> Regular | None:
    """Insert the rows that are missing between the times of sorted rows; None if none are, or if the spacing is not known."""
    units = times.steps_between(codes)
    if units is None or not (units > 1).any():
        return None
    rows, missing = len(codes), int((units - 1).sum())
    if missing > max(MOST_TIMES * rows, MOST_ROWS):
        raise DataError(
            f"{name}: {missing:,} rows are missing between {rows:,}, too many to fill in; "
            "set data.frequency to the usual step, or data.frequency=none to count rows"
        )
    places = np.concatenate([np.zeros(1, np.int64), np.cumsum(units)])
    source = np.full(int(places[-1]) + 1, -1, np.int64)
    source[places] = np.arange(rows)
    before = np.maximum.accumulate(source)
    return Regular(source, times.with_missing(units, codes), codes[before])


def fill(values_NC: Values, codes: Ints, method: str) -> Values:
    """Return the values without NaN, series by series: `forward`, `interpolate` (both take the nearest value at the ends) or `zero`.

    A column that is empty throughout a series stays NaN, except with `zero`.
    """
    if method == "zero":
        return np.where(np.isnan(values_NC), 0.0, values_NC)
    filled = values_NC.copy()
    edges = np.flatnonzero(np.diff(codes)) + 1
    bounds = [0, *edges.tolist(), len(codes)]
    lacking = np.isnan(values_NC)
    for low, high in pairwise(bounds):
        for column in np.flatnonzero(lacking[low:high].any(axis=0)):
            part, empty = filled[low:high, column], lacking[low:high, column]
            present = np.flatnonzero(~empty)
            if not len(present):
                continue
            at = np.flatnonzero(empty)
            if method == "interpolate":
                part[at] = np.interp(at, present, part[present])
            else:
                part[at] = part[present[np.maximum(np.searchsorted(present, at, side="right") - 1, 0)]]
    return filled


def summary_of_cells(name: str, empty_NC: NDArray[np.bool_], columns: Sequence[str], rows: Ints, method: str) -> str | None:
    """Return a line about cells that were filled; `rows` are the rows of the file, -1 where there was none."""
    counted = empty_NC & (rows >= 0)[:, None]
    many = int(counted.sum())
    if not many:
        return None
    by_column = {column: int(count) for column, count in zip(columns, counted.sum(axis=0), strict=True) if count}
    shown = ", ".join(f"{column}: {count:,}" for column, count in list(by_column.items())[:8])
    shown += f" and {len(by_column) - 8} more columns" if len(by_column) > 8 else ""
    first = int(np.where(counted.any(axis=1), rows, np.iinfo(np.int64).max).min())
    cells = "cell is" if many == 1 else "cells are"
    return f"{name}: {many:,} empty {cells} filled (data.missing={method}; {shown}), the first in row {first + 1}"


def summary_of_rows(name: str, evened: Regular, names: Sequence[str], label: str, method: str, shown: Sequence[Any]) -> str:
    """Return a line about rows that were filled in; `shown` are the times of the rows before."""
    new = evened.source < 0
    many = int(new.sum())
    first = int(np.argmax(new))
    of = f" in series {names[int(evened.codes[first])]}" if len(names) > 1 else ""
    rows = "row is" if many == 1 else "rows are"
    after = shown[int(evened.source[first - 1])]
    return f"{name}: {many:,} missing {rows} filled in (data.missing={method}), the first after {after}{of} (column {label})"
