"""Scores of a backtest: over everything, and for each origin, step ahead and column. NumPy only.

Errors are in standardised units, in which columns and series weigh the same, and for a single column also in the units of the file. Shapes:
N forecasts, H horizon, C columns, Q quantiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from carrywave.runs.backtest.rolled import Rolled

Score = dict[str, object]


def scores(forecasts: Sequence[Rolled], columns: Sequence[str], quantiles: Sequence[float] | None) -> list[Score]:
    """A row for each group: `origin`, `step` and `column` are those of the group, or None for all of them."""
    if not forecasts:
        return []
    steps = forecasts[0].truth_HC.shape[0]
    origins = sorted({each.origin for each in forecasts})
    found: list[Score] = []
    for origin, step, column in _groups(origins, range(steps), range(len(columns))):
        names: Score = {
            "origin": None if origin is None else origin + 1,
            "step": None if step is None else step + 1,
            "column": None if column is None else columns[column],
        }
        group = [each for each in forecasts if origin is None or each.origin == origin]
        found.append(names | _score(group, step, column, quantiles, single=column is not None or len(columns) == 1))
    return found


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
    forecast_NHCQ = np.stack([each.forecast_HCQ[when, which] for each in group])
    naive_NHC = np.stack([each.naive_HC[when, which] for each in group])
    # In standardised units, in which differences are taken before steps are picked.
    standard_NHC = np.stack([each.standard(each.truth_HC)[when, which] for each in group])
    made_NHCQ = np.stack([each.standard(each.forecast_HCQ)[when, which] for each in group])
    season_NHC = np.stack([each.standard(each.naive_HC)[when, which] for each in group])
    change_N1C = np.stack([each.change_C[which] for each in group])[:, None]
    found: dict[str, float] = {"forecasts": len(group)}
    size = float(np.abs(truth_NHC).mean())
    median = None if quantiles is None else list(quantiles).index(0.5) if 0.5 in quantiles else -1
    ours = [] if median == -1 else [("", forecast_NHCQ[..., median or 0], made_NHCQ[..., median or 0])]
    for prefix, point_NHC, point_standard_NHC in (*ours, ("naive_", naive_NHC, season_NHC)):
        error_NHC, scaled_NHC = point_NHC - truth_NHC, point_standard_NHC - standard_NHC
        found |= {f"{prefix}mae": float(np.abs(scaled_NHC).mean()), f"{prefix}rmse": math.sqrt(float((scaled_NHC**2).mean()))}
        known = np.broadcast_to(change_N1C > 0, scaled_NHC.shape)
        if known.any():
            found[f"{prefix}mase"] = float((np.abs(scaled_NHC) / np.where(change_N1C > 0, change_N1C, 1.0))[known].mean())
        if single:
            found |= {
                f"{prefix}mae_in_units": float(np.abs(error_NHC).mean()),
                f"{prefix}rmse_in_units": math.sqrt(float((error_NHC**2).mean())),
            }
            if size:  # of a forecast without spread, half of its error is the loss at every level
                found[f"{prefix}weighted_quantile_loss"] = float(np.abs(error_NHC).mean()) / size
    if quantiles is not None:
        share_Q = np.array(quantiles)
        if single and size:
            gap_NHCQ = truth_NHC[..., None] - forecast_NHCQ
            found["weighted_quantile_loss"] = 2.0 * float(np.maximum(share_Q * gap_NHCQ, (share_Q - 1.0) * gap_NHCQ).mean()) / size
        if 0.1 in quantiles and 0.9 in quantiles:
            low, high = (forecast_NHCQ[..., list(quantiles).index(level)] for level in (0.1, 0.9))
            found["within_80"] = float(((low <= truth_NHC) & (truth_NHC <= high)).mean())
        gap_NHCQ = standard_NHC[..., None] - made_NHCQ
        found["pinball"] = float(np.maximum(share_Q * gap_NHCQ, (share_Q - 1.0) * gap_NHCQ).mean())
        for place, quantile in enumerate(quantiles):
            found[f"coverage_{quantile:g}"] = float((truth_NHC <= forecast_NHCQ[..., place]).mean())
    return found
