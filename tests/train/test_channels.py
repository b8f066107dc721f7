"""Independent channels: what a wide table comes to as series of one model, against the same data in long format; all columns come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from safetensors.torch import load_file

import carrywave as cw
from carrywave.prediction.evaluate import evaluate_run
from carrywave.train.backtest import Rolling, backtest_run

HOW: dict[str, Any] = {
    "task": "forecasting",
    "batch": {"lanes": 3, "steps": 8},
    "train": {"epochs": 2, "lr": 0.02, "precision": "fp64"},
    "device": "cpu",
    "progress": False,
}
MODEL = {"hidden": 6, "layers": 1}
COLUMNS = ("a", "b", "c/d")


def wide(rows: int = 120, first: str = "2024-01-01", seed: int = 1) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    steps = np.arange(rows)[:, None]
    values = np.sin(steps / [3, 5, 2]) * [1, 40, 0.1] + draw.normal(size=(rows, 3)) * [0.1, 3, 0.01] + [0, 1000, 7]
    return pd.DataFrame(values, columns=COLUMNS).assign(ds=pd.date_range(first, periods=rows))


def long(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.melt(id_vars="ds", var_name="unique_id", value_name="value")[["unique_id", "ds", "value"]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("channels")
    data = {"horizon": 3, "season": 7, "standardize": False}  # series in long format are in units of their changes
    cw.fit(MODEL, wide(), data=data | {"channels": "independent"}, run=folder / "wide", **HOW)
    cw.fit(MODEL, long(wide()), data=data, run=folder / "long", **HOW)
    return folder


def test_a_column_is_a_series_of_long_format(runs: Path) -> None:
    weights, wanted = (load_file(runs / name / "weights.safetensors") for name in ("wide", "long"))
    assert weights.keys() == wanted.keys()
    assert all(weights[name].equal(wanted[name]) for name in wanted)


def test_forecasts_have_the_columns_of_the_file(runs: Path) -> None:
    found = cw.predict(runs / "wide", wide(), device="cpu")
    assert [list(row) for row in found] == [["ds", "step", *COLUMNS]] * 3
    expected = pd.DataFrame(cw.predict(runs / "long", long(wide()), device="cpu")).pivot(index="ds", columns="unique_id", values="value")
    pd.testing.assert_frame_equal(pd.DataFrame(found).set_index("ds")[list(COLUMNS)], expected, check_names=False, check_freq=False)


def test_metrics_are_those_of_all_and_of_each_column(runs: Path) -> None:
    frame = wide(60, "2025-01-01", seed=2)
    told: list[str] = []
    found: dict[str, Any] = evaluate_run(runs / "wide", frame, "cpu", by=("column", "series", "step"), note=told.append)
    expected: dict[str, Any] = evaluate_run(runs / "long", long(frame), "cpu", by=("series", "step"), note=lambda _: None)
    assert [line.split(" have")[0] for line in told] == ["data: 6 of 57 forecasts"]
    for name in ("loss", "mae", "rmse", "mase", "naive_mae", "naive_mase"):
        assert found[name] == pytest.approx(expected[name], rel=1e-9)
    by_series = {row["series"]: row for row in expected["by_series"]}
    assert [row["column"] for row in found["by_column"]] == list(COLUMNS)
    for row in found["by_column"]:
        assert row["mae"] == pytest.approx(by_series[row["column"]]["mae"], rel=1e-9) == found[f"mae[{row['column']}]"]
        assert row["targets"] == by_series[row["column"]]["targets"]
    assert [(row["step"], row["column"]) for row in found["by_step"]] == [(step, name) for step in (1, 2, 3) for name in COLUMNS]
    assert [(row["series"], row["column"]) for row in found["by_series"]] == [("data", name) for name in COLUMNS]


def test_a_backtest_scores_each_column(runs: Path) -> None:
    lines: list[str] = []
    found = backtest_run(runs / "wide", wide(200), Rolling(origins=2), "cpu", lines.append)
    assert found.columns == COLUMNS
    assert not lines
    [first, second] = found.forecasts
    assert (first.forecast_HCQ.shape, first.truth_HC.shape) == ((3, 3, 1), (3, 3))
    rows = cw.predict(runs / "wide", wide(200)[: second.known], device="cpu")
    np.testing.assert_allclose(second.forecast_HCQ[..., 0], [[row[name] for name in COLUMNS] for row in rows], rtol=1e-6)
    np.testing.assert_array_equal(second.truth_HC, wide(200)[list(COLUMNS)].to_numpy()[second.known : second.known + 3])


def test_several_series_and_covariates(tmp_path: Path) -> None:
    frames = [wide(seed=seed).assign(unique_id=name, price=float(seed), kind="xyz"[seed]) for seed, name in enumerate(("p", "q"))]
    frame = pd.concat(frames).drop(columns="c/d")
    data = {
        "horizon": 2,
        "channels": "independent",
        "targets": ["b", "a"],
        "known": ["price"],
        "categorical": ["kind"],
        "calendar": ["hour"],
    }
    ahead = frame.groupby("unique_id").tail(2).assign(a=np.nan, b=np.nan)
    ahead["ds"] += pd.Timedelta(days=2)
    result = cw.fit(MODEL, frame, data=data, run=tmp_path / "run", **HOW)
    codec = result.task.codec
    assert (codec.columns[:2], codec.names, codec.forecast_columns) == (("value", "price"), ("p/b", "p/a", "q/b", "q/a"), ("b", "a"))
    rows = cw.predict(tmp_path / "run", pd.concat([frame, ahead]), device="cpu")
    assert [(row["unique_id"], list(row)[-2:]) for row in rows] == [("p", ["b", "a"])] * 2 + [("q", ["b", "a"])] * 2
    assert all(800 < row["b"] < 1200 and -3 < row["a"] < 3 for row in rows)
    unseen: list[str] = []
    cw.predict(tmp_path / "run", pd.concat([frame, ahead]).replace({"unique_id": {"q": "new"}}), device="cpu", note=unseen.append)
    assert len(unseen) == 1
    assert "series new is not in the training data" in unseen[0]
    forecaster = cw.Forecaster.load(tmp_path / "run", device="cpu")
    assert forecaster.targets == ("b", "a")
    assert list(forecaster.predict(frame, future=ahead.drop(columns=["a", "b"])).columns) == ["unique_id", "ds", "b", "a"]
