"""Metrics of forecasts that are distributions: those of their quantiles, CRPS, the weighted quantile loss, and how often the truth lies
within the 80% interval.

CRPS is in standardised units, as the MAE is, which it would be for a forecast without spread. Of normal and Poisson distributions it is
exact; of the others it is the mean pinball loss at `MIDDLES`, times 2, as it is by definition with all levels. Shapes as in `metrics`; L
levels, E values.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from carrywave.spec.data_spec import PARAMETERS, DataSpec
from carrywave.tasks.metrics.errors import Columns, Errors, Slope
from carrywave.tasks.metrics.quantile_functions import Quantiles

DECILES = tuple(round(0.1 * number, 1) for number in range(1, 10))  # of the weighted quantile loss, as others report it
MIDDLES = tuple((2 * number + 1) / 40 for number in range(20))  # the middles of 20 equal shares
AT_ONCE = 1 << 16  # values whose quantiles are in memory at once


class DistributionErrors(Errors):
    """As `Errors` of quantiles, and what is known of a whole distribution. `sizes` are the targets in the units of the data."""

    def __init__(
        self,
        data: DataSpec,
        outputs: int,
        change_SC: Tensor | None = None,
        device: torch.device | str = "cpu",
        columns: Columns | None = None,
        sizes: Slope | None = None,
    ) -> None:
        super().__init__(data.horizon, outputs, data.levels, change_SC, device, columns=columns)
        self.distribution, self.counts, self.sizes = data.distribution, data.counts, sizes
        self._reported = Quantiles(data.distribution, data.levels or (), device)
        exact = data.distribution in ("normal", "poisson")
        self._levels = Quantiles(data.distribution, DECILES if exact else DECILES + MIDDLES, device)
        self.sums = torch.zeros(4, dtype=torch.float64, device=device)  # CRPS, within 80%, size of targets, squared errors of means
        self.loss_L = torch.zeros(len(DECILES), dtype=torch.float64, device=device)  # in the units of the data

    def fits(self, out: object, target: Tensor) -> bool:
        """True if there are parameters for each target."""
        return isinstance(out, Tensor) and out.shape == (*target.shape, len(PARAMETERS[self.distribution]))

    @torch.no_grad()
    def update(self, out: Tensor, target: Tensor, sequence_B: Tensor | None = None, first_B: Tensor | None = None) -> None:
        """Add parameters [T, B, H, C, P] with targets [T, B, H, C]; of counts, both are in the units of the data."""
        at_B = torch.zeros(target.shape[1], dtype=torch.int64, device=target.device) if sequence_B is None else sequence_B.clamp(min=0)
        unit_BC = torch.ones(target.shape[1], target.shape[3], dtype=torch.float64, device=target.device)
        if self.unit_SC is not None:
            unit_BC = self.unit_SC[at_B if len(self.unit_SC) > 1 else torch.zeros_like(at_B)]
        unit_TBHC = unit_BC[:, None].expand(target.shape)
        sizes_TBHC = None if self.sizes is None or first_B is None else self.sizes(at_B, first_B, len(target)).abs()
        divisor = unit_TBHC if self.counts else torch.ones_like(unit_TBHC)  # what a target is divided by
        quantiles = self._reported(out) / divisor[..., None]
        super().update(quantiles, target.double() / divisor, sequence_B, first_B)
        flat = [each.reshape(-1) for each in (target.double(), unit_TBHC, torch.zeros_like(divisor) if sizes_TBHC is None else sizes_TBHC)]
        parameters_EP = out.double().flatten(0, -2)
        for piece, *rest in zip(*(torch.split(each, AT_ONCE) for each in (parameters_EP, *flat)), strict=True):
            self._add_values(piece, *rest)

    def _add_values(self, parameters_EP: Tensor, target_E: Tensor, unit_E: Tensor, size_E: Tensor) -> None:
        real_E = ~target_E.isnan()
        target_E = torch.where(real_E, target_E, 0.0)
        standard_E, data_unit_E = (1.0 / unit_E, 1.0) if self.counts else (1.0, unit_E)  # to standardised units, to those of the data
        made_EL = self._levels(parameters_EP)
        gap_EL = target_E[:, None] - made_EL
        loss_EL = torch.maximum(self._levels.levels_Q * gap_EL, (self._levels.levels_Q - 1.0) * gap_EL)
        loss_EL = torch.where(real_E[:, None], loss_EL, 0.0)
        crps_E = crps(self.distribution, parameters_EP, target_E)
        crps_E = 2.0 * loss_EL[:, len(DECILES) :].mean(1) if crps_E is None else torch.where(real_E, crps_E, 0.0)
        inside_E = real_E & (made_EL[:, 0] <= target_E) & (target_E <= made_EL[:, len(DECILES) - 1])
        square_E = torch.where(real_E, (target_E - parameters_EP[:, 0]) * standard_E, 0.0).square()
        sums = ((crps_E * standard_E).sum(), inside_E.sum(), torch.where(real_E, size_E, 0.0).sum(), square_E.sum())
        self.sums += torch.stack([each.double() for each in sums])
        in_units_EL = loss_EL[:, : len(DECILES)] * (data_unit_E if isinstance(data_unit_E, float) else data_unit_E[:, None])
        self.loss_L += in_units_EL.sum(0)

    def tensors(self) -> dict[str, Tensor]:
        """Return the sums."""
        return super().tensors() | {"distribution": self.sums, "quantile_loss": self.loss_L}

    def values(self) -> dict[str, float]:
        """Return those of quantiles, and CRPS, the weighted quantile loss, and the share within the 80% interval; of counts, whose mean is
        not their median, the RMSE of the mean.
        """
        values = super().values()
        count = self.count_HC.sum().item()
        total, inside, size, square = self.sums.tolist()
        more = {"crps": total / count if count else math.nan, "within_80": inside / count if count else math.nan}
        if self.sizes is not None and size:
            more["weighted_quantile_loss"] = 2.0 * self.loss_L.mean().item() / size
        if self.counts:
            more["rmse_of_mean"] = math.sqrt(square / count) if count else math.nan
        return values | more


def crps(distribution: str, parameters_EP: Tensor, target_E: Tensor) -> Tensor | None:
    """The continuous ranked probability score, in the units of the targets; None if it has no closed form here."""
    if distribution == "normal":
        location, scale = parameters_EP.unbind(-1)
        gap = (target_E - location) / scale
        density = torch.exp(-0.5 * gap.square()) / math.sqrt(2.0 * math.pi)
        normal: Tensor = scale * (gap * (2.0 * torch.special.ndtr(gap) - 1.0) + 2.0 * density - 1.0 / math.sqrt(math.pi))
        return normal
    if distribution != "poisson":
        return None
    mean = parameters_EP[:, 0]
    below = torch.special.gammaincc(target_E + 1.0, mean)  # the probability of the target or less
    at = torch.exp(target_E * mean.log() - mean - torch.lgamma(target_E + 1.0))
    # Of two draws, the mean distance is 2 · mean · e^(-2 mean) · (I0 + I1)(2 mean), here with scaled Bessel functions.
    apart = mean * (torch.special.i0e(2.0 * mean) + torch.special.i1e(2.0 * mean))
    poisson: Tensor = (target_E - mean) * (2.0 * below - 1.0) + 2.0 * mean * at - apart
    return poisson
