"""Metrics accumulated as sums on the device: they can be all-reduced, and are read by the host only at the end.

Ignored targets (-100, or NaN for floats) add nothing; labels that train does not have (below -100) count as answered wrongly.

Shapes: T time, B lane, K classes or outputs, H horizon, C columns,
Q quantiles, S series of a part, N all leading dimensions flattened.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from carrywave.data.tables.channels import LARGEST

MOST_COLUMNS = 16  # reported with every evaluation in the units of the data


Row = dict[str, str | int | float]

# From series [B], the row of each with which a lane begins [B], and a number of rows, to [T, B, H, C].
Slope = Callable[[Tensor, Tensor, int], Tensor]


@dataclass(frozen=True)
class Columns:
    """The columns of a forecast, or the numbers of a regression, in the units of the data."""

    names: tuple[str, ...]
    unit_SC: Tensor  # size of one standardised unit, for each series and column; a single row is for all
    series: tuple[str, ...] = ()  # names of the series, if errors of each are wanted
    apart: bool = False  # each sequence is one column of a series: those of a series follow each other, in the order of `names`
    summed: bool = False  # values are changes: the errors of steps add up to that of the data itself
    whole: Slope | None = None  # the targets with those of weight 0, whose errors add up, too
    slope: Slope | None = None  # values are logarithms: by what e^error - 1 is multiplied in the data itself


class Metric(Protocol):
    """Sums that batches are added to."""

    def fits(self, out: object, target: Tensor) -> bool:
        """True if the output can be scored: a user-defined head may return anything."""

    def update(self, out: Tensor, target: Tensor, sequence_B: Tensor | None = None, first_B: Tensor | None = None) -> None:
        """Add a batch: the head's output, its targets, the sequence in each lane, and the step of it with which the output begins."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the sums themselves, not copies: all-reducing them in place gives the metric over all ranks."""

    def values(self) -> dict[str, float]:
        """Return the metrics by name; synchronises with the device."""

    def rows(self, by: str) -> list[Row]:
        """Return the metrics by something that `BY` lists for the task, a row each."""


class Errors:
    """Errors of numeric predictions per step ahead and column: MAE, RMSE; for forecasts MASE; for quantiles pinball loss and coverage.

    The median is the point forecast among quantiles. If 0.5 is not one of them, there is none, and MAE, RMSE and MASE are omitted.
    """

    def __init__(
        self,
        horizon: int,
        outputs: int,
        quantiles: Sequence[float] | None = None,
        change_SC: Tensor | None = None,
        device: torch.device | str = "cpu",
        unit_C: Tensor | None = None,
        columns: Columns | None = None,
    ) -> None:
        self.columns = columns
        self.unit_SC = None if columns is None else columns.unit_SC.to(device, torch.float64)
        self.unit_C = None if unit_C is None else unit_C.to(device, torch.float64)  # size of one standardised unit
        self.quantiles = tuple(quantiles or ())
        self.apart = len(columns.names) if columns is not None and columns.apart else 0  # columns that are sequences of their own
        zeros_HC = torch.zeros(horizon, self.apart or outputs, dtype=torch.float64, device=device)
        self.absolute_HC, self.square_HC, self.count_HC = zeros_HC.clone(), zeros_HC.clone(), zeros_HC.clone()
        # Errors relative to each series' seasonal change within train. A series that never changes there has weight 0, and no MASE.
        self.scaled_HC, self.scaled_count_HC = zeros_HC.clone(), zeros_HC.clone()
        self.weight_SC = None
        if change_SC is not None:
            self.weight_SC = torch.where(change_SC > 0, 1.0 / change_SC.to(torch.float64), 0.0).to(device)
        # In the units of the data: by step and column and, if wanted, by series and column.
        self.unit_absolute_HC, self.unit_square_HC = zeros_HC.clone(), zeros_HC.clone()
        zeros_SC = torch.zeros(len(columns.series) if columns is not None else 0, zeros_HC.shape[1], dtype=torch.float64, device=device)
        self.outputs = outputs
        self.series_absolute_SC, self.series_square_SC, self.series_count_SC = zeros_SC.clone(), zeros_SC.clone(), zeros_SC.clone()
        self.pinball_Q, self.covered_Q = torch.zeros(2, len(self.quantiles), dtype=torch.float64, device=device)
        self._share_Q = torch.tensor(self.quantiles, dtype=torch.float64, device=device)

    def fits(self, out: object, target: Tensor) -> bool:
        """True if there is one number per target, or one per target and quantile."""
        return isinstance(out, Tensor) and out.shape == (*target.shape, *([len(self.quantiles)] if self.quantiles else []))

    @torch.no_grad()
    def update(self, out: Tensor, target: Tensor, sequence_B: Tensor | None = None, first_B: Tensor | None = None) -> None:
        """Add forecasts [T, B, H, C] or [T, B, H, C, Q] with targets [T, B, H, C], or regression outputs [B, K] with targets [B, K].

        `sequence_B` is the series in each lane, -1 in an idle lane; it may be omitted if there is only one series. `first_B` is the row of
        it with which a lane begins, needed if errors depend on the size of what is forecast (`Columns.slope`).
        """
        tail = (len(self.count_HC), self.outputs)
        shape = target.shape if target.ndim > 2 else (1, len(target), *tail)
        target_TBHC = target.reshape(shape)
        real_TBHC = ~target_TBHC.isnan()
        at_B = torch.zeros(shape[1], dtype=torch.int64, device=target.device) if sequence_B is None else sequence_B.clamp(min=0)
        self._add(self.count_HC, real_TBHC.to(torch.float64), at_B)
        if self.quantiles:
            out_TBHCQ = out.to(target.dtype).reshape(*shape, len(self.quantiles))
            below_TBHCQ = (target_TBHC.unsqueeze(-1) <= out_TBHCQ) & real_TBHC.unsqueeze(-1)
            self.covered_Q += below_TBHCQ.flatten(0, -2).sum(0)
            gap_TBHCQ = torch.where(real_TBHC.unsqueeze(-1), target_TBHC.unsqueeze(-1) - out_TBHCQ, 0.0).to(torch.float64)
            self.pinball_Q += torch.maximum(self._share_Q * gap_TBHCQ, (self._share_Q - 1.0) * gap_TBHCQ).flatten(0, -2).sum(0)
            if self._median is None:
                return
            out_TBHC = out_TBHCQ[..., self._median]
        else:
            out_TBHC = out.to(target.dtype).reshape(shape)
        error_TBHC = torch.where(real_TBHC, out_TBHC - target_TBHC, 0.0).to(torch.float64)
        error_TBHC = error_TBHC if self.unit_C is None else error_TBHC * self.unit_C
        self._add(self.absolute_HC, error_TBHC.abs(), at_B)
        self._add(self.square_HC, error_TBHC.square(), at_B)
        if self.weight_SC is not None:
            weight_BHC = self.weight_SC[at_B][:, None].expand(shape[1:])
            self._add(self.scaled_HC, error_TBHC.abs() * weight_BHC, at_B)
            self._add(self.scaled_count_HC, (real_TBHC & (weight_BHC > 0)).to(torch.float64), at_B)
        if self.unit_SC is not None:
            unit_B = at_B if len(self.unit_SC) > 1 else torch.zeros_like(at_B)
            self._add_in_units(error_TBHC, out_TBHC, real_TBHC, unit_B, at_B, first_B)

    def _add(self, sums_HC: Tensor, each_TBHC: Tensor, at_B: Tensor) -> None:
        """Add to sums by step and column; the column of a sequence follows from its number if it has only one."""
        if not self.apart:
            sums_HC += each_TBHC.sum((0, 1))
            return
        column_BC = torch.nn.functional.one_hot(at_B % self.apart, self.apart).to(torch.float64)
        sums_HC += each_TBHC.sum((0, 3)).T @ column_BC

    def _add_in_units(
        self, error_TBHC: Tensor, out_TBHC: Tensor, real_TBHC: Tensor, at_B: Tensor, sequence_B: Tensor, first_B: Tensor | None
    ) -> None:
        assert self.unit_SC is not None
        assert self.columns is not None
        if self.columns.summed and self.columns.whole is not None:
            assert first_B is not None
            whole_TBHC = self.columns.whole(sequence_B, first_B, len(error_TBHC))
            error_TBHC = torch.where(real_TBHC, error_TBHC, out_TBHC.to(torch.float64) - whole_TBHC)
        error_TBHC = error_TBHC * self.unit_SC[at_B][:, None]
        error_TBHC = torch.where(real_TBHC, error_TBHC.cumsum(2), 0.0) if self.columns.summed else error_TBHC
        if self.columns.slope is not None:
            assert first_B is not None
            slope_TBHC = self.columns.slope(at_B, first_B, len(error_TBHC))
            error_TBHC = torch.where(real_TBHC, torch.expm1(error_TBHC.clamp(max=LARGEST)) * slope_TBHC, 0.0)
        self._add(self.unit_absolute_HC, error_TBHC.abs(), at_B)
        self._add(self.unit_square_HC, error_TBHC.square(), at_B)
        if len(self.series_count_SC):
            # A row for each sequence: as many columns as it has, or one column of a series.
            for sums_SC, each_TBHC in (
                (self.series_absolute_SC, error_TBHC.abs()),
                (self.series_square_SC, error_TBHC.square()),
                (self.series_count_SC, real_TBHC.to(torch.float64)),
            ):
                sums_SC.view(-1, self.outputs).index_add_(0, at_B, each_TBHC.sum((0, 2)))

    def tensors(self) -> dict[str, Tensor]:
        """Return the sums."""
        return {
            "absolute": self.absolute_HC,
            "square": self.square_HC,
            "count": self.count_HC,
            "scaled": self.scaled_HC,
            "scaled_count": self.scaled_count_HC,
            "pinball": self.pinball_Q,
            "covered": self.covered_Q,
            **({} if self.columns is None else {"unit_absolute": self.unit_absolute_HC, "unit_square": self.unit_square_HC}),
            **({"series_absolute": self.series_absolute_SC} if len(self.series_count_SC) else {}),
            **({"series_square": self.series_square_SC, "series_count": self.series_count_SC} if len(self.series_count_SC) else {}),
        }

    def values(self) -> dict[str, float]:
        """Return MAE and RMSE of the point forecast, MASE if seasonal changes are known, and the pinball loss and coverage of quantiles."""
        count = self.count_HC.sum()
        values: dict[str, float] = {}
        if self._has_point:
            values = {"mae": _ratio(self.absolute_HC.sum(), count), "rmse": math.sqrt(_ratio(self.square_HC.sum(), count))}
            if (scaled_count := self.scaled_count_HC.sum()) > 0:
                values["mase"] = _ratio(self.scaled_HC.sum(), scaled_count)
        if self.quantiles:
            values["pinball"] = _ratio(self.pinball_Q.mean(), count)
        for quantile, covered in zip(self.quantiles, self.covered_Q, strict=True):
            values[f"coverage_{quantile:g}"] = _ratio(covered, count)
        if self.columns is not None and self._has_point and len(self.columns.names) <= MOST_COLUMNS:
            for row in self.rows("column"):
                values |= {f"{name}[{row['column']}]": float(row[name]) for name in ("mae", "rmse")}
        return values

    def rows(self, by: str) -> list[Row]:
        """Return MAE and RMSE in the units of the data by `column`; by `step` ahead and column; by `series` and column."""
        if not self._has_point:
            return []
        names = tuple(map(str, range(self.outputs))) if self.columns is None else self.columns.names
        in_units = self.columns is not None
        absolute, square = (self.unit_absolute_HC, self.unit_square_HC) if in_units else (self.absolute_HC, self.square_HC)
        count = self.count_HC
        places: list[Row] = [{"step": step} for step in range(1, len(self.count_HC) + 1)]
        if by == "column":
            absolute, square, count, places = absolute.sum(0, keepdim=True), square.sum(0, keepdim=True), count.sum(0, keepdim=True), [{}]
        elif by == "series" and self.columns is not None:
            absolute, square, count = self.series_absolute_SC, self.series_square_SC, self.series_count_SC
            places = [{"series": name} for name in self.columns.series]
        sums = (each.cpu().tolist() for each in (absolute, square, count))
        rows: list[Row] = []
        for place, row_absolute, row_square, row_count in zip(places, *sums, strict=True):
            for name, size, squared, many in zip(names, row_absolute, row_square, row_count, strict=True):
                mean, root = (size / many, math.sqrt(squared / many)) if many else (math.nan, math.nan)
                rows.append({**place, "column": name, "mae": mean, "rmse": root, "targets": int(many)})
        return rows

    @property
    def _has_point(self) -> bool:
        """True if there is a point forecast, which quantiles without the median are not."""
        return not self.quantiles or self._median is not None

    @property
    def _median(self) -> int | None:
        """Index of the quantile that is the point forecast."""
        return self.quantiles.index(0.5) if 0.5 in self.quantiles else None


def _ratio(part: Tensor, whole: Tensor) -> float:
    total = whole.item()
    return part.item() / total if total else math.nan
