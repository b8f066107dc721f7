"""Replicas that do not exchange at every step: real processes over gloo against a plain simulation of all replicas in one, in float64."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from _sync_reference import reference, text
from _train_jobs import carry_out as carried_out
from _train_jobs import rows_of

import _whole_snapshots

CLOSE = 1e-10  # sums in another order, in float64, over two dozen steps at a rate where training is stable
STEPS = 22  # an epoch has 17, so that one ends in between


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
    """The reference has no dropout or schedule, which a task's defaults may have."""
    return carried_out(folder, workers, [{"defaults": False, **job} for job in jobs], name)


def parameters(run: Path) -> dict[str, torch.Tensor]:
    return _whole_snapshots.load(run / "snapshots").parameters


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, tensor in wanted.items():
        error = float((found[name] - tensor).abs().max() / tensor.abs().max())
        assert error < CLOSE, f"{name}: {error:.1e}"


LOCAL: dict[str, Any] = {"sync": "local", "sync_every": 4}
DILOCO: dict[str, Any] = {"sync": "diloco", "sync_every": 4}
TWO: dict[str, dict[str, Any]] = {
    "local": LOCAL,
    "sgd": LOCAL | {"optimizer": "sgd", "lr": 0.5, "momentum": 0.5},
    "block": LOCAL | {"sync_momentum": 0.5},
    "diloco": DILOCO,
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


@pytest.mark.slow
def test_exchanging_after_every_step_of_sgd_is_what_step_does(tmp_path: Path) -> None:
    """Also if replicas have different numbers of targets: the weighted mean of their steps is the step of the weighted mean gradient."""
    sgd = {"optimizer": "sgd", "lr": 0.5, "clip": None}
    plan = {"replicas": 2}
    jobs = [
        {"run": "step", "spec": spec(tmp_path, plan, **sgd)},
        {"run": "local", "spec": spec(tmp_path, plan, **sgd, sync="local", sync_every=1)},
    ]
    told = carry_out(tmp_path, 2, jobs)
    assert all(each.get("ending") == "done" for rank in told for each in rank), told
    wanted = parameters(tmp_path / "step")
    assert_close(parameters(tmp_path / "local"), wanted)
    for ours, theirs in zip(rows_of(tmp_path / "local"), rows_of(tmp_path / "step"), strict=True):
        for key in theirs.keys() - {"split", "norm"}:  # the norm is that of each replica
            assert ours[key] == pytest.approx(theirs[key], rel=CLOSE), key


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_replicas(tmp_path: Path) -> None:
    plan = {"replicas": 2}
    firsts = {"local": LOCAL, "diloco": DILOCO, "async": ASYNC}
    jobs = [{"run": name, "spec": spec(tmp_path, plan, **(train | {"max_steps": 13}))} for name, train in firsts.items()]
    told = carry_out(tmp_path, 2, jobs)
    assert all(each.get("ending") == "done" for rank in told for each in rank), told
    more = [{"run": name, "resume": True, "spec": spec(tmp_path, {"replicas": 3}, **train)} for name, train in firsts.items()]
    told = carry_out(tmp_path, 3, more, "more")
    assert all(each.get("ending") == "done" for rank in told for each in rank), told
    for name in ("local", "diloco", "async"):
        assert rows_of(tmp_path / name)[-1]["step"] == STEPS


ASYNC: dict[str, Any] = {"sync": "async", "sync_every": 5, "sync_staleness": 1, "snapshot_every": 10}


@pytest.mark.slow
def test_asynchronous_replicas_learn_and_stay_within_the_bound(tmp_path: Path) -> None:
    plan = {"replicas": 3}
    jobs = [
        {"run": "async", "spec": spec(tmp_path, plan, **(ASYNC | {"max_steps": 60, "lr": 0.02}))},
        {"run": "stages", "spec": spec(tmp_path, {"replicas": 1, "stages": 3, "chunk_steps": 3}, **ASYNC)},
    ]
    told = carry_out(tmp_path, 3, jobs)
    for rank in told:
        assert rank[0]["ending"] == "done", told
        assert rank[1]["error"].startswith("PlanError: train.sync=async trains a whole model on each worker, but plan.stages=3; use")
    rows = [row for row in rows_of(tmp_path / "async") if row["split"] == "train"]
    assert rows[-1]["loss"] < 0.9 * rows[0]["loss"]
    assert sum(row["steps"] for row in rows) == 60
    assert {row["step"] for row in rows} <= {*range(5, 61, 5), 17, 34, 51}  # meetings, and ends of epochs
    stale = [row for row in rows_of(tmp_path / "async", "timing.jsonl") if "staleness" in row]
    assert 0 < stale[-1]["staleness"] <= stale[-1]["most_stale"] <= 2 * 3
    assert stale[-1]["most_ahead"] <= 1
    assert not (tmp_path / "stages").exists()
