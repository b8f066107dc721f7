"""Quantiles of the distributions that a model forecasts, at fixed levels, in float64 on any device.

Normal: exact. Student's t: from a table over 1 ÷ df, to 1e-5 of a scale. Counts: the smallest number whose cumulative probability reaches
the level, exact below `MOST_SUMMED`, where probabilities are summed; above it, that of a gamma distribution of the same mean and variance,
which is off by a count or so. Shapes: P parameters, Q levels, K numbers that are summed over, N nodes of a table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from carrywave.model.heads.distributions import surprise
from carrywave.spec.data_spec import COUNTS

MOST_SUMMED = 128
AT_ONCE = 1 << 15  # distributions of counts whose probabilities are held in memory at once
NODES = 513
LEAST_SHAPE, MOST_SHAPE = 1e-3, 30.0  # of gamma distributions in the table; above it, Wilson and Hilferty's cube is closer than the table
TAIL = 1e-12  # a level that is reached up to rounding is reached

Reals = NDArray[np.float64]


class Quantiles:
    """The quantiles of a distribution at some levels: from parameters [..., P] to [..., Q]."""

    def __init__(self, distribution: str, levels: Sequence[float], device: torch.device | str = "cpu") -> None:
        self.distribution = distribution
        self.levels_Q = torch.tensor(tuple(levels), dtype=torch.float64, device=device)
        self._normal_Q = torch.special.ndtri(self.levels_Q)
        table = _t_table if distribution == "student_t" else _gamma_table if distribution in COUNTS else None
        self._table_NQ = None if table is None else table(tuple(levels)).to(device)

    def __call__(self, parameters: Tensor) -> Tensor:
        """The quantiles."""
        parameters = parameters.double()
        if self.distribution in COUNTS:
            flat = parameters.reshape(-1, parameters.shape[-1])
            pieces = [self._counts(piece) for piece in torch.split(flat, AT_ONCE)]
            return torch.cat(pieces).reshape(*parameters.shape[:-1], -1) if pieces else parameters.new_zeros(0)
        location, scale = parameters[..., :1], parameters[..., 1:2]
        if self.distribution == "normal":
            normal: Tensor = location + scale * self._normal_Q
            return normal
        heavier: Tensor = location + scale * self._looked_up(2.0 / parameters[..., 2])
        return heavier

    def _looked_up(self, place: Tensor) -> Tensor:
        """The table's rows at places from 0 to 1, on lines between its nodes."""
        assert self._table_NQ is not None
        at = place.clamp(0.0, 1.0) * (NODES - 1)
        low = at.floor().clamp(max=NODES - 2)
        share = (at - low)[..., None]
        return self._table_NQ[low.long()] * (1.0 - share) + self._table_NQ[low.long() + 1] * share

    def _counts(self, parameters_EP: Tensor) -> Tensor:
        mean_E = parameters_EP[:, 0]
        shape_E = 1.0 / (1.0 / mean_E + (parameters_EP[:, 1] if self.distribution == "negative_binomial" else 0.0))
        logs = math.log(MOST_SHAPE / LEAST_SHAPE)
        small_EQ = self._looked_up((shape_E / LEAST_SHAPE).log() / logs)
        shape_E1 = shape_E[:, None].clamp(min=MOST_SHAPE)
        large_EQ = 1.0 - 1.0 / (9.0 * shape_E1) + self._normal_Q / (3.0 * shape_E1.sqrt())
        root_EQ = torch.where(shape_E[:, None] > MOST_SHAPE, large_EQ, small_EQ).clamp(min=0.0)
        # Half a unit around each count is its share of the gamma distribution.
        near_EQ = (mean_E[:, None] * root_EQ**3 - 0.5).ceil().relu() + 0.0  # not -0
        few = near_EQ[:, -1] < 1.5 * MOST_SUMMED if len(self.levels_Q) else mean_E < 0
        if bool(few.any()):
            near_EQ[few] = self._summed(parameters_EP[few], near_EQ[few])
        return near_EQ

    def _summed(self, parameters_EP: Tensor, near_EQ: Tensor) -> Tensor:
        """The quantiles by sums of probabilities; `near` where those do not reach them."""
        number_K = torch.arange(MOST_SUMMED, dtype=torch.float64, device=parameters_EP.device)
        reached_EK = (-surprise(self.distribution, parameters_EP[:, None], number_K)).exp().cumsum(1)
        wanted_EQ = (self.levels_Q - TAIL).expand(len(reached_EK), -1).contiguous()
        number_EQ = torch.searchsorted(reached_EK, wanted_EQ).double()
        return torch.where(number_EQ < MOST_SUMMED, number_EQ, near_EQ.clamp(min=float(MOST_SUMMED)))


@lru_cache(maxsize=16)
def _t_table(levels: tuple[float, ...]) -> Tensor:
    """Quantiles [N, Q] of Student's t, for 2 ÷ df from 0 to 1, by Newton's steps on an integral of the density."""
    inverse_N1 = np.linspace(0.0, 0.5, NODES)[:, None]
    level_Q = np.array(levels)
    beyond_Q = np.abs(level_Q - 0.5)
    points_X, weights_X = np.polynomial.legendre.leggauss(96)
    logs = [_t_constant(1.0 / each) if each > 0 else -0.5 * math.log(2.0 * math.pi) for each in inverse_N1[:, 0].tolist()]
    constant_N1 = np.array(logs)[:, None]

    def density(x: Reals, inverse: Reals, constant: Reals) -> Reals:
        with np.errstate(divide="ignore", invalid="ignore"):
            rest = np.where(inverse > 0, 0.5 * (1.0 / inverse + 1.0) * np.log1p(x * x * inverse), 0.5 * x * x)
        height: Reals = np.exp(constant - rest)
        return height

    end_NQ = np.broadcast_to(np.abs(torch.special.ndtri(torch.tensor(levels, dtype=torch.float64)).numpy()), (NODES, len(levels))).copy()
    for _ in range(60):
        # The integral is concave in its end, so the steps approach from below and never pass.
        inside_NQX = end_NQ[..., None] * 0.5 * (points_X + 1.0)
        mass_NQ = (density(inside_NQX, inverse_N1[..., None], constant_N1[..., None]) * weights_X).sum(-1) * 0.5 * end_NQ
        step_NQ = (beyond_Q - mass_NQ) / density(end_NQ, inverse_N1, constant_N1)
        end_NQ += step_NQ
        if np.abs(step_NQ).max(initial=0.0) < 1e-10:
            break
    return torch.from_numpy(np.where(level_Q < 0.5, -end_NQ, end_NQ))


def _t_constant(df: float) -> float:
    return math.lgamma(0.5 * (df + 1.0)) - math.lgamma(0.5 * df) - 0.5 * math.log(df * math.pi)


@lru_cache(maxsize=16)
def _gamma_table(levels: tuple[float, ...]) -> Tensor:
    """The cube root of quantile ÷ mean [N, Q] of gamma distributions, over the logarithm of their shape, by bisection."""
    place_N1 = torch.linspace(0.0, 1.0, NODES, dtype=torch.float64)[:, None]
    shape_N1 = LEAST_SHAPE * (MOST_SHAPE / LEAST_SHAPE) ** place_N1
    low = torch.zeros(NODES, len(levels), dtype=torch.float64)
    high = torch.full_like(low, 60.0)  # of the cube root: no level that matters lies beyond
    level_Q = torch.tensor(levels, dtype=torch.float64)
    for _ in range(48):
        middle = 0.5 * (low + high)
        below = torch.special.gammainc(shape_N1.expand_as(middle), shape_N1 * middle**3) < level_Q
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return high
