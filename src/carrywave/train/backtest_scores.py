"""Scores of forecasts from rolling origins: over everything, and for each origin, step ahead and column.

They are in standardised units, in which columns and series weigh the same, and for a single column also in the units of the file.
Shapes: N forecasts, H horizon, C columns, Q quantiles, E targets that count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carrywave.data.tables.channels import forward

Reals = NDArray[np.float64]
Mask = NDArray[np.bool_]
Score = dict[str, object]


@dataclass(frozen=True)
class OriginForecast:
    """One forecast of one series, in the units of the file, beside the truth and the seasonal-naive forecast."""

    series: int
    origin: int  # which one, from 0
    known: int  # rows before it
    forecast_HCQ: Reals  # a single one without quantiles
    truth_HC: Reals
    naive_HC: Reals
    unit_C: Reals  # of a standardised value
    change_C: Reals  # seasonal change within train, in standardised units; 0: unknown
    last_C: Reals  # the values in the last row that was known
    transform: str = "none"  # what was standardised of the values
    counted_HC: Mask | None = None  # targets that are there and whose weight is not 0 (`data.weight`); None: all
    banded: bool = False  # what stands for the quantile 0.5 is the forecast, between the ends of its bands

    def standard(self, values_HCX: Reals) -> Reals:
        """Values [H, C, …] in standardised units, up to a constant that is the same for all."""
        beyond = (None,) * (values_HCX.ndim - 2)
        return forward(values_HCX, self.transform, self.last_C[(None, slice(None), *beyond)]) / self.unit_C[(slice(None), *beyond)]


def scores(forecasts: Sequence[OriginForecast], columns: Sequence[str], quantiles: Sequence[float] | None) -> list[Score]:
    """A row for each group: `origin`, `step` and `column` are those of the group, or None for all of them."""
    if not forecasts:
        return []
    groups: list[tuple[int | None, int | None]] = [(None, None)]
    groups += [(origin, None) for origin in sorted({each.origin for each in forecasts})]
    groups += [(None, step) for step in range(len(forecasts[0].truth_HC))]
    places: list[int | None] = [None, *(range(len(columns)) if len(columns) > 1 else ())]  # of one column, its rows would repeat the others
    rows: list[Score] = []
    for (origin, step), place in product(groups, places):
        some = [each for each in forecasts if origin in (None, each.origin)]
        part = tuple(slice(None) if at is None else slice(at, at + 1) for at in (step, place))
        named: Score = {"origin": None if origin is None else origin + 1, "step": None if step is None else step + 1}
        named["column"] = None if place is None else columns[place]
        rows.append(named | _score(some, part, quantiles, single=place is not None or len(columns) == 1))
    return rows


def _score(
    group: Sequence[OriginForecast], part: tuple[slice, ...], quantiles: Sequence[float] | None, *, single: bool
) -> dict[str, float]:
    def of(values: Callable[[OriginForecast], Any]) -> Any:
        """Values of each forecast [H, C, …], one after the other where the truth counts."""
        return np.stack([values(each)[part] for each in group])[real_NHC]

    real_NHC = np.stack([(np.ones(each.truth_HC.shape, np.bool_) if each.counted_HC is None else each.counted_HC)[part] for each in group])
    figures: dict[str, float] = {"forecasts": len(group)}
    if not real_NHC.any():
        return figures
    # Differences are taken before steps are picked, so numbers are standardised whole.
    truth_E, naive_E, forecast_EQ = of(lambda each: each.truth_HC), of(lambda each: each.naive_HC), of(lambda each: each.forecast_HCQ)
    standard_E, season_E = of(lambda each: each.standard(each.truth_HC)), of(lambda each: each.standard(each.naive_HC))
    made_EQ = of(lambda each: each.standard(each.forecast_HCQ))
    change_E = of(lambda each: np.broadcast_to(each.change_C, each.truth_HC.shape))
    size, changing_E = float(np.abs(truth_E).mean()), change_E > 0
    middle = 0 if quantiles is None else list(quantiles).index(0.5) if 0.5 in quantiles else None
    ours = [] if middle is None else [("", forecast_EQ[:, middle], made_EQ[:, middle])]
    for prefix, point_E, point_standard_E in (*ours, ("naive_", naive_E, season_E)):
        error_E, scaled_E = point_E - truth_E, np.abs(point_standard_E - standard_E)
        figures |= {f"{prefix}mae": float(scaled_E.mean()), f"{prefix}rmse": math.sqrt(float((scaled_E**2).mean()))}
        if changing_E.any():
            figures[f"{prefix}mase"] = float((scaled_E[changing_E] / change_E[changing_E]).mean())
        if single:
            in_units = float(np.abs(error_E).mean())
            figures |= {f"{prefix}mae_in_units": in_units, f"{prefix}rmse_in_units": math.sqrt(float((error_E**2).mean()))}
            if size:  # of a forecast without spread, half of its error is the loss at every level
                figures[f"{prefix}weighted_quantile_loss"] = in_units / size
    if quantiles is not None:
        share_Q = np.array(quantiles)
        if single and size:
            figures["weighted_quantile_loss"] = 2.0 * _pinball(truth_E, forecast_EQ, share_Q) / size
        levels = {round(1.0 - quantile, 10): place for place, quantile in enumerate(quantiles) if quantile > 0.5}
        for low, quantile in enumerate(quantiles):
            if (high := levels.get(quantile)) is not None:
                within_E = (forecast_EQ[:, low] <= truth_E) & (truth_E <= forecast_EQ[:, high])
                figures[f"within_{100 * (quantiles[high] - quantile):.6g}"] = float(within_E.mean())
        figures["pinball"] = _pinball(standard_E, made_EQ, share_Q)
        figures |= {f"coverage_{q:g}": float((truth_E <= forecast_EQ[:, place]).mean()) for place, q in enumerate(quantiles)}
    return figures


def _pinball(truth_E: Reals, forecast_EQ: Reals, share_Q: Reals) -> float:
    gap_EQ = truth_E[:, None] - forecast_EQ
    return float(np.maximum(share_Q * gap_EQ, (share_Q - 1.0) * gap_EQ).mean())
