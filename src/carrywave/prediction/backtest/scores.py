"""Scores of a backtest: over everything, and for each origin, step ahead and column. NumPy only.

Errors are in standardised units, in which columns and series weigh the same, and for a single column also in the units of the file.
Targets of weight 0 (`data.weight`) are left out. Shapes: N forecasts, H horizon, C columns, Q quantiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from carrywave.prediction.backtest.rolled import Rolled

Score = dict[str, object]


def scores(forecasts: Sequence[Rolled], columns: Sequence[str], quantiles: Sequence[float] | None) -> list[Score]:
    """A row for each group: `origin`, `step` and `column` are those of the group, or None for all of them."""
    if not forecasts:
        return []
    steps = forecasts[0].truth_HC.shape[0]
    origins = sorted({each.origin for each in forecasts})
    rows: list[Score] = []
    for origin, step, column in _groups(origins, range(steps), range(len(columns))):
        names: Score = {
            "origin": None if origin is None else origin + 1,
            "step": None if step is None else step + 1,
            "column": None if column is None else columns[column],
        }
        group = [each for each in forecasts if origin is None or each.origin == origin]
        rows.append(names | _score(group, step, column, quantiles, single=column is not None or len(columns) == 1))
    return rows


def _groups(origins: Sequence[int], steps: Sequence[int], columns: Sequence[int]) -> Iterator[tuple[int | None, int | None, int | None]]:
    yield None, None, None
    several = len(columns) > 1  # of one column, its rows would repeat the others
    for column in columns if several else ():
        yield None, None, column
    for origin in origins:
        yield origin, None, None
        for column in columns if several else ():
            yield origin, None, column
    for step in steps:
        yield None, step, None
        for column in columns if several else ():
            yield None, step, column


def _score(
    group: Sequence[Rolled], step: int | None, column: int | None, quantiles: Sequence[float] | None, *, single: bool
) -> dict[str, float]:
    when, which = slice(None) if step is None else slice(step, step + 1), slice(None) if column is None else slice(column, column + 1)
    truth_NHC = np.stack([each.truth_HC[when, which] for each in group])
    real_NHC = np.broadcast_to(np.stack([_counted(each)[when, which] for each in group]), truth_NHC.shape)
    figures: dict[str, float] = {"forecasts": len(group)}
    if not real_NHC.any():
        return figures
    # What counts, one after the other (E); in standardised units, in which differences are taken before steps are picked.
    truth_E, naive_E = truth_NHC[real_NHC], np.stack([each.naive_HC[when, which] for each in group])[real_NHC]
    forecast_EQ = np.stack([each.forecast_HCQ[when, which] for each in group])[real_NHC]
    standard_E = np.stack([each.standard(each.truth_HC)[when, which] for each in group])[real_NHC]
    made_EQ = np.stack([each.standard(each.forecast_HCQ)[when, which] for each in group])[real_NHC]
    season_E = np.stack([each.standard(each.naive_HC)[when, which] for each in group])[real_NHC]
    change_E = np.broadcast_to(np.stack([each.change_C[which] for each in group])[:, None], truth_NHC.shape)[real_NHC]
    size = float(np.abs(truth_E).mean())
    median = None if quantiles is None else list(quantiles).index(0.5) if 0.5 in quantiles else -1
    ours = [] if median == -1 else [("", forecast_EQ[:, median or 0], made_EQ[:, median or 0])]
    for prefix, point_E, point_standard_E in (*ours, ("naive_", naive_E, season_E)):
        error_E, scaled_E = point_E - truth_E, point_standard_E - standard_E
        figures |= {f"{prefix}mae": float(np.abs(scaled_E).mean()), f"{prefix}rmse": math.sqrt(float((scaled_E**2).mean()))}
        changing_E = change_E > 0
        if changing_E.any():
            figures[f"{prefix}mase"] = float((np.abs(scaled_E[changing_E]) / change_E[changing_E]).mean())
        if single:
            figures |= {
                f"{prefix}mae_in_units": float(np.abs(error_E).mean()),
                f"{prefix}rmse_in_units": math.sqrt(float((error_E**2).mean())),
            }
            if size:  # of a forecast without spread, half of its error is the loss at every level
                figures[f"{prefix}weighted_quantile_loss"] = float(np.abs(error_E).mean()) / size
    if quantiles is not None:
        share_Q = np.array(quantiles)
        if single and size:
            gap_EQ = truth_E[:, None] - forecast_EQ
            figures["weighted_quantile_loss"] = 2.0 * float(np.maximum(share_Q * gap_EQ, (share_Q - 1.0) * gap_EQ).mean()) / size
        for low, high in _pairs(quantiles):
            lowest_E, highest_E = (forecast_EQ[:, list(quantiles).index(level)] for level in (low, high))
            figures[f"within_{100 * (high - low):.6g}"] = float(((lowest_E <= truth_E) & (truth_E <= highest_E)).mean())
        gap_EQ = standard_E[:, None] - made_EQ
        figures["pinball"] = float(np.maximum(share_Q * gap_EQ, (share_Q - 1.0) * gap_EQ).mean())
        for place, quantile in enumerate(quantiles):
            figures[f"coverage_{quantile:g}"] = float((truth_E <= forecast_EQ[:, place]).mean())
    return figures


def _pairs(quantiles: Sequence[float]) -> Iterator[tuple[float, float]]:
    """The quantiles below the median with those as far above it."""
    above = {round(1.0 - quantile, 10): quantile for quantile in quantiles if quantile > 0.5}
    yield from ((quantile, above[quantile]) for quantile in quantiles if quantile in above)


def _counted(each: Rolled) -> NDArray[np.bool_]:
    """The steps of a forecast whose truth counts: not those of weight 0."""
    return np.ones(each.truth_HC.shape, np.bool_) if each.counted_HC is None else each.counted_HC
