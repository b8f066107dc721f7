"""Bands around forecasts of single values: as wide as the errors on held-out rows were, so that they hold what they are asked to.

Split conformal prediction, symmetric: a band of share p reaches as far as the ceil((n + 1) p)-th smallest of n absolute errors, for each
step ahead and column, in standardised units, so that large and small series share their errors. Where the forecaster reads values in the
scale of the last ones (`data.standardize: window`), errors are in units of the deviation of these, so that bands are wide where a series
moves much. With changes from row to row (`data.transform: diff`), errors are those of their sums, as they are in the file.

Shapes: T time, B lane, H horizon, C columns, Q quantiles, L shares, N origins, O origins of one series.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from carrywave.spec.data_spec import DataSpec
from carrywave.tasks.metrics.errors import Columns, Errors, Slope

Reals = NDArray[np.float64]

ROUNDING = 1e-9  # 0.95 of 100 is 95, not a little more
MUCH = 1.08  # how many times better bands of one width must be; those of random walks were by 1.09 to 1.18, of measured series up to 1.06
PER_STEP, POOLED, WIDEST = "step", "all steps", "widest"  # what a radius is taken from


@dataclass(frozen=True)
class Bands:
    """How far each band reaches above and below a forecast."""

    shares: tuple[float, ...]
    radius_LHC: Reals  # in standardised units, or in deviations of the last values
    origins: int  # whose errors they are of
    steps: int = 0  # how many last values; 0: in standardised units
    taken: str = PER_STEP  # of the errors of each step ahead, of all steps together, or the widest, as there are too few

    @staticmethod
    def of(shares: Sequence[float], errors_NH: Sequence[Reals], steps: int = 0) -> Bands:
        """Return the bands that the absolute errors of each column make; NaN is none. `steps`: they are in deviations of so many values."""
        origins, horizon = sum(len(each_NH) for each_NH in errors_NH) // len(errors_NH), errors_NH[0].shape[1]
        radius_LHC = np.stack([_radii(shares, each_NH) for each_NH in errors_NH], axis=-1)
        taken = PER_STEP
        if not np.isfinite(radius_LHC).all():
            together_L1C = np.stack([_radii(shares, each_NH.reshape(-1, 1)) for each_NH in errors_NH], axis=-1)
            radius_LHC, taken = np.repeat(together_L1C, horizon, axis=1), POOLED
        if not np.isfinite(radius_LHC).all():
            widest_C = np.array([np.max(each_NH[np.isfinite(each_NH)], initial=0.0) for each_NH in errors_NH])
            radius_LHC, taken = np.where(np.isfinite(radius_LHC), radius_LHC, widest_C), WIDEST
        return Bands(tuple(shares), radius_LHC, origins, steps, taken)

    @property
    def levels(self) -> tuple[float, ...]:
        """The quantiles that the ends of the bands stand for, and between them 0.5, which is the forecast itself."""
        above = [round(0.5 + share / 2.0, 10) for share in self.shares]
        return (*(round(1.0 - level, 10) for level in reversed(above)), 0.5, *above)

    def around(self, made_HOC1: Reals, size_OC: Reals) -> Reals:
        """Return forecasts with the ends of their bands, [H, O, C, 1] -> [H, O, C, Q]; `size_OC` is how large a radius of 1 is."""
        beside_HOCL = np.moveaxis(self.radius_LHC, 0, 2)[:, None] * size_OC[..., None]
        made: Reals = np.concatenate([made_HOC1 - beside_HOCL[..., ::-1], made_HOC1, made_HOC1 + beside_HOCL], axis=-1)
        return made

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        about = {"origins": self.origins, "steps": self.steps, "taken": self.taken}
        return {"shares": list(self.shares), "radius": self.radius_LHC.tolist(), **about}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any], horizon: int, columns: int) -> Self:
        """Return the bands; raises KeyError, TypeError or ValueError if they are not ones of such forecasts."""
        shares, radius_LHC = tuple(map(float, saved["shares"])), np.array(saved["radius"], np.float64)
        if radius_LHC.shape != (len(shares), horizon, columns):
            raise ValueError(f"radius has sizes {list(radius_LHC.shape)}, but {[len(shares), horizon, columns]} are needed")
        return cls(shares, radius_LHC, int(saved["origins"]), int(saved["steps"]), str(saved["taken"]))

    def said(self) -> str:
        """Return a line about what they were made of."""
        asked = ", ".join(f"{share:.4g}" for share in self.shares)
        made = f"bands of {asked}: from the errors of {self.origins:,} forecasts of valid"
        few = f"{made}, too few for each step ahead"
        return {
            PER_STEP: f"{made}, for each step ahead",
            POOLED: f"{few}, so those of all steps together; hold out more rows",
            WIDEST: f"{few} and for such shares, so as wide as the widest error; hold out more rows",
        }[self.taken]


def _radii(shares: Sequence[float], error_NH: Reals) -> Reals:
    """The radii [L, H] of absolute errors; infinite where there are too few."""
    endless_NH = np.vstack([np.sort(error_NH, axis=0), np.full((1, error_NH.shape[1]), np.inf)])  # NaN comes last
    count_H = np.isfinite(error_NH).sum(axis=0)
    ranks = (np.ceil((count_H + 1) * share - ROUNDING).astype(np.int64) for share in shares)
    return np.stack([endless_NH[np.where(rank_H <= count_H, rank_H, 0) - 1, np.arange(len(count_H))] for rank_H in ranks])


def absolute_errors(out: Tensor, target_TBHC: Tensor, *, summed: bool) -> Tensor:
    """Absolute errors [T, B, H, C] in standardised units, NaN where there is no target, or of sums where one before is missing."""
    error_TBHC = out.double().reshape(target_TBHC.shape) - target_TBHC.double()
    return (error_TBHC.cumsum(-2) if summed else error_TBHC).abs()


class BandErrors(Errors):
    """As `Errors` of single values, and how often the truth lies within each band."""

    def __init__(
        self,
        data: DataSpec,
        outputs: int,
        change_SC: Tensor | None,
        device: torch.device,
        columns: Columns | None,
        bands: Bands,
        deviation: Slope | None = None,
    ) -> None:
        super().__init__(data.horizon, outputs, None, change_SC, device, columns=columns)
        self.shares, self._summed, self._deviation = bands.shares, data.transform == "diff", deviation
        self._radius_LHC = torch.from_numpy(bands.radius_LHC).to(device)
        self.inside_L, self.judged = (torch.zeros(size, dtype=torch.float64, device=device) for size in (len(bands.shares), 1))

    @torch.no_grad()
    def update(self, out: Tensor, target: Tensor, sequence_B: Tensor | None = None, first_B: Tensor | None = None) -> None:
        """Add forecasts [T, B, H, C] with targets [T, B, H, C]."""
        super().update(out, target, sequence_B, first_B)
        error_TBHC = absolute_errors(out, target, summed=self._summed)
        if self._deviation is not None and sequence_B is not None and first_B is not None:
            error_TBHC = error_TBHC / self._deviation(sequence_B.clamp(min=0), first_B, len(target))
        radius_LBHC = self._radius_LHC[:, None]
        if self.apart:
            at_B = torch.zeros(target.shape[1], dtype=torch.int64, device=target.device) if sequence_B is None else sequence_B
            radius_LBHC = self._radius_LHC[..., at_B.clamp(min=0) % self.apart].permute(0, 2, 1)[..., None]
        self.judged += (~error_TBHC.isnan()).sum()
        self.inside_L += torch.stack([(error_TBHC <= radius_BHC).sum() for radius_BHC in radius_LBHC])

    def tensors(self) -> dict[str, Tensor]:
        """Return the sums."""
        return super().tensors() | {"inside": self.inside_L, "judged": self.judged}

    def values(self) -> dict[str, float]:
        """Return those of single values, and the share within each band."""
        judged = self.judged.item()
        shares = zip(self.shares, self.inside_L.tolist(), strict=True)
        return super().values() | within({share: inside / judged if judged else math.nan for share, inside in shares})


def within(found: Mapping[float, float]) -> dict[str, float]:
    """Return the metrics of how much lies within bands, by share."""
    return {f"within_{100 * share:.6g}": value for share, value in found.items()}


def fitting(shares: Sequence[float], errors_NH: Sequence[Reals], deviations_N: Sequence[Reals], steps: int) -> Bands:
    """Return the bands of these errors of each column, which were made where the last `steps` values had these deviations (0: not asked).

    Bands that move with the deviation also hold in times that are louder or quieter than valid; but on a random walk, say, it tells
    nothing, and they are needlessly wide. Those of one width are taken if they are much the better ones on valid, by the interval score.
    """
    one = Bands.of(shares, errors_NH)
    if not steps:
        return one
    moving = Bands.of(shares, [each_NH / of_N[:, None] for each_NH, of_N in zip(errors_NH, deviations_N, strict=True)], steps)
    return one if _interval_score(moving, errors_NH, deviations_N) > MUCH * _interval_score(one, errors_NH, deviations_N) else moving


def _reaches(bands: Bands, deviations_N: Sequence[Reals]) -> list[Reals]:
    """How far bands reach [L, N, H], for each column."""
    radii_LH = np.moveaxis(bands.radius_LHC, 2, 0)
    return [
        of_LH[:, None] * (of_N[:, None] if bands.steps else np.ones((len(of_N), 1)))
        for of_LH, of_N in zip(radii_LH, deviations_N, strict=True)
    ]


def _interval_score(bands: Bands, errors_NH: Sequence[Reals], deviations_N: Sequence[Reals]) -> float:
    """The width of bands, and what lies outside times 2 / (1 - share), averaged: the lower the better (Gneiting & Raftery 2007)."""
    outside_L = 2.0 / (1.0 - np.array(bands.shares))
    scores = [
        2.0 * reach_LNH + outside_L[:, None, None] * np.maximum(0.0, each_NH - reach_LNH)
        for each_NH, reach_LNH in zip(errors_NH, _reaches(bands, deviations_N), strict=True)
    ]
    return float(np.nanmean(np.concatenate([each.ravel() for each in scores])))


def within_own(bands: Bands, errors_NH: Sequence[Reals], deviations_N: Sequence[Reals]) -> dict[str, float]:
    """Return the metrics of `BandErrors` for the errors that the bands were made of."""
    count = sum(int(np.isfinite(each_NH).sum()) for each_NH in errors_NH)
    pairs = zip(errors_NH, _reaches(bands, deviations_N), strict=True)
    inside_L = sum((each_NH <= reach_LNH * (1.0 + ROUNDING)).sum((1, 2)) for each_NH, reach_LNH in pairs)
    return within({share: float(many / count) if count else math.nan for share, many in zip(bands.shares, inside_L, strict=True)})
