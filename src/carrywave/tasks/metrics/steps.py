"""Metrics of regression at every step, for each series: sums over its steps that have a target, from which all of them follow.

As sums, they are the same on any number of workers. With observations o and estimates e of a series, their means m and deviations s, and
their correlation r:

    NSE = 1 - sum of (e - o)² / sum of (o - m_o)²                        (Nash and Sutcliffe; 1 is perfect, 0 is the mean of the series)
    KGE = 1 - sqrt((r - 1)² + (s_e / s_o - 1)² + (m_e / m_o - 1)²)       (Gupta et al., 2009)

A series whose observations are all the same, or that has fewer than two, has neither. Shapes: T time, B lane, S series, C targets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from carrywave.data.codec import Codec
from carrywave.tasks.metrics.errors import Row

SUMS = ("count", "truth", "guess", "truth_square", "guess_square", "product", "square", "absolute")
LEAST_VARIANCE = 1e-12  # in standardised units: less is the rounding of float32

Values = NDArray[np.float64]


class StepErrors:
    """NSE, KGE, RMSE and MAE by series and target; of several series, the median of NSE and KGE."""

    def __init__(self, codec: Codec, series: Sequence[str], device: torch.device | str = "cpu") -> None:
        self.columns, self.series = codec.step_targets, tuple(series) or ("",)
        self.unit_C, self.mean_C = (np.array(values, np.float64) for values in (codec.target_std, codec.target_mean))
        shape = len(SUMS), len(self.series), len(self.columns)
        self.sums = torch.zeros(shape, dtype=torch.float64, device=device)

    def fits(self, out: object, target: Tensor) -> bool:
        """True if there is one number per target; those of the NSE loss have their weights beside them."""
        return isinstance(out, Tensor) and out.ndim == 3 and out.shape in (target.shape, target.shape[:-1])

    @torch.no_grad()
    def update(self, out: Tensor, target: Tensor, sequence_B: Tensor | None = None, first_B: Tensor | None = None) -> None:
        """Add estimates [T, B, C] and targets [T, B, C], or [T, B, C, 2] with weights."""
        target_TBC = (target if target.shape == out.shape else target[..., 0]).to(torch.float64)
        real_TBC = ~target_TBC.isnan()
        truth_TBC = torch.where(real_TBC, target_TBC, 0.0)
        guess_TBC = torch.where(real_TBC, out.to(torch.float64), 0.0)
        gap_TBC = guess_TBC - truth_TBC
        at_B = torch.zeros(out.shape[1], dtype=torch.int64, device=out.device) if sequence_B is None else sequence_B.clamp(min=0)
        each = (real_TBC, truth_TBC, guess_TBC, truth_TBC**2, guess_TBC**2, truth_TBC * guess_TBC, gap_TBC**2, gap_TBC.abs())
        self.sums.index_add_(1, at_B, torch.stack([values.sum(0, dtype=torch.float64) for values in each]))

    def tensors(self) -> dict[str, Tensor]:
        """Return the sums."""
        return {"steps": self.sums}

    def values(self) -> dict[str, float]:
        """Return MAE and RMSE over all steps, and the medians of NSE and KGE over series: of several targets, over all of them, and each.

        A single target is scored in the units of the data, several in standardised ones, which can be averaged.
        """
        sums = self._of(self.sums.sum(1, keepdim=True))
        single = len(self.columns) == 1
        count = sums["count"].sum()
        unit_C = self.unit_C if single else np.ones_like(self.unit_C)
        values = {
            "mae": _ratio((sums["absolute"] * unit_C).sum(), count),
            "rmse": math.sqrt(_ratio((sums["square"] * unit_C**2).sum(), count)),
        }
        nse_SC, kge_SC = self._efficiencies(self._of(self.sums))
        values |= {"nse_median": _median(nse_SC), "kge_median": _median(kge_SC)}
        for place, column in enumerate(self.columns if not single else ()):
            values |= {f"nse_median[{column}]": _median(nse_SC[:, place]), f"kge_median[{column}]": _median(kge_SC[:, place])}
        if not single:
            for row in self.rows("column"):
                values |= {f"{name}[{row['column']}]": float(row[name]) for name in ("mae", "rmse")}
        return values

    def rows(self, by: str) -> list[Row]:
        """Return the metrics by `series` and target, or by target (`column`), in the units of the data."""
        sums = self._of(self.sums if by == "series" else self.sums.sum(1, keepdim=True))
        nse_SC, kge_SC = self._efficiencies(self._of(self.sums))
        rows: list[Row] = []
        for number in range(len(sums["count"])):
            for place, column in enumerate(self.columns):
                count = sums["count"][number, place]
                efficiencies = (
                    (nse_SC[number, place], kge_SC[number, place])
                    if by == "series"
                    else (_median(nse_SC[:, place]), _median(kge_SC[:, place]))
                )
                names = ("nse", "kge") if by == "series" else ("nse_median", "kge_median")
                row: Row = {"series": self.series[number]} if by == "series" else {}
                row |= {"column": column, **dict(zip(names, map(float, efficiencies), strict=True))}
                row["mae"] = _ratio(sums["absolute"][number, place], count) * float(self.unit_C[place])
                row["rmse"] = math.sqrt(_ratio(sums["square"][number, place], count)) * float(self.unit_C[place])
                rows.append(row | {"targets": int(count)})
        return rows

    def _of(self, sums: Tensor) -> dict[str, Values]:
        """The sums by name, on the host."""
        return dict(zip(SUMS, sums.cpu().numpy(), strict=True))

    def _efficiencies(self, of: dict[str, Values]) -> tuple[Values, Values]:
        """NSE and KGE of each series and target; NaN where there is none."""
        with np.errstate(divide="ignore", invalid="ignore"):
            mean_o, mean_e = of["truth"] / of["count"], of["guess"] / of["count"]
            variance_o = of["truth_square"] / of["count"] - mean_o**2
            variance_e = np.maximum(of["guess_square"] / of["count"] - mean_e**2, 0.0)
            varied = (of["count"] > 1) & (variance_o > LEAST_VARIANCE * np.maximum(1.0, mean_o**2))
            nse = 1.0 - of["square"] / of["count"] / variance_o
            together = (of["product"] / of["count"] - mean_o * mean_e) / np.sqrt(variance_o * variance_e)
            correlation = np.where(variance_e > LEAST_VARIANCE, together, 0.0)  # a constant follows nothing
            in_units_o, in_units_e = (mean * self.unit_C + self.mean_C for mean in (mean_o, mean_e))
            parts = (correlation - 1.0) ** 2 + (np.sqrt(variance_e / variance_o) - 1.0) ** 2 + (in_units_e / in_units_o - 1.0) ** 2
            kge = 1.0 - np.sqrt(parts)
        return np.where(varied, nse, np.nan), np.where(varied & np.isfinite(kge), kge, np.nan)


def _median(values: Values) -> float:
    present = values[~np.isnan(values)]
    return float(np.median(present)) if len(present) else math.nan


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole else math.nan
