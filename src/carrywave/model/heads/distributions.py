"""A head that forecasts a distribution of each value: normal, Student's t, negative binomial or Poisson.

What comes out are parameters, as `spec.data_spec.PARAMETERS` names them. Location and scale are in the units in which targets are; counts
are themselves: their targets, and the mean, are in the data's own units, because a likelihood of 3 is not that of 3 ÷ mean. Shapes, beside
those of this folder: P parameters.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import softplus

from carrywave.errors import UserError
from carrywave.model.heads.forecast import Forecast, deviation
from carrywave.model.heads.scoring import at_least_float32, count_of, keyword, numbers, weighted, weighted_targets
from carrywave.spec.data_spec import COUNTS, PARAMETERS
from carrywave.spec.step_inputs import LEAST_DEVIATION

LEAST_SCALE = 1e-3  # of a unit: what never changes would otherwise be forecast with a likelihood without bound
LEAST_DISPERSION = 1e-6  # of a negative binomial, which is then a Poisson distribution to all who look
FIRST_DF = 3.0  # what is added before the softplus, so that a new model begins with about 5 degrees of freedom
LEAST_MEAN = 1e-5  # of a unit
ROUNDNESS = 0.01  # how smoothly a mean bends away from 0: x becomes (x + sqrt(x² + ROUNDNESS)) / 2
HALF_LOG_TAU = 0.5 * math.log(2.0 * math.pi)


class DistributionForecast(Forecast):
    """Forecasts, at every step, parameters of the distribution of the next K values of C columns: [T, B, K, C, P].

    With `linear` and `scaled`, location and scale are made of the last N values as the forecasts of `Forecast` are. The mean of counts is
    what the layers and the linear function, which then includes the last value, come to, made positive. With `scaled`, the layers add to it
    in units of the deviation of the last N values, without a line to the mean of these, and the dispersion is in units of the squared ratio
    of the two. A head of counts reads the last N values in units of each series, and the size of these units after them, [T, B, 2C, N],
    where N is at least 1.
    """

    def __init__(
        self,
        width: int,
        horizon: int,
        outputs: int,
        distribution: str,
        *,
        linear: bool = False,
        scaled: bool = False,
        past_steps: int = 0,
    ) -> None:
        if distribution not in PARAMETERS:
            raise UserError(f"distribution={distribution} is unknown; use {', '.join(PARAMETERS)}")
        counts = distribution in COUNTS
        if counts and past_steps < 1:
            raise UserError(f"a head of counts has past_steps={past_steps}, but it reads the scale beside them; use 1 or more")
        each = len(PARAMETERS[distribution])
        super().__init__(width, horizon, outputs, linear=linear, scaled=scaled, past_steps=past_steps, each=each)
        self.distribution, self.counts = distribution, counts

    @property
    def past_columns(self) -> int:
        """Numbers of each row of the past."""
        return 2 * self.outputs if self.counts else self.outputs

    def forward(self, y_TBW: Tensor, past_TBCN: Tensor | None = None) -> Tensor:
        """The parameters at each step."""
        out = at_least_float32(numbers(y_TBW, self.weight, self.bias))
        out = out.view(*out.shape[:-1], self.horizon, self.outputs, -1)
        return self._counts(out, past_TBCN) if self.counts else self._around(out, past_TBCN)

    def _around(self, out: Tensor, past_TBCN: Tensor | None) -> Tensor:
        """Location, scale and, of Student's t, degrees of freedom."""
        location, scale = out[..., 0], softplus(out[..., 1]) + LEAST_SCALE
        if past_TBCN is not None and self.scaled:
            unit = deviation(past_TBCN)[:, :, None]
            location, scale = location * unit, scale * unit
        if past_TBCN is not None and self.line is not None:
            location = location + self.line(past_TBCN)
        df = [2.0 + softplus(out[..., 2] + FIRST_DF)] if self.distribution == "student_t" else []  # above 2 there is a variance
        return torch.stack([location, scale, *df], dim=-1)

    def _counts(self, out: Tensor, past_TBCN: Tensor | None) -> Tensor:
        """The mean, in the data's own units, and the dispersion of a negative binomial."""
        assert past_TBCN is not None
        values_TBCN, unit_TB1C = past_TBCN[:, :, : self.outputs], at_least_float32(past_TBCN[:, :, None, self.outputs :, -1])
        base = 1.0 if self.line is None else at_least_float32(values_TBCN[:, :, None, :, -1] + self.line(values_TBCN))
        mean, dispersion = out[..., 0], [softplus(out[..., 1])] if self.distribution == "negative_binomial" else []
        # What is made positive is the sum of the layers and the line, so that far above 0 it is just that.
        if self.scaled:
            level, unit = (each(values_TBCN)[:, :, None] for each in (average, deviation))
            base = 1.0 if self.line is None else base / level
            mean = level * positive(base + mean * (unit / level))
            dispersion = [each * (unit / level).square() for each in dispersion]
        else:
            mean = positive(mean + base)
        return torch.stack([mean * unit_TB1C, *(each + LEAST_DISPERSION for each in dispersion)], dim=-1)

    def score(self, out: Tensor, target_TBKC: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Negative log-likelihood, summed over the targets that are present, and their number."""
        out = at_least_float32(out)
        target_TBKC = weighted_targets(target_TBKC, weights)
        real = torch.isfinite(target_TBKC)
        # Masked before and after: what a missing target would give, finite or not, has no part in the gradient.
        total = torch.where(real, surprise(self.distribution, out, torch.where(real, target_TBKC.to(out.dtype), 0.0)), 0.0)
        return weighted(total, weights).sum().to(out.dtype), count_of(real, weights, out.dtype)

    def loss(
        self, y_TBW: Tensor, target_TBKC: Tensor, past_TBCN: Tensor | None = None, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Loss sum and count, from the last layer's output."""
        return self.score(self(y_TBW, past_TBCN), target_TBKC, **keyword(weights))

    def extra_repr(self) -> str:
        return f"{self.distribution}, horizon={self.horizon}, outputs={self.outputs}"


def surprise(distribution: str, parameters: Tensor, value: Tensor) -> Tensor:
    """The negative log-likelihood of values, given parameters [..., P]; of counts in float64, where differences of large factorials keep
    their digits.
    """
    if distribution in COUNTS:
        parameters, value = parameters.double(), value.double()
        mean = parameters[..., 0]
        if distribution == "poisson":
            return mean - value * mean.log() + torch.lgamma(value + 1.0)
        dispersion = parameters[..., 1]
        size = 1.0 / dispersion
        excess = torch.log1p(dispersion * mean)
        ways = torch.lgamma(value + size) - torch.lgamma(size) - torch.lgamma(value + 1.0)
        return (value + size) * excess - value * (dispersion * mean).log() - ways
    location, scale = parameters[..., 0], parameters[..., 1]
    gap = (value - location) / scale
    if distribution == "normal":
        return 0.5 * gap.square() + scale.log() + HALF_LOG_TAU
    df = parameters[..., 2]
    constant = torch.lgamma(0.5 * df) - torch.lgamma(0.5 * (df + 1.0)) + 0.5 * (df * math.pi).log()
    return constant + scale.log() + 0.5 * (df + 1.0) * torch.log1p(gap.square() / df)


def positive(x: Tensor) -> Tensor:
    """A number above 0 that is close to x where x is well above it."""
    return 0.5 * (x + torch.sqrt(x.square() + ROUNDNESS)) + LEAST_MEAN


def average(past_TBCN: Tensor) -> Tensor:
    """The mean absolute value [T, B, C] of the last N, at least `LEAST_DEVIATION` of that of all of train."""
    return at_least_float32(past_TBCN).abs().mean(dim=-1).clamp(min=LEAST_DEVIATION)
