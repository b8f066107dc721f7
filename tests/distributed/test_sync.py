"""Replicas that do not exchange at every step: real processes over gloo against a plain simulation of all replicas in one, in float64."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from _sync_reference import reference, text

from carrywave.launch.launcher import start
from carrywave.runs.checkpoint import snapshot

WORKER = Path(__file__).with_name("_train.py")
CLOSE = 1e-10  # sums in another order, in float64, over two dozen steps at a rate where training is stable
STEPS = 22  # an epoch has 18, so that one ends in between


def spec(folder: Path, plan: dict[str, Any] | None = None, model: dict[str, Any] | None = None, **train: Any) -> dict[str, Any]:
    return {
        "task": "language",
        "data": {"train": str(text(folder)), "tokens": "char"},
        "model": {"hidden": 6, "layers": 2} | (model or {}),
        "batch": {"lanes": 5, "steps": 7},  # which do not divide evenly among 2 replicas
        "train": {"precision": "fp64", "optimizer": "adam", "lr": 0.01, "clip": 0.5, "epochs": 9, "max_steps": STEPS, "log_every": 3}
        | train,
        "plan": plan or {},
    }


def carry_out(folder: Path, workers: int, jobs: list[dict[str, Any]], name: str = "jobs") -> list[list[dict[str, Any]]]:
    """What each worker told of each job, by rank."""
    (folder / name).write_text(json.dumps(jobs))
    ended = start([sys.executable, str(WORKER), str(folder), name], workers)
    assert ended.code == 0, ended
    return [json.loads((folder / f"{name}.{rank}.out").read_text()) for rank in range(workers)]


def parameters(run: Path) -> dict[str, torch.Tensor]:
    return snapshot.load(run / "snapshots").parameters


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, tensor in wanted.items():
        error = float((found[name] - tensor).abs().max() / tensor.abs().max())
        assert error < CLOSE, f"{name}: {error:.1e}"


LOCAL: dict[str, Any] = {"sync": "local", "sync_every": 4}
DILOCO: dict[str, Any] = {"sync": "diloco", "sync_every": 4}
TWO: dict[str, dict[str, Any]] = {
    "local": LOCAL,
    "sgd": LOCAL | {"optimizer": "sgd", "lr": 0.5, "momentum": 0.5},
    "block": LOCAL | {"block_momentum": 0.5},
    "nesterov": LOCAL | {"block_momentum": 0.5, "block_nesterov": True},
    "diloco": DILOCO,
    "fragments": DILOCO | {"sync_fragments": 2},
}


@pytest.mark.slow
def test_two_replicas_compute_what_the_reference_does(tmp_path: Path) -> None:
    jobs = [{"run": name, "spec": spec(tmp_path, {"replicas": 2}, **train)} for name, train in TWO.items()]
    told = carry_out(tmp_path, 2, jobs)
    assert all(each.get("ending") == "done" for rank in told for each in rank), told
    for job in jobs:
        assert_close(parameters(tmp_path / job["run"]), reference(job["spec"], 2, STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("tie", [False, True])
def test_replicas_of_stages_compute_what_the_reference_does(tmp_path: Path, tie: bool) -> None:
    plan = {"replicas": 2, "stages": 2, "chunk_steps": 3}
    modes = {"local": TWO["local"], "diloco": TWO["diloco"]}
    jobs = [{"run": name, "spec": spec(tmp_path, plan, {"tie": tie}, **train)} for name, train in modes.items()]
    told = carry_out(tmp_path, 4, jobs)
    assert all(each.get("ending") == "done" for rank in told for each in rank), told
    for job in jobs:
        assert_close(parameters(tmp_path / job["run"]), reference(job["spec"], 2, STEPS))
