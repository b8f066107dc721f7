"""Forecasts of distributions from file to prediction: intermittent demand, what is refused, and what reads them afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import carrywave as cw
from carrywave.data.prepare import prepare, read_python
from carrywave.errors import DataError
from carrywave.prediction.evaluate import evaluate_run
from carrywave.prediction.outputs import HeadOutputs
from carrywave.prediction.predict import predict
from carrywave.prediction.saved_run import open_run
from carrywave.spec.load import parse
from carrywave.tasks.task import Task

DISPERSION = 0.5


def demand(series: int, rows: int, seed: int = 0) -> pd.DataFrame:
    """Intermittent demand: most days have none. Means differ from series to series, and double at weekends."""
    draw = np.random.default_rng(seed)
    parts = []
    for number in range(series):
        days = pd.date_range("2024-01-01", periods=rows)
        mean = 0.3 * 1.6**number * np.where(np.arange(rows) % 7 >= 5, 2.0, 1.0)  # the first is a Monday
        y = draw.poisson(draw.gamma(1.0 / DISPERSION, mean * DISPERSION))
        parts.append(pd.DataFrame({"unique_id": f"item {number}", "ds": days, "y": y}))
    return pd.concat(parts, ignore_index=True)


def fitted(folder: Path, frame: pd.DataFrame, kind: str, **train: Any) -> dict[str, float]:
    data = {"horizon": 2, "season": 7, "distribution": kind, "standardize": True}
    how: dict[str, Any] = {"task": "forecasting", "batch": {"lanes": 8, "steps": 32}, "device": "cpu", "progress": False}
    found = cw.fit({"hidden": 12, "linear": 14}, frame, data=data, run=folder, train={"epochs": 12, "seed": 1, **train}, **how)
    return dict(found.metrics["valid"])


@pytest.mark.slow
def test_intermittent_demand_is_forecast_better_as_counts(tmp_path: Path) -> None:
    """By CRPS, which of a point forecast is its error; and the generator's parameters come out again."""
    frame = demand(6, 600)
    assert (frame["y"] == 0).mean() > 0.35
    counts = fitted(tmp_path / "counts", frame, "negative_binomial")
    fitted(tmp_path / "point", frame, "none")
    point, ours = (evaluate_run(tmp_path / name, frame, device="cpu", note=lambda _: None) for name in ("point", "counts"))
    # In the units of the file: the CRPS of a point forecast is its MAE, and the weighted quantile loss times the mean that of deciles.
    assert float(str(ours["weighted_quantile_loss"])) * frame["y"].mean() < 0.9 * float(str(point["mae[y]"]))
    assert 0.75 < counts["within_80"] <= 1.0
    saved = open_run(tmp_path / "counts", "cpu")
    data = read_python(frame, saved.task.codec, saved.spec, labelled=False)
    outs = HeadOutputs(saved).after(data, dict.fromkeys(range(6), np.arange(300, 580)))  # forty weeks of origins
    mean, dispersion = np.stack([outs[series][:, 0, 0].mean(axis=0) for series in range(6)]).T
    np.testing.assert_allclose(mean, 0.3 * 1.6 ** np.arange(6) * 9 / 7, rtol=0.25)  # five days with one mean, two with twice that
    assert dispersion.mean() == pytest.approx(DISPERSION, abs=0.25)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distributions")
    demand(3, 80).to_csv(folder / "demand.csv", index=False)
    for kind in ("normal", "student_t", "negative_binomial", "poisson"):
        spec = parse(_spec(folder, kind))
        cw.fit(None, str(folder / "demand.csv"), spec=spec, run=folder / kind, device="cpu", progress=False)
    return folder


def _spec(folder: Path, kind: str, **data: Any) -> dict[str, Any]:
    data = {"train": str(folder / "demand.csv"), "cache": str(folder / "cache"), "horizon": 2, "season": 7, "distribution": kind, **data}
    return {
        "task": "forecasting",
        "data": data,
        "model": {"hidden": 4, "linear": 7},
        "batch": {"lanes": 4, "steps": 16},
        "train": {"epochs": 1},
    }


@pytest.mark.parametrize("kind", ["normal", "student_t", "negative_binomial", "poisson"])
def test_what_reads_a_run_finds_quantiles(runs: Path, kind: str) -> None:
    rows = predict(runs / kind, runs / "demand.csv", device="cpu")
    assert list(rows[0]) == ["unique_id", "ds", "step", "y-q0.1", "y-q0.5", "y-q0.9"]
    assert all(row["y-q0.1"] <= row["y-q0.5"] <= row["y-q0.9"] for row in rows)
    if kind in ("negative_binomial", "poisson"):
        assert all(row["y-q0.9"] == int(row["y-q0.9"]) >= 0 for row in rows)
    found = evaluate_run(runs / kind, device="cpu", by=("step",))
    assert {"loss", "mae", "mase", "pinball", "crps", "within_80", "weighted_quantile_loss", "naive_pinball"} <= set(found)
    back = cw.Forecaster.load(runs / kind, device="cpu").backtest(pd.read_csv(runs / "demand.csv", parse_dates=["ds"]), origins=2)
    assert {"q0.1", "q0.5", "q0.9", "truth"} <= set(back.columns)
    both = predict([runs / kind, runs / kind], runs / "demand.csv", device="cpu")
    assert both[0]["y-q0.9"] == pytest.approx(rows[0]["y-q0.9"])
    with pytest.raises(DataError, match=rf"forecasts with data\.distribution={kind}, whose average is not that of the forecasts"):
        evaluate_run([runs / kind, runs / kind], device="cpu")


def test_counts_are_scaled_by_their_mean_and_scored_as_they_are(runs: Path) -> None:
    spec = parse(_spec(runs, "negative_binomial"))
    prepared = prepare(spec)
    codec, frame = prepared.codec, pd.read_csv(runs / "demand.csv")
    assert all(mean == (0.0,) for mean in codec.means)
    own = frame[frame.unique_id == "item 1"].y[: int(prepared.train.lengths[1])]
    assert codec.scale_of["item 1"][1][0] == pytest.approx(own.mean())
    part = Task.of(spec, codec, prepared.facts, prepared.train).part("train", prepared.train)
    assert part.view.targets_at is not None
    rows = prepared.train.starts[1] + np.arange(5)
    assert part.view.targets_at(rows)[:, :, 0].tolist() == [own[at + 1 : at + 3].tolist() for at in range(5)]


def test_what_is_no_count_is_refused_at_reading(tmp_path: Path) -> None:
    for bad, shown in ((1.5, "1.5"), (-2, "-2")):
        frame = demand(2, 40).astype({"y": float})
        frame.loc[55, "y"] = bad
        frame.to_csv(tmp_path / "demand.csv", index=False)
        with pytest.raises(
            DataError,
            match=rf"the row of 2024-01-16 of series item 1, column y is {shown}, and data\.distribution=poisson needs whole numbers of 0 "
            r"or more; use data\.distribution=normal or student_t, or round it",
        ):
            prepare(parse(_spec(tmp_path, "poisson")))


def test_logs_of_a_normal_distribution_are_undone_in_quantiles_and_paths(tmp_path: Path) -> None:
    frame = demand(1, 80).assign(y=lambda rows: np.exp(rows.y / 10 + 5))
    data = {"horizon": 2, "distribution": "normal", "transform": "log", "quantiles": [0.25, 0.75]}
    how: dict[str, Any] = {"task": "forecasting", "batch": {"lanes": 2, "steps": 8}, "train": {"epochs": 1}, "device": "cpu"}
    cw.fit({"hidden": 4}, frame, data=data, run=tmp_path / "run", progress=False, **how)
    [first, *_] = predict(tmp_path / "run", frame, device="cpu")
    paths = predict(tmp_path / "run", frame, samples=1000, steps=1, device="cpu")
    low, high = np.quantile([row["y"] for row in paths], [0.25, 0.75])
    assert (low, high) == (pytest.approx(first["y-q0.25"], rel=0.03), pytest.approx(first["y-q0.75"], rel=0.03))
    assert 80 < first["y-q0.25"] < first["y-q0.75"] < 500
    assert "weighted_quantile_loss" not in evaluate_run(tmp_path / "run", frame, device="cpu")
