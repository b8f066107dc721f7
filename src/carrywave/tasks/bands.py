"""Bands around forecasts of single values: as wide as the errors on held-out rows were, so that they hold what they are asked to.

Split conformal prediction, symmetric: a band of share p reaches as far as the ceil((n + 1) p)-th smallest of n absolute errors, for each
step ahead and column, in standardised units, so that large and small series share their errors. With changes from row to row
(`data.transform: diff`), errors are those of their sums, as they are in the file.

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
from carrywave.tasks.metrics import Columns, Errors

Reals = NDArray[np.float64]

ROUNDING = 1e-9  # 0.95 of 100 is 95, not a little more
PER_STEP, POOLED, WIDEST = "step", "all steps", "widest"  # what a radius is taken from


@dataclass(frozen=True)
class Bands:
    """How far each band reaches above and below a forecast."""

    shares: tuple[float, ...]
    radius_LHC: Reals  # in standardised units
    origins: int  # whose errors they are of
    taken: str = PER_STEP  # of the errors of each step ahead, of all steps together, or the widest, as there are too few

    @staticmethod
    def of(shares: Sequence[float], errors_NH: Sequence[Reals]) -> Bands:
        """Return the bands that the absolute errors of each column make; NaN is none."""
        origins, horizon = sum(len(each_NH) for each_NH in errors_NH) // len(errors_NH), errors_NH[0].shape[1]
        radius_LHC = np.stack([_radii(shares, each_NH) for each_NH in errors_NH], axis=-1)
        taken = PER_STEP
        if not np.isfinite(radius_LHC).all():
            together_L1C = np.stack([_radii(shares, each_NH.reshape(-1, 1)) for each_NH in errors_NH], axis=-1)
            radius_LHC, taken = np.repeat(together_L1C, horizon, axis=1), POOLED
        if not np.isfinite(radius_LHC).all():
            widest_C = np.array([np.max(each_NH[np.isfinite(each_NH)], initial=0.0) for each_NH in errors_NH])
            radius_LHC, taken = np.where(np.isfinite(radius_LHC), radius_LHC, widest_C), WIDEST
        return Bands(tuple(shares), radius_LHC, origins, taken)

    @property
    def levels(self) -> tuple[float, ...]:
        """The quantiles that the ends of the bands stand for, and between them 0.5, which is the forecast itself."""
        above = [round(0.5 + share / 2.0, 10) for share in self.shares]
        return (*(round(1.0 - level, 10) for level in reversed(above)), 0.5, *above)

    def around(self, made_HOC1: Reals, unit_C: Reals | None = None) -> Reals:
        """Return forecasts with the ends of their bands, [H, O, C, 1] -> [H, O, C, Q]; `unit_C` are the sizes of a standardised unit."""
        radius_LHC = self.radius_LHC if unit_C is None else self.radius_LHC * unit_C
        beside_H1CL = np.moveaxis(radius_LHC, 0, 2)[:, None]
        made: Reals = np.concatenate([made_HOC1 - beside_H1CL[..., ::-1], made_HOC1, made_HOC1 + beside_H1CL], axis=-1)
        return made

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        return {"shares": list(self.shares), "radius": self.radius_LHC.tolist(), "origins": self.origins, "taken": self.taken}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any], horizon: int, columns: int) -> Self:
        """Return the bands; raises KeyError, TypeError or ValueError if they are not ones of such forecasts."""
        shares, radius_LHC = tuple(map(float, saved["shares"])), np.array(saved["radius"], np.float64)
        if radius_LHC.shape != (len(shares), horizon, columns):
            raise ValueError(f"radius has sizes {list(radius_LHC.shape)}, but {[len(shares), horizon, columns]} are needed")
        return cls(shares, radius_LHC, int(saved["origins"]), str(saved["taken"]))

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
    ) -> None:
        super().__init__(data.horizon, outputs, None, change_SC, device, columns=columns)
        self.shares, self._summed = bands.shares, data.transform == "diff"
        self._radius_LHC = torch.from_numpy(bands.radius_LHC).to(device)
        self.inside_L, self.judged = (torch.zeros(size, dtype=torch.float64, device=device) for size in (len(bands.shares), 1))

    @torch.no_grad()
    def update(self, out: Tensor, target: Tensor, sequence_B: Tensor | None = None, first_B: Tensor | None = None) -> None:
        """Add forecasts [T, B, H, C] with targets [T, B, H, C]."""
        super().update(out, target, sequence_B, first_B)
        error_TBHC = absolute_errors(out, target, summed=self._summed)
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


def within_own(bands: Bands, errors_NH: Sequence[Reals]) -> dict[str, float]:
    """Return the same of the errors that the bands were made of."""
    count = sum(int(np.isfinite(each_NH).sum()) for each_NH in errors_NH)
    pairs = zip(errors_NH, np.moveaxis(bands.radius_LHC, 2, 0), strict=True)
    inside_L = sum((each_NH <= radius_LH[:, None]).sum((1, 2)) for each_NH, radius_LH in pairs)
    return within({share: float(many / count) if count else math.nan for share, many in zip(bands.shares, inside_L, strict=True)})
