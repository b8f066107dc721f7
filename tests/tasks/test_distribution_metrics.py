"""Metrics of distributions: against sums over draws and over all outcomes."""

from __future__ import annotations

import math

import pytest
import torch

from carrywave.spec.data_spec import DataSpec
from carrywave.tasks.metrics.distributions import DECILES, DistributionErrors, crps
from carrywave.tasks.metrics.errors import Columns
from carrywave.tasks.metrics.quantile_functions import Quantiles

DRAWS = 200_000  # their mean is off by less than 1%


def by_draws(kind: str, parameters: list[float], target: float) -> float:
    """CRPS as the mean distance of draws from the target, less half of that between two draws."""
    torch.manual_seed(1)
    first = torch.tensor(parameters, dtype=torch.float64).expand(DRAWS, -1)
    match kind:
        case "normal":
            draws = torch.distributions.Normal(first[:, 0], first[:, 1]).sample((2,))
        case "student_t":
            draws = torch.distributions.StudentT(first[:, 2], first[:, 0], first[:, 1]).sample((2,))
        case "poisson":
            draws = torch.poisson(first[:, 0].expand(2, -1))
        case _:
            size = 1.0 / first[:, 1]
            draws = torch.poisson(torch.distributions.Gamma(size, size / first[:, 0]).sample((2,)))
    return float((draws[0] - target).abs().mean() - 0.5 * (draws[0] - draws[1]).abs().mean())


def scored(kind: str, parameters: list[float], target: float, **how: object) -> dict[str, float]:
    metric = DistributionErrors(DataSpec(distribution=kind, horizon=1, **how), 1)
    metric.update(torch.tensor(parameters).view(1, 1, 1, 1, -1), torch.full((1, 1, 1, 1), target))
    return metric.values()


@pytest.mark.parametrize("target", [0.0, 2.0, 11.0])
@pytest.mark.parametrize(
    ("kind", "parameters"),
    [("normal", [1.0, 2.0]), ("student_t", [1.0, 2.0, 4.0]), ("poisson", [2.5]), ("negative_binomial", [3.0, 0.8])],
)
def test_crps_is_that_of_draws(kind: str, parameters: list[float], target: float) -> None:
    near = 0.01 if kind in ("normal", "poisson") else 0.05  # twenty levels instead of all
    assert scored(kind, parameters, target)["crps"] == pytest.approx(by_draws(kind, parameters, target), rel=near, abs=0.01)


def test_crps_of_a_poisson_distribution_is_the_sum_over_its_steps() -> None:
    for mean in (0.2, 3.0, 40.0):
        number = torch.arange(300, dtype=torch.float64)
        reached = (number * math.log(mean) - mean - torch.lgamma(number + 1)).exp().cumsum(0)
        for target in (0.0, 3.0, 60.0):
            wanted = (reached - (number >= target).double()).square().sum()
            found = crps("poisson", torch.tensor([[mean]], dtype=torch.float64), torch.tensor([target], dtype=torch.float64))
            torch.testing.assert_close(found[0], wanted, rtol=1e-9, atol=1e-9)


def test_metrics_are_in_the_units_they_say() -> None:
    """Two series of counts with other scales: errors are relative to them, and the weighted quantile loss is not."""
    data = DataSpec(distribution="negative_binomial", horizon=1)
    unit = torch.tensor([[2.0], [10.0]], dtype=torch.float64)
    parameters = torch.tensor([[4.0, 0.3], [20.0, 0.3]]).view(1, 2, 1, 1, 2)
    target = torch.tensor([6.0, 50.0]).view(1, 2, 1, 1)
    metric = DistributionErrors(data, 1, columns=Columns(("y",), unit), sizes=lambda at, first, steps: target.double())
    assert metric.fits(parameters, target)
    metric.update(parameters, target, torch.tensor([0, 1]), torch.tensor([0, 0]))
    found = metric.values()
    levels = Quantiles("negative_binomial", DECILES)
    made, median = levels(parameters).view(2, -1), Quantiles("negative_binomial", (0.5,))(parameters).view(2)
    gap = target.view(2, 1) - made
    loss = torch.maximum(levels.levels_Q * gap, (levels.levels_Q - 1) * gap).sum(0)
    assert found["weighted_quantile_loss"] == pytest.approx(float(2 * loss.mean() / 56.0))
    assert found["mae"] == pytest.approx(float(((target.view(2) - median).abs() / unit.view(2)).mean()))
    assert found["mae[y]"] == pytest.approx(float((target.view(2) - median).abs().mean()))
    assert found["rmse_of_mean"] == pytest.approx(math.sqrt(((2 / 2) ** 2 + (30 / 10) ** 2) / 2))
    assert found["within_80"] == 0.5  # 6 lies within, and 50 above
