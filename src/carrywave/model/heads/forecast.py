"""Heads that forecast the next values at every step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from carrywave.errors import UserError
from carrywave.model.heads.scoring import (
    at_least_float32,
    check_loss,
    count_of,
    keyword,
    numbers,
    score_numbers,
    weighted,
    weighted_targets,
)
from carrywave.spec.step_inputs import LEAST_DEVIATION


class Forecast(nn.Module):
    """Forecasts, at every step, the next K values of C columns: [T, B, K, C], or [T, B, K, C, Q] with quantiles.

    Quantiles cannot cross: the first is unconstrained, and each following one adds a positive increment. Their loss is the pinball
    loss, averaged over quantiles.

    With `linear`, a linear function of the last N values of each column, less the last one, is added. With `scaled`, what comes from the
    layers is in units of the deviation of the last N values, so that what is learned at one level of volatility holds at others. N is
    `past_steps`; forward and loss then read these values too, [T, B, C, N].

    `each`: of a subclass, how many numbers the layers give for each value.
    """

    pooled = False

    def __init__(
        self,
        width: int,
        horizon: int,
        outputs: int,
        quantiles: Sequence[float] | None = None,
        loss: str = "mse",
        *,
        linear: bool = False,
        scaled: bool = False,
        past_steps: int = 0,
        each: int | None = None,
    ) -> None:
        super().__init__()
        reads = linear or scaled
        if (reads and not past_steps) or (past_steps and not reads and each is None):
            raise UserError(f"a forecast has linear={linear}, scaled={scaled} and past_steps={past_steps}; set it if one of them is set")
        self.horizon = horizon
        self.outputs = outputs
        self.quantiles = None if quantiles is None else tuple(quantiles)
        self.kind = check_loss(loss)
        if self.quantiles is not None and (
            not self.quantiles or any(not low < high for low, high in zip((0.0, *self.quantiles), (*self.quantiles, 1.0), strict=True))
        ):
            raise UserError(f"quantiles must increase between 0 and 1, got {list(self.quantiles)}; list each once, from low to high")
        numbers = horizon * outputs * (each or len(self.quantiles or (0.5,)))
        self.weight = nn.Parameter(torch.empty(numbers, width).uniform_(-(width**-0.5), width**-0.5))
        self.bias = nn.Parameter(torch.zeros(numbers))
        self.past_steps, self.scaled = past_steps, scaled
        self.line = PastLine(horizon, outputs, past_steps) if linear else None

    @property
    def past_columns(self) -> int:
        """Numbers of each row of the past."""
        return self.outputs

    def forward(self, y_TBW: Tensor, past_TBCN: Tensor | None = None) -> Tensor:
        """The forecasts made at each step."""
        out = numbers(y_TBW, self.weight, self.bias)
        out = out.view(*out.shape[:-1], self.horizon, self.outputs, -1)
        if self.quantiles is not None:
            out = at_least_float32(out)
            # Shifted so that a newly initialised model's quantiles span about 1 in total, however many there are.
            rises = softplus(out[..., 1:] - math.log(max(1, len(self.quantiles) - 1)))
            out = torch.cat((out[..., :1], out[..., :1] + rises.cumsum(-1)), dim=-1)
        if past_TBCN is not None and self.scaled:
            out = out * deviation(past_TBCN)[:, :, None, :, None]
        if past_TBCN is not None and self.line is not None:
            out = out + self.line(past_TBCN)[..., None]
        return out[..., 0] if self.quantiles is None else out

    def score(self, out: Tensor, target_TBKC: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Loss sum over the targets that are present, and their number."""
        if self.quantiles is None:
            errors, real = score_numbers(out, target_TBKC, self.kind, weights)
            return errors.sum(), count_of(real, weights, errors.dtype)
        out = at_least_float32(out)
        target_TBKC = weighted_targets(target_TBKC, weights)
        real = torch.isfinite(target_TBKC)
        gap = torch.where(real[..., None], target_TBKC.to(out.dtype)[..., None] - out, 0.0)
        # Filled on the device: a copy from the host cannot be part of a CUDA graph.
        share_Q = torch.cat([out.new_full((1,), share) for share in self.quantiles])
        pinball = torch.maximum(share_Q * gap, (share_Q - 1.0) * gap)
        return weighted(pinball, weights).sum() / len(self.quantiles), count_of(real, weights, out.dtype)

    def loss(
        self, y_TBW: Tensor, target_TBKC: Tensor, past_TBCN: Tensor | None = None, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Loss sum and count, from the last layer's output."""
        return self.score(self(y_TBW, past_TBCN), target_TBKC, **keyword(weights))


class PastLine(nn.Module):
    """A linear function of the last N values of each column less the last one, for each step ahead. It starts at zero: `Task.model` sets it
    to the ridge solution.
    """

    def __init__(self, horizon: int, outputs: int, past_steps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs, past_steps, horizon))
        self.bias = nn.Parameter(torch.zeros(outputs, horizon))

    def forward(self, past_TBCN: Tensor) -> Tensor:
        """The differences [T, B, K, C] from the last value."""
        steps, lanes, columns, past = past_TBCN.shape
        with torch.autocast(past_TBCN.device.type, enabled=False):
            gaps_CRN = (past_TBCN - past_TBCN[..., -1:]).to(self.weight.dtype).permute(2, 0, 1, 3).reshape(columns, steps * lanes, past)
            ahead_CRK = torch.baddbmm(self.bias[:, None], gaps_CRN, self.weight)
        return ahead_CRK.view(columns, steps, lanes, -1).permute(1, 2, 3, 0)


def deviation(past_TBCN: Tensor) -> Tensor:
    """The deviation [T, B, C] of the last N values, at least `LEAST_DEVIATION` of that of all of train."""
    return at_least_float32(past_TBCN).var(dim=-1, correction=0).clamp(min=LEAST_DEVIATION**2).sqrt()
