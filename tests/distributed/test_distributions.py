"""Runs that forecast distributions on several workers: the weights, metrics, quantiles and paths of one worker. Real processes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from carrywave.prediction.predict import predict
from carrywave.spec.load import parse
from carrywave.train.fit import train

sys.path.insert(0, str(Path(__file__).parent))
from _train_jobs import carry_out, rows_of

CLOSE = 1e-9  # sums in another order, in float64, over some dozen steps
PLANS: list[dict[str, Any]] = [{"stages": 2, "cuts": [1], "micro_batches": 2, "chunk_steps": 4}, {"replicas": 2}]


def spec(folder: Path, kind: str, plan: dict[str, Any] | None = None) -> dict[str, Any]:
    data = {"train": str(folder / "demand.csv"), "cache": str(folder / "cache"), "horizon": 3, "season": 7, "distribution": kind}
    return {
        "task": "forecasting",
        "data": data,
        "model": {"hidden": 5, "layers": 2, "linear": 9},
        "batch": {"lanes": 3, "steps": 8},
        "train": {"precision": "fp64", "lr": 0.02, "epochs": 2, "log_every": 3, "evaluate_every": 5},
        **({"plan": plan} if plan else {}),
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["student_t", "negative_binomial"])
def test_any_plan_gives_the_answer_of_one_device(tmp_path: Path, kind: str) -> None:
    draw = np.random.default_rng(3)
    parts = [
        pd.DataFrame({"unique_id": name, "ds": pd.date_range("2024-01-01", periods=rows), "y": draw.poisson(mean, rows)})
        for name, rows, mean in (("p", 70, 0.7), ("q", 55, 40.0), ("r", 64, 5.0))
    ]
    pd.concat(parts).to_csv(tmp_path / "demand.csv", index=False)
    train(parse(spec(tmp_path, kind)), run=tmp_path / "serial", device="cpu")
    jobs: list[dict[str, Any]] = [{"run": f"plan{number}", "spec": spec(tmp_path, kind, plan)} for number, plan in enumerate(PLANS)]
    jobs += [{"predict": "serial", "data": "demand.csv"}]
    told = carry_out(tmp_path, 2, jobs, "jobs")[0]
    assert not [each["error"] for each in told if "error" in each]
    wanted, weights = rows_of(tmp_path / "serial"), load_file(tmp_path / "serial/weights.safetensors")
    assert {"crps", "within_80", "weighted_quantile_loss"} <= set(next(row for row in wanted if row["split"] == "valid"))
    for number in range(len(PLANS)):
        for row, expected in zip(rows_of(tmp_path / f"plan{number}"), wanted, strict=True):
            for key, value in expected.items():
                assert row[key] == (pytest.approx(value, rel=CLOSE, abs=1e-12) if isinstance(value, float) else value), (key, row, expected)
        for name, tensor in load_file(tmp_path / f"plan{number}/weights.safetensors").items():
            torch.testing.assert_close(tensor, weights[name], rtol=CLOSE, atol=1e-12)
    alone = predict(tmp_path / "serial", tmp_path / "demand.csv", device="cpu", note=lambda _: None)
    for name in ("y-q0.1", "y-q0.5", "y-q0.9"):
        assert [row[name] for row in told[-1]["rows"]] == pytest.approx([row[name] for row in alone], rel=1e-5)
