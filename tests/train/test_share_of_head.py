"""What a trained forecaster adds to the last value: nothing where there is nothing to learn, and all of it where there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

import carrywave as cw
from carrywave.data.sequences import View
from carrywave.runs.checkpoint.weights import weights_metadata
from carrywave.tasks.metrics.kept_forecasts import KeptForecasts
from carrywave.train.held_out import choose

HOW: dict[str, Any] = {"task": "forecasting", "device": "cpu", "progress": False}


def fitted(folder: Path, values: np.ndarray, *, resume: bool = False, **data: Any) -> cw.Result:
    frame = pd.DataFrame({"ds": pd.date_range("2020-01-01", periods=len(values)), "y": values})
    options = {"horizon": 12, "split": [0.7, 0.15, 0.15], **data}
    return cw.fit({"hidden": 8, "linear": 48}, frame, data=options, train={"epochs": 3, "seed": 1}, run=folder, resume=resume, **HOW)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_random_walk_is_forecast_by_its_last_value(tmp_path: Path, seed: int) -> None:
    walk = np.random.default_rng(seed).normal(size=1500).cumsum()
    found = fitted(tmp_path / "run", walk, bands=[0.8])
    test = found.metrics["test"]
    assert test["mae"] <= 1.005 * test["last_mae"]
    assert weights_metadata(tmp_path / "run/weights.safetensors")["share"] == "0.0"
    assert found.metrics["valid"]["mae"] == pytest.approx(found.metrics["valid"]["last_mae"], rel=1e-5)
    rows = cw.predict(tmp_path / "run", pd.DataFrame({"ds": pd.date_range("2020-01-01", periods=200), "y": walk[:200]}), device="cpu")
    np.testing.assert_allclose([row["y"] for row in rows], walk[199], atol=1e-4)  # numbers are read as float32
    # The bands are around what is forecast: of a walk they widen with the root of the steps, to 1.28 deviations.
    width = np.array([row["y-q0.9"] - row["y"] for row in rows])
    np.testing.assert_allclose(width / np.sqrt(np.arange(1, 13)), 1.28, rtol=0.4)  # of a dozen stretches that do not overlap
    assert found.metrics["valid"]["within_80"] == pytest.approx(0.8, abs=0.01)


def test_the_choice_is_made_once(tmp_path: Path) -> None:
    """A run that was stopped after it goes on with the weights as they are, and ends with the same figures."""
    walk = np.random.default_rng(0).normal(size=1500).cumsum()
    found = fitted(tmp_path / "run", walk)
    weights = load_file(tmp_path / "run/weights.safetensors")
    assert not weights["head.weight"].any()
    assert not weights["head.line.weight"].any()
    assert weights["lstm.weight_hh_l0"].any()
    again = fitted(tmp_path / "run", walk, resume=True)
    assert again.metrics == found.metrics
    for name, tensor in load_file(tmp_path / "run/weights.safetensors").items():
        assert torch.equal(tensor, weights[name])
    for name, tensor in again.model.state_dict().items():
        assert torch.equal(tensor, weights[name])


def test_what_is_learned_stays_as_it_is(tmp_path: Path) -> None:
    rows = np.arange(1500)
    found = fitted(tmp_path / "run", np.sin(rows / 5) + 0.1 * np.random.default_rng(0).normal(size=1500))
    assert "share" not in weights_metadata(tmp_path / "run/weights.safetensors")
    assert found.metrics["test"]["mae"] < 0.5 * found.metrics["test"]["last_mae"]


def kept(out_NHC: np.ndarray, target_NHC: np.ndarray) -> KeptForecasts:
    lengths = np.array([len(out_NHC)])
    made = KeptForecasts(View(out_NHC, np.zeros(1, np.int64), lengths), out_NHC.shape[1], out_NHC.shape[2], 0, torch.device("cpu"))
    made.update(*(torch.from_numpy(each[:, None]) for each in (out_NHC, target_NHC)), torch.tensor([0]), torch.tensor([0]))
    return made


@pytest.mark.parametrize("squares", [False, True])
def test_a_share_is_what_is_surely_better_than_nothing(squares: bool) -> None:
    draw = np.random.default_rng(4)
    signal_NHC, noise_NHC = draw.normal(size=(2, 400, 4, 1))
    target_NHC = signal_NHC + 0.5 * noise_NHC
    assert choose(kept(signal_NHC, target_NHC), squares=squares) == 1.0
    assert choose(kept(draw.normal(size=(400, 4, 1)), target_NHC), squares=squares) == 0.0
    assert 0.0 < choose(kept(4.0 * signal_NHC, target_NHC), squares=squares) <= 0.3  # too much of the right thing: a quarter is best
    assert choose(kept(-signal_NHC[:28], target_NHC[:28]), squares=squares) == 1.0  # seven groups of four: nothing is known
    target_NHC[::3] = np.nan
    assert choose(kept(signal_NHC, target_NHC), squares=squares) == 1.0
