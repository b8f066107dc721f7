"""Several runs as one on several workers: the figures and predictions of one worker. float64, real processes over gloo."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from carrywave.prediction.evaluate import evaluate_run
from carrywave.prediction.predict import predict
from carrywave.spec.load import parse
from carrywave.train.fit import train

sys.path.insert(0, str(Path(__file__).parent))
from _train_jobs import carry_out

CLOSE = 1e-10  # sums in another order, in float64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ensembles")


def written(folder: Path) -> dict[str, dict[str, Any]]:
    """The data of each task; rows are few, so that a worker has no lanes of some batches."""
    draw = np.random.default_rng(1)
    steps = [draw.normal(size=(2 + number % 5, 2)).round(4).tolist() for number in range(13)]
    rows = {
        "classification": [{"steps": each, "label": "ab"[number % 2]} for number, each in enumerate(steps)],
        "tagging": [{"steps": each, "labels": ["x" if value[0] > 0 else "y" for value in each]} for each in steps],
        "regression": [{"steps": each, "label": float(number)} for number, each in enumerate(steps)],
    }
    for task, some in rows.items():
        (folder / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    lines = [f"{name},{row},{draw.normal():.4f}" for name in "pqr" for row in range(20)]
    (folder / "forecasting.csv").write_text("\n".join(["unique_id,ds,y", *lines]) + "\n")
    (folder / "language.txt").write_text("the carry goes on and on\n" * 20)
    return {
        "classification": {"train": "classification.jsonl"},
        "tagging": {"train": "tagging.jsonl"},
        "regression": {"train": "regression.jsonl"},
        "forecasting": {"train": "forecasting.csv", "horizon": 2},
        "language": {"train": "language.txt"},
    }


@pytest.mark.slow
def test_runs_together_on_two_workers_are_those_on_one(folder: Path) -> None:
    """They were planned for stages, but every worker holds all of them as a whole."""
    jobs: list[dict[str, Any]] = []
    for task, data in written(folder).items():
        file = data["train"]
        own = {**data, "train": str(folder / file), "valid": str(folder / file)}
        for seed in (1, 2):
            spec = {
                "task": task,
                "data": own,
                "model": {"hidden": 4, "layers": 2},
                "train": {"epochs": 1, "precision": "fp64", "seed": seed},
            }
            train(parse(spec), run=folder / f"{task}-{seed}", device="cpu")
            path = folder / f"{task}-{seed}" / "spec.yaml"
            path.write_text(path.read_text().replace("plan: auto", "plan: {stages: 2}"))
        jobs.append({"evaluate": [f"{task}-1", f"{task}-2"]})
        jobs += [{"predict": [f"{task}-1", f"{task}-2"], "data": file}] if task != "language" else []
    told = carry_out(folder, 2, jobs, "jobs")
    assert not [each["error"] for each in told[0] if "error" in each]
    for number, job in enumerate(jobs):
        if "evaluate" in job:
            alone = evaluate_run([folder / name for name in job["evaluate"]], device="cpu", note=lambda _: None)
            for rank in (0, 1):
                for key, value in alone.items():
                    assert told[rank][number]["row"][key] == (pytest.approx(value, rel=CLOSE) if isinstance(value, float) else value), key
        else:
            rows = predict([folder / name for name in job["predict"]], folder / job["data"], device="cpu", note=lambda _: None)
            assert _rounded(told[0][number]["rows"]) == _rounded(rows)
            assert told[1][number]["rows"] == []


def _rounded(value: Any) -> Any:
    """Outputs travel in float32."""
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return round(value, 5) if isinstance(value, float) else value
