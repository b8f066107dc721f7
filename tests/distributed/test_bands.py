"""Bands, and what counts of a forecaster's head, on several workers: those of one worker. Real processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from carrywave.prediction.predict import predict
from carrywave.runs.checkpoint.snapshot import weights_metadata
from carrywave.spec.load import parse
from carrywave.train.fit import train

sys.path.insert(0, str(Path(__file__).parent))
from _train_jobs import carry_out, rows_of

CLOSE = 1e-9  # sums in another order, in float64, over some dozen steps
PLANS: list[dict[str, Any]] = [{"stages": 2, "cuts": [1], "micro_batches": 2, "chunk_steps": 4}, {"replicas": 2}]


def spec(folder: Path, channels: str, plan: dict[str, Any] | None = None) -> dict[str, Any]:
    data = {"train": str(folder / "walks.csv"), "cache": str(folder / "cache"), "horizon": 3, "channels": channels, "bands": [0.5, 0.8]}
    return {
        "task": "forecasting",
        "data": data | {"split": [0.5, 0.25, 0.25]},
        "model": {"hidden": 5, "layers": 2, "linear": 9},
        "batch": {"lanes": 3, "steps": 8},
        "train": {"precision": "fp64", "lr": 0.02, "epochs": 2, "evaluate_every": 5},
        **({"plan": plan} if plan else {}),
    }


@pytest.mark.parametrize("channels", ["independent", "joint"])
def test_any_plan_gives_the_bands_of_one_device(tmp_path: Path, channels: str) -> None:
    draw = np.random.default_rng(3)
    parts = [
        pd.DataFrame({"unique_id": name, "ds": pd.date_range("2024-01-01", periods=rows), **dict(zip("uv", walks, strict=True))})
        for name, rows in (("p", 120), ("q", 105), ("r", 130))
        for walks in [draw.normal(size=(2, rows)).cumsum(axis=1)]
    ]
    pd.concat(parts).to_csv(tmp_path / "walks.csv", index=False)
    train(parse(spec(tmp_path, channels)), run=tmp_path / "serial", device="cpu")
    jobs: list[dict[str, Any]] = [{"run": f"plan{number}", "spec": spec(tmp_path, channels, plan)} for number, plan in enumerate(PLANS)]
    jobs += [{"predict": "serial", "data": "walks.csv"}]
    told = carry_out(tmp_path, 2, jobs, "jobs")[0]
    assert not [each["error"] for each in told if "error" in each]
    wanted, weights = rows_of(tmp_path / "serial"), load_file(tmp_path / "serial/weights.safetensors")
    bands = json.loads((tmp_path / "serial/bands.json").read_text())
    share = weights_metadata(tmp_path / "serial/weights.safetensors").get("share")
    assert share is not None  # walks: something is chosen
    for number in range(len(PLANS)):
        for row, expected in zip(rows_of(tmp_path / f"plan{number}"), wanted, strict=True):
            for key, value in expected.items():
                assert row[key] == (pytest.approx(value, rel=CLOSE, abs=1e-12) if isinstance(value, float) else value), (key, row, expected)
        assert weights_metadata(tmp_path / f"plan{number}/weights.safetensors").get("share") == share
        for name, tensor in load_file(tmp_path / f"plan{number}/weights.safetensors").items():
            torch.testing.assert_close(tensor, weights[name], rtol=CLOSE, atol=1e-12)
        found = json.loads((tmp_path / f"plan{number}/bands.json").read_text())
        np.testing.assert_allclose(found.pop("radius"), bands["radius"], rtol=CLOSE)
        assert found == {name: value for name, value in bands.items() if name != "radius"}
    alone = predict(tmp_path / "serial", tmp_path / "walks.csv", device="cpu", note=lambda _: None)
    assert {"u", "u-q0.1", "u-q0.25", "u-q0.75", "u-q0.9"} < set(alone[0])
