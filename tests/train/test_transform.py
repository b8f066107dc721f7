"""Logarithms and differences of targets: forecasts, scores and metrics in the units of the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import carrywave as cw
from carrywave.data.tables.channels import backward, forward
from carrywave.errors import DataError, SpecError
from carrywave.prediction.evaluate import evaluate_run
from carrywave.spec.load import parse
from carrywave.train.backtest import Rolling, backtest_run

HOW: dict[str, Any] = {"task": "forecasting", "batch": {"lanes": 3, "steps": 8}, "device": "cpu", "progress": False}


def frame(rows: int = 150) -> pd.DataFrame:
    draw = np.random.default_rng(1)
    steps = np.arange(rows)
    growing = np.exp(steps / 60 + 0.3 * np.sin(steps) + 0.05 * draw.normal(size=rows))
    return pd.DataFrame({"ds": pd.date_range("2024-01-01", periods=rows), "a": growing, "b": 500 + 20 * draw.normal(size=rows).cumsum()})


@pytest.mark.parametrize("kind", ["none", "log", "log1p", "diff"])
def test_the_way_back(kind: str) -> None:
    values = np.random.default_rng(1).uniform(0.5, 9.0, size=(6, 2))
    np.testing.assert_allclose(backward(forward(values[1:], kind, values[:1]), kind, values[:1]), values[1:], rtol=1e-12)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("channels", ["joint", "independent"])
@pytest.mark.parametrize("kind", ["log", "log1p", "diff"])
def test_metrics_and_scores_are_in_the_units_of_the_file(tmp_path: Path, kind: str, channels: str) -> None:
    """Every origin of a file by a backtest, whose forecasts are those of predict, against what evaluation sums up."""
    data = {"horizon": 2, "season": 3, "transform": kind, "channels": channels}
    cw.fit({"hidden": 4, "layers": 1}, frame(), data=data, train={"epochs": 2, "precision": "fp64"}, run=tmp_path / "run", **HOW)
    later = frame(170)
    found = backtest_run(tmp_path / "run", later, Rolling(stride=1, origins=168), "cpu", lambda _: None)
    error = np.stack([each.forecast_HCQ[..., 0] - each.truth_HC for each in found.forecasts])
    row: dict[str, Any] = evaluate_run(tmp_path / "run", later, "cpu", by=("step",), note=lambda _: None)
    assert row["by_step"][0]["targets"] == len(found.forecasts) == 168
    # Outputs of a backtest travel in float32.
    for place, column in enumerate(("a", "b")):
        assert row[f"mae[{column}]"] == pytest.approx(np.abs(error[..., place]).mean(), rel=1e-4)
        assert row[f"rmse[{column}]"] == pytest.approx(np.sqrt((error[..., place] ** 2).mean()), rel=1e-4)
    wanted = [np.abs(error[:, step, place]).mean() for step in range(2) for place in range(2)]
    assert [each["mae"] for each in row["by_step"]] == pytest.approx(wanted, rel=1e-4)
    assert found.scores[0]["mae"] == pytest.approx(row["mae"], rel=1e-4)
    last = cw.predict(tmp_path / "run", later[: found.forecasts[-1].known], device="cpu")
    np.testing.assert_allclose(found.forecasts[-1].forecast_HCQ[..., 0], [[each["a"], each["b"]] for each in last], rtol=1e-6)
    np.testing.assert_array_equal(found.forecasts[-1].naive_HC, later[["a", "b"]].to_numpy()[[165, 166]])


def test_quantiles_of_logarithms_stay_in_order(tmp_path: Path) -> None:
    data = {"horizon": 2, "targets": ["a"], "transform": "log", "quantiles": [0.1, 0.9]}
    cw.fit({"hidden": 4, "layers": 1}, frame(), data=data, train={"epochs": 3}, run=tmp_path / "run", **HOW)
    assert all(0 < row["a-q0.1"] < row["a-q0.9"] for row in cw.predict(tmp_path / "run", frame(), device="cpu"))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(DataError, match=r"the row of 2024-01-06.*, column b is -1, and log needs values above 0; use data.transform=log1p"):
        cw.fit(None, frame().assign(b=lambda rows: rows["b"].where(rows.index != 5, -1.0)), data={"transform": "log"}, **HOW)
    with pytest.raises(SpecError, match="quantiles of changes"):
        parse({"task": "forecasting", "data": {"transform": "diff", "quantiles": [0.5]}})
