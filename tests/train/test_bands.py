"""Bands around forecasts of single values, from file to prediction: how much they hold, who reports it, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import carrywave as cw
from carrywave.errors import RunError, SpecError
from carrywave.prediction.predict import predict_run
from carrywave.report.chart import Chart
from carrywave.report.samples import samples_of
from carrywave.spec.load import parse

MODEL: dict[str, Any] = {"hidden": 8, "linear": 12}


def series(rows: int = 1200, seed: int = 0) -> pd.DataFrame:
    """Two series of the same kind, one of them a thousand times as large."""
    draw = np.random.default_rng(seed)
    parts = []
    for name, size in (("small", 1.0), ("large", 1000.0)):
        noise = draw.normal(size=rows)
        for row in range(1, rows):
            noise[row] += 0.8 * noise[row - 1]
        parts.append(pd.DataFrame({"unique_id": name, "ds": pd.date_range("2024-01-01", periods=rows, freq="h"), "y": size * (20 + noise)}))
    return pd.concat(parts, ignore_index=True)


def fitted(folder: Path, frame: Any, *, resume: bool = False, **data: Any) -> cw.Result:
    options = {"horizon": 4, "split": [0.6, 0.2, 0.2], "bands": [0.8, 0.95], **data}
    how: dict[str, Any] = {"task": "forecasting", "train": {"epochs": 2, "seed": 1}, "device": "cpu", "progress": False}
    return cw.fit(MODEL if data.get("transform") != "diff" else {"hidden": 8}, frame, data=options, run=folder, resume=resume, **how)


@pytest.mark.parametrize("transform", ["none", "log", "diff"])
def test_bands_hold_what_they_are_asked_to(tmp_path: Path, transform: str) -> None:
    frame = series()
    found = fitted(tmp_path / "run", frame, transform=transform)
    for part, room in (("valid", 0.005), ("test", 0.03)):  # by the making of the bands; three points, on rows that nothing was chosen by
        assert found.metrics[part]["within_80"] == pytest.approx(0.8, abs=room)
        assert found.metrics[part]["within_95"] == pytest.approx(0.95, abs=room)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["within_80"] == found.metrics["test"]["within_80"]
    # The same in the units of the file, from forecasts at origins of the test part.
    rolled = cw.Forecaster.load(tmp_path / "run", device="cpu").backtest(frame, origins=40, stride=5)
    inside = (rolled["q0.025"] <= rolled.truth) & (rolled.truth <= rolled["q0.975"])
    assert inside.mean() == pytest.approx(0.95, abs=0.05)  # of 320 forecasts that depend on each other
    assert inside.groupby(rolled.unique_id).mean().min() > 0.85
    assert ((rolled["q0.025"] < rolled["q0.1"]) & (rolled["q0.1"] < rolled.forecast) & (rolled.forecast < rolled["q0.9"])).all()


def test_predictions_have_the_ends_of_the_bands_beside_the_value(tmp_path: Path) -> None:
    frame = series(400)
    forecaster = cw.Forecaster(3, data={"bands": [0.8]}, model=MODEL, train={"epochs": 1}, run=tmp_path / "run", device="cpu").fit(frame)
    ahead = forecaster.predict()
    assert list(ahead.columns) == ["unique_id", "ds", "y", "y-q0.1", "y-q0.9"]
    np.testing.assert_allclose(ahead["y"] - ahead["y-q0.1"], ahead["y-q0.9"] - ahead["y"], rtol=1e-9)
    # One radius for both series, in their own units, which are a thousand to one.
    width = (ahead["y-q0.9"] - ahead["y-q0.1"]).to_numpy().reshape(2, 3)
    ratio = dict(zip(ahead.unique_id.unique(), width[:, 0], strict=True))
    np.testing.assert_allclose(width[0] / width[1], width[0, 0] / width[1, 0], rtol=1e-6)
    assert 300 < ratio["large"] / ratio["small"] < 3000  # also if they move with the last values
    assert cw.Forecaster.load(tmp_path / "run", device="cpu").predict(frame).equals(ahead)
    without = cw.Forecaster(3, model=MODEL, train={"epochs": 1}, run=tmp_path / "without", device="cpu").fit(frame).predict()
    assert without["y"].equals(ahead["y"])  # they change no forecast


def test_bands_are_wide_where_a_series_moves_much(tmp_path: Path) -> None:
    """Noise whose deviation goes up and down: bands of one width would hold too much of it in quiet times and too little in others."""
    rows = np.arange(4000)
    loud = np.where(rows // 200 % 2, 4.0, 1.0)
    frame = pd.DataFrame(
        {"ds": pd.date_range("2020-01-01", periods=4000, freq="h"), "y": loud * np.random.default_rng(0).normal(size=4000)}
    )
    fitted(tmp_path / "run", frame, bands=[0.9])
    rolled = cw.Forecaster.load(tmp_path / "run", device="cpu").backtest(frame, origins=150, stride=5)
    inside = (rolled["q0.05"] <= rolled.truth) & (rolled.truth <= rolled["q0.95"])
    shares = inside.groupby(loud[4000 - 5 * np.arange(149, -1, -1).repeat(4) - 5]).mean()
    assert (shares - 0.9).abs().max() < 0.06, shares  # with one width, about 1.00 and 0.79
    fitted(tmp_path / "one", frame, bands=[0.9], standardize=True)
    assert json.loads((tmp_path / "one/bands.json").read_text())["steps"] == 0


def test_the_report_and_a_file_of_predictions_have_the_bands(tmp_path: Path) -> None:
    frame = series(400).query("unique_id == 'small'")[["ds", "y"]]
    frame.to_csv(tmp_path / "y.csv", index=False)
    data = {"train": str(tmp_path / "y.csv"), "cache": str(tmp_path / "cache")}
    found = fitted(tmp_path / "run", None, **data)
    [drawn] = [block for block in samples_of(tmp_path / "run", "cpu") if isinstance(block, Chart)]
    [band], forecast = drawn.areas, drawn.curves[1]
    assert (band.name, forecast.name) == ("band of 0.95", "forecast")
    assert all(low < value < high for (_, low, high), (_, value) in zip(band.points, forecast.points, strict=True))
    assert predict_run(tmp_path / "run", tmp_path / "y.csv", tmp_path / "ahead.csv", device="cpu") == 4
    assert list(pd.read_csv(tmp_path / "ahead.csv").columns) == ["ds", "step", "y", "y-q0.025", "y-q0.1", "y-q0.9", "y-q0.975"]
    assert cw.evaluate(tmp_path / "run", device="cpu")["within_80"] == found.metrics["test"]["within_80"]


def test_columns_apart_and_together_have_the_widths_of_their_errors(tmp_path: Path) -> None:
    """A column of pure noise beside one that is known but for little of it, in standardised units."""
    draw = np.random.default_rng(5)
    frame = pd.DataFrame({"noise": draw.normal(size=900), "wave": 10 * np.sin(np.arange(900) / 40) + 0.1 * draw.normal(size=900)})
    for channels in ("independent", "joint"):
        fitted(tmp_path / channels, frame, channels=channels, bands=[0.9], standardize=True)
        radius_LHC = np.array(json.loads((tmp_path / channels / "bands.json").read_text())["radius"])
        assert radius_LHC.shape == (1, 4, 2)
        assert (radius_LHC[0, :, 0] > 1.2).all(), channels  # 1.645 of pure noise, if the forecast is its mean
        assert (radius_LHC[0, :, 1] < 0.5).all(), channels


def test_bands_wait_for_the_end_of_training(tmp_path: Path) -> None:
    """Killed before: there are weights, and no bands of them; those of older weights are none, either."""
    frame = series(300)
    found = fitted(tmp_path / "run", frame)
    file = tmp_path / "run/bands.json"
    saved = json.loads(file.read_text())
    again = fitted(tmp_path / "run", frame, resume=True)
    assert json.loads(file.read_text()) == saved
    assert again.metrics == found.metrics
    file.write_text(json.dumps(saved | {"step": saved["step"] + 1}))
    with pytest.raises(RunError, match="no bands for its weights"):
        cw.predict(tmp_path / "run", frame, device="cpu")
    assert "within_80" not in cw.evaluate(tmp_path / "run", frame, device="cpu")
    file.write_text(json.dumps(saved | {"radius": [[1.0]]}))
    with pytest.raises(RunError, match=r"bands\.json is damaged"):
        cw.predict(tmp_path / "run", frame, device="cpu")


def test_bands_that_cannot_be_are_refused(tmp_path: Path) -> None:
    for data, words in (
        ({"bands": [0.95, 0.8]}, "bands must increase"),
        ({"bands": [0.8], "quantiles": [0.1, 0.9]}, "data.quantiles already says"),
        ({"bands": [0.8], "distribution": "normal"}, "data.distribution already says"),
    ):
        with pytest.raises(SpecError, match=words):
            parse({"task": "forecasting", "data": {"train": "x.csv", **data}})
    with pytest.raises(SpecError, match="measured on valid, and there is none"):
        fitted(tmp_path / "none", series(200), split=None, share=0.0)
