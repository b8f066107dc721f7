"""Quantiles of distributions, against their definition: tables, bisection and sums in plain Python."""

from __future__ import annotations

import math

import pytest
import torch

from carrywave.tasks.metrics.quantile_functions import MOST_SUMMED, Quantiles

# Student's t at 0.9 and 0.975, from any book.
T_TABLE = {2.0: (1.8856, 4.3027), 3.0: (1.6377, 3.1824), 5.0: (1.4759, 2.5706), 10.0: (1.3722, 2.2281), 30.0: (1.3104, 2.0423)}
LEVELS = (0.01, 0.1, 0.25, 0.5, 0.9, 0.99)


def test_normal_and_t_are_those_of_the_tables() -> None:
    normal = Quantiles("normal", (0.1, 0.5, 0.975))(torch.tensor([[3.0, 2.0]], dtype=torch.float64))
    assert normal[0].tolist() == pytest.approx([3 - 2 * 1.2815516, 3.0, 3 + 2 * 1.9599640], abs=1e-6)
    df = torch.tensor(list(T_TABLE), dtype=torch.float64)
    made = Quantiles("student_t", (0.1, 0.5, 0.9, 0.975))(torch.stack([torch.zeros_like(df), torch.ones_like(df), df], dim=-1))
    for row, (high, higher) in zip(made.tolist(), T_TABLE.values(), strict=True):
        assert row == pytest.approx([-high, 0.0, high, higher], abs=6e-5)  # the book has four decimals


def smallest(mean: float, dispersion: float, level: float) -> int:
    """The smallest number whose cumulative probability reaches a level, by adding up."""
    number, reached, log = 0, 0.0, -mean if not dispersion else -math.log1p(dispersion * mean) / dispersion
    while True:
        reached += math.exp(log)
        if reached >= level - 1e-12:
            return number
        more = mean if not dispersion else (number + 1.0 / dispersion) * dispersion * mean / (1.0 + dispersion * mean)
        log += math.log(more / (number + 1))
        number += 1


@pytest.mark.parametrize("mean", [1e-3, 0.3, 2.0, 17.0, 60.0])
@pytest.mark.parametrize("dispersion", [0.0, 1e-4, 0.2, 2.0, 20.0])
def test_small_counts_are_exact(mean: float, dispersion: float) -> None:
    kind = "negative_binomial" if dispersion else "poisson"
    parameters = torch.tensor([mean, dispersion][: 2 if dispersion else 1], dtype=torch.float64)
    made = Quantiles(kind, LEVELS)(parameters).tolist()
    for found, level in zip(made, LEVELS, strict=True):
        wanted = smallest(mean, dispersion, level)
        if made[-1] < MOST_SUMMED:
            assert found == wanted, level
        else:
            assert found == pytest.approx(wanted, rel=0.02, abs=2), level


def test_quantiles_never_cross_and_keep_their_shape() -> None:
    draw = torch.Generator().manual_seed(0)
    for kind, numbers in (("normal", 2), ("student_t", 3), ("negative_binomial", 2), ("poisson", 1)):
        parameters = torch.rand(4, 3, 2, numbers, generator=draw) * 300 + 2.0
        made = Quantiles(kind, LEVELS)(parameters)
        assert made.shape == (4, 3, 2, len(LEVELS))
        assert (made.diff(dim=-1) >= 0).all()
