"""NSE, KGE, RMSE and MAE by series, from sums, against their definitions over whole series."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from carrywave.data.codec import Codec
from carrywave.tasks.metrics.steps import StepErrors

MEAN, UNIT = (3.0, -1.0), (2.0, 0.5)


def codec(targets: int = 1) -> Codec:
    names = ("flow", "level")[:targets]
    return Codec("regression", "columns", target_mean=MEAN[:targets], target_std=UNIT[:targets], step_targets=names)


def drawn(series: int, steps: int, targets: int = 1, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    truth = torch.randn(steps, series, targets, generator=draw, dtype=torch.float64)
    guess = truth + 0.3 * torch.randn(truth.shape, generator=draw, dtype=torch.float64)
    truth[torch.rand(truth.shape, generator=draw) < 0.2] = torch.nan
    return guess, truth


def defined(guess: np.ndarray, truth: np.ndarray, place: int = 0) -> dict[str, float]:
    there = ~np.isnan(truth)
    e, o = (values[there] * UNIT[place] + MEAN[place] for values in (guess, truth))
    r = np.corrcoef(e, o)[0, 1]
    kge = 1 - math.sqrt((r - 1) ** 2 + (e.std() / o.std() - 1) ** 2 + (e.mean() / o.mean() - 1) ** 2)
    nse = 1 - ((e - o) ** 2).sum() / ((o - o.mean()) ** 2).sum()
    return {"nse": nse, "kge": kge, "rmse": math.sqrt(((e - o) ** 2).mean()), "mae": np.abs(e - o).mean(), "targets": there.sum()}


@pytest.mark.parametrize("targets", [1, 2])
def test_each_series_as_defined(targets: int) -> None:
    guess, truth = drawn(5, 40, targets)
    metric = StepErrors(codec(targets), "abcde")
    for first in range(0, 40, 13):  # in chunks, and lanes in two parts
        for lanes in (torch.tensor([3, 0]), torch.tensor([4, 1, 2])):
            chunk = slice(first, first + 13)
            metric.update(guess[chunk, lanes], truth[chunk, lanes], lanes)
    wanted = {(name, column): defined(guess[:, n, c].numpy(), truth[:, n, c].numpy(), c) for n, name in enumerate("abcde") for c, column in
              enumerate(("flow", "level")[:targets])}  # fmt: skip
    rows = metric.rows("series")
    assert [(row["series"], row["column"]) for row in rows] == list(wanted)
    for row in rows:
        for name, value in wanted[str(row["series"]), str(row["column"])].items():
            assert row[name] == pytest.approx(value, rel=1e-9), name
    values = metric.values()
    assert values["nse_median"] == pytest.approx(np.median([each["nse"] for each in wanted.values()]), rel=1e-9)
    assert values["kge_median"] == pytest.approx(np.median([each["kge"] for each in wanted.values()]), rel=1e-9)
    if targets == 2:
        own = [each["nse"] for (_, column), each in wanted.items() if column == "level"]
        assert values["nse_median[level]"] == metric.rows("column")[1]["nse_median"] == pytest.approx(np.median(own), rel=1e-9)
        gap = (guess - truth).numpy()
        assert values["rmse"] == pytest.approx(math.sqrt(np.nanmean(gap**2)), rel=1e-9)  # of different units: standardised
        assert values["mae[level]"] == pytest.approx(np.nanmean(np.abs(gap[..., 1])) * UNIT[1], rel=1e-9)
    else:
        assert values["rmse"] == pytest.approx(math.sqrt(np.nanmean((guess - truth).numpy() ** 2)) * UNIT[0], rel=1e-9)


def test_sums_of_workers_are_those_of_one() -> None:
    guess, truth = drawn(6, 20)
    every, *parts = (StepErrors(codec(), "abcdef") for _ in range(3))
    every.update(guess, truth, torch.arange(6))
    for number, part in enumerate(parts):
        lanes = torch.arange(number, 6, 2)
        part.update(guess[:, lanes], truth[:, lanes], lanes)
    parts[0].tensors()["steps"] += parts[1].tensors()["steps"]
    assert parts[0].values() == every.values()


def test_series_without_an_efficiency() -> None:
    truth = torch.tensor([[0.5, 1.0, torch.nan], [0.5, torch.nan, torch.nan], [0.5, torch.nan, torch.nan]])[..., None]
    metric = StepErrors(codec(), "abc")
    metric.update(torch.zeros_like(truth), truth, torch.arange(3))
    assert all(math.isnan(float(row["nse"])) and math.isnan(float(row["kge"])) for row in metric.rows("series"))
    assert math.isnan(metric.values()["nse_median"])
    assert metric.values()["mae"] == pytest.approx(2.0 * 2.5 / 4)
