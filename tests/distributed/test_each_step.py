"""Regression at every step on several workers: the rows, weights, metrics and predictions of one worker. Real processes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from _catchments import catchments
from carrywave.prediction.evaluate import evaluate_run
from carrywave.prediction.predict import predict
from carrywave.spec.load import parse
from carrywave.train.fit import train

sys.path.insert(0, str(Path(__file__).parent))
from _train_jobs import carry_out, rows_of

CLOSE = 1e-9  # sums in another order, in float64, over some dozen steps
PLANS: list[dict[str, Any]] = [
    {"stages": 2, "chunk_steps": 3},
    {"replicas": 2},
    {"replicas": 2, "micro_batches": 2},
    {"stages": 2, "cuts": [1], "micro_batches": 2, "chunk_steps": 4},
]


def spec(folder: Path, plan: dict[str, Any] | None = None) -> dict[str, Any]:
    data = {
        "train": str(folder / "rivers.csv"),
        "cache": str(folder / "cache"),
        "each_step": True,
        "series": "basin",
        "targets": ["flow"],
        "static": ["quick", "slow"],
        "missing": "mask",
        "split": [60, 20],
        "warmup": 4,
    }
    return {
        "task": "regression",
        "data": data,
        "model": {"hidden": 5, "layers": 2, "dropout": 0.2},
        "batch": {"lanes": 4, "steps": 8},
        "train": {"precision": "fp64", "lr": 0.02, "epochs": 2, "log_every": 3, "loss": "nse", "best": "nse_median"},
        **({"plan": plan} if plan else {}),
    }


@pytest.mark.slow
def test_any_plan_gives_the_answer_of_one_device(tmp_path: Path) -> None:
    frame = catchments(3, 80, holes=0.3)
    frame.loc[frame.index % 7 == 2, "rain"] = float("nan")
    frame.drop(index=[11, 12, 130]).to_csv(tmp_path / "rivers.csv", index=False)
    train(parse(spec(tmp_path)), run=tmp_path / "serial", device="cpu")
    jobs: list[dict[str, Any]] = [{"run": f"plan{number}", "spec": spec(tmp_path, plan)} for number, plan in enumerate(PLANS)]
    jobs += [{"evaluate": "serial"}, {"predict": "serial", "data": "rivers.csv"}]
    told = carry_out(tmp_path, 2, jobs, "jobs")[0]
    assert not [each["error"] for each in told if "error" in each]
    wanted, weights = rows_of(tmp_path / "serial"), load_file(tmp_path / "serial/weights.safetensors")
    assert {"nse_median", "kge_median", "rmse"} <= set(next(row for row in wanted if row["split"] == "valid"))
    for number in range(len(PLANS)):
        found = rows_of(tmp_path / f"plan{number}")
        assert [list(row) for row in found] == [list(row) for row in wanted]
        for row, expected in zip(found, wanted, strict=True):
            for key, value in expected.items():
                assert row[key] == (pytest.approx(value, rel=CLOSE, abs=1e-12) if isinstance(value, float) else value), (key, row, expected)
        for name, tensor in load_file(tmp_path / f"plan{number}/weights.safetensors").items():
            torch.testing.assert_close(tensor, weights[name], rtol=CLOSE, atol=1e-12)
    serial = evaluate_run(tmp_path / "serial", device="cpu")
    for key, value in serial.items():
        assert told[-2]["row"][key] == (pytest.approx(value, rel=CLOSE) if isinstance(value, float) else value), key
    alone = predict(tmp_path / "serial", tmp_path / "rivers.csv", device="cpu", note=lambda _: None)
    assert [(row["basin"], row["date"]) for row in told[-1]["rows"]] == [(row["basin"], row["date"]) for row in alone]
    assert [row["flow"] for row in told[-1]["rows"]] == pytest.approx([row["flow"] for row in alone], rel=1e-5)  # they travel in float32
