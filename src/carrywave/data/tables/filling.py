"""What a table lacks: rows that the grid of its times implies, and empty cells. Shapes: N rows, C columns."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from carrywave.data.sequences import Ints
from carrywave.data.tables.times import Times

MOST_TIMES, MOST_ROWS = 10, 1 << 20  # gaps may multiply the rows by this, and any table may grow to this many

Values = NDArray[np.float64]


def complete(times: Times, codes: Ints, places: Ints) -> tuple[Times, Ints, Ints] | None:
    """Insert the rows that are missing between sorted rows at these places of the grid: the times, the series and the former row of each,
    -1 for a new one. None if none are missing, if times are irregular, or if nearly all would be new.
    """
    frequency = times.frequency
    if frequency is None or len(codes) < 2:
        return None
    units = np.where(np.diff(codes) == 0, np.diff(places), 1)
    missing = int((units - 1).sum())
    if (places < 0).any() or (units < 1).any() or not missing or missing > max(MOST_TIMES * len(codes), MOST_ROWS):
        return None
    at = np.concatenate([np.zeros(1, np.int64), np.cumsum(units)])
    source = np.full(int(at[-1]) + 1, -1, np.int64)
    source[at] = np.arange(len(codes))
    before = np.maximum.accumulate(source)
    keys = times.keys[before]
    for row in np.flatnonzero(units > 1):
        keys[at[row] + 1 : at[row + 1]] = frequency.ahead(times.keys[row], int(units[row]) - 1)
    return Times(keys, times.zone, times.wall, times.layout, times.day_first, frequency), codes[before], source


def fill(values_NC: Values, codes: Ints, method: str) -> Values:
    """Return the values without NaN, series by series: `none` and `forward` with the value before, `interpolate` on a line between the
    values around, `zero`. What comes before the first value of a series has the mean of its values with `none`, else the first of them.

    A column that is empty throughout a series stays NaN, except with `zero`.
    """
    if method == "zero" or not np.isnan(values_NC).any():
        return np.nan_to_num(values_NC, nan=0.0, posinf=np.inf, neginf=-np.inf)
    series = pd.DataFrame(values_NC).groupby(codes, sort=False)
    if method == "interpolate":
        return np.asarray(series.transform(lambda column: column.interpolate(limit_direction="both")), np.float64)
    return np.asarray(series.ffill().fillna(series.transform("mean") if method == "none" else series.bfill()), np.float64)


def constant(values_NC: Values, codes: Ints) -> tuple[Values, tuple[int, int] | None]:
    """Return columns with the first value of their series in every row, and a row and column that has another one, if any."""
    filled = fill(values_NC, codes, "forward")
    first = np.concatenate([np.zeros(1, np.int64), np.flatnonzero(np.diff(codes)) + 1])
    expected = np.repeat(filled[first], np.diff(np.append(first, len(codes))), axis=0)
    changed = np.argwhere((filled != expected) & ~np.isnan(filled))
    return expected, (int(changed[0][0]), int(changed[0][1])) if len(changed) else None
