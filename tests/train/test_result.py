"""From raw data to the trained model's own output, by position, by frame, and scaled for each sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import carrywave as cw

RANDOM = np.random.default_rng(1)
STEPS = RANDOM.normal(3.0, 5.0, size=(24, 6, 2))
LABELS = np.where(STEPS.sum(axis=(1, 2)) > 36.0, "up", "down")
QUICK: dict[str, Any] = {"train": {"epochs": 2, "lr": 1e-2}, "device": "cpu"}


class Said:
    """Keeps the lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def begin(self, summary: str) -> None:
        pass

    def step(self, info: object) -> None:
        pass

    def evaluated(self, row: object) -> None:
        pass

    def say(self, line: str) -> None:
        self.lines.append(line)

    def end(self, line: str) -> None:
        pass


@pytest.mark.parametrize("standardize", [True, "sequence"])
def test_the_model_takes_raw_data_by_way_of_its_batch(tmp_path: Path, standardize: bool | str) -> None:
    result = cw.fit(
        {"hidden": 4, "layers": 1}, (STEPS, LABELS), task="classification", data={"standardize": standardize}, run=tmp_path / "run", **QUICK
    )
    ragged = [STEPS[0], STEPS[1][:3]]
    batch = result.batch(ragged)
    assert batch.lengths.tolist() == [6, 3]
    with torch.no_grad():
        y, state = result.model(batch.inputs, lengths=batch.lengths)
        shares = torch.softmax(result.model.output(y, state, linear=batch.linear).double(), dim=-1)
    told = [[row["probabilities"][label] for label in ("down", "up")] for row in cw.predict(result.run, ragged, device="cpu")]
    np.testing.assert_allclose(shares.numpy(), told, atol=1e-6)  # shown with six digits


def test_a_shuffled_frame_trains_evaluates_and_predicts_by_position(tmp_path: Path) -> None:
    order = RANDOM.permutation(len(STEPS))
    shuffled = pd.Series(LABELS, dtype="category").sample(frac=1.0, random_state=1)
    steps = STEPS[shuffled.index]
    arrays = cw.fit({"hidden": 4, "layers": 1}, (steps, list(shuffled)), task="classification", run=tmp_path / "arrays", **QUICK)
    frames = cw.fit({"hidden": 4, "layers": 1}, (steps, shuffled), task="classification", run=tmp_path / "frames", **QUICK)
    assert frames.metrics == arrays.metrics
    as_frame = pd.DataFrame({"steps": list(steps), "label": shuffled.astype("string").to_numpy()}, index=order)
    for data in ((steps, shuffled), as_frame):
        assert cw.evaluate(frames.run, data, device="cpu") == cw.evaluate(arrays.run, (steps, list(shuffled)), device="cpu")
    told = cw.predict(arrays.run, steps, device="cpu")
    for data in (as_frame, pd.Series(list(steps), index=order)):
        assert cw.predict(frames.run, data, device="cpu") == told


def test_scaled_for_each_sequence_its_size_does_not_matter(tmp_path: Path) -> None:
    own = {"standardize": "sequence"}
    sizes = 10.0 ** RANDOM.integers(-4, 5, size=len(STEPS))
    plain = {"hidden": 4, "layers": 1, "bidirectional": False, "front": "none"}
    small = cw.fit(plain, (STEPS, LABELS), task="classification", data=own, run=tmp_path / "a", **QUICK)
    sized = [steps * size for steps, size in zip(STEPS, sizes, strict=True)]
    large = cw.fit(
        plain,
        (sized, LABELS),
        task="classification",
        data=own,
        run=tmp_path / "b",
        plan={"chunk_steps": 2},
        **QUICK,
    )
    # Equal up to rounding of the scale, in float32.
    assert large.metrics["valid"]["loss"] == pytest.approx(small.metrics["valid"]["loss"], rel=1e-4)
    one, other = (cw.evaluate(result.run, (sized, LABELS), device="cpu") for result in (small, large))
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
    labels = [[row["label"] for row in cw.predict(run, data, device="cpu")] for run, data in ((small.run, sized), (large.run, STEPS))]
    assert labels[0] == labels[1]


def test_a_series_is_scaled_by_its_own_rows(tmp_path: Path) -> None:
    wave = np.sin(np.arange(80) / 3.0)
    own = {"standardize": "sequence", "horizon": 2, "split": [0.7, 0.3]}
    result = cw.fit({"hidden": 4, "layers": 1}, wave[:, None], task="forecasting", data=own, run=tmp_path / "run", **QUICK)
    plain, large = (cw.predict(result.run, [wave[:, None] * size], device="cpu") for size in (1.0, 1e6))
    for row, other in zip(plain, large, strict=True):
        assert other["0"] == pytest.approx(row["0"] * 1e6, rel=1e-4)  # rounding of the scale, in float32


def test_what_is_odd_about_a_forecast_is_said(tmp_path: Path) -> None:
    said = Said()
    times = pd.bdate_range("2024-01-01", periods=80).delete(40)
    frame = pd.DataFrame({"a": RANDOM.normal(size=79).cumsum(), "note": "x"}, index=times.rename("day"))
    asked = {"horizon": 3, "quantiles": [0.1, 0.9], "split": [0.7, 0.3]}
    result = cw.fit({"hidden": 4, "layers": 1}, frame, task="forecasting", data=asked, run=tmp_path / "run", watch=said, **QUICK)
    assert "train: reading a, ordered by day (every B); ignored: note (text)" in said.lines
    assert any("1 missing row (every B) counts as empty" in line for line in said.lines)
    assert result.metrics["valid"].keys() == {
        *("loss", "pinball", "coverage_0.1", "coverage_0.9"),
        *("naive_pinball", "last_pinball", "ridge_pinball", "ridge_lags"),
    }
    assert result.metrics["valid"]["pinball"] == pytest.approx(result.metrics["valid"]["loss"], rel=1e-5)  # the loss sums in float32
    worse = result.metrics["valid"]["pinball"] > result.metrics["valid"]["naive_pinball"]
    assert any(line.startswith("valid: worse than the naive forecast: pinball") for line in said.lines) == worse
    with pytest.warns(UserWarning, match="1 missing row") as warned:
        rows = cw.predict(result.run, frame, device="cpu")
    with pytest.warns(UserWarning, match="1 missing row") as also_warned:
        cw.evaluate(result.run, frame, device="cpu")
    assert {Path(line.filename) for line in (*warned, *also_warned)} == {Path(__file__)}  # not somewhere within the package
    assert [row["day"] for row in rows] == ["2024-04-22", "2024-04-23", "2024-04-24"]
