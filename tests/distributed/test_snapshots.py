"""Snapshots of two workers: written by one of them for any plan, and both learn where it cannot."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from _warm import start
from _whole_snapshots import load

WORKER = Path(__file__).with_name("_snapshots.py")


def spec(folder: Path, plan: dict[str, Any], **train: Any) -> dict[str, Any]:
    """A run of one epoch of some steps, with a snapshot after every third."""
    keys = {"optimizer": "adam", "epochs": 1, "max_steps": 10, "snapshot_every": 3, "keep": 9, "schedule": "constant", "precision": "fp64"}
    return {
        "task": "language",
        "data": {"train": str(folder / "text.txt"), "tokens": "char", "cache": str(folder / "cache")},
        "model": {"hidden": 6, "layers": 3, "dropout": 0.3},
        "batch": {"lanes": 5, "steps": 7},
        "train": keys | train,
        "plan": plan,
    }


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[dict[str, Any]]]]:
    """The folder of all runs, and what both workers told of the last job of each."""
    folder = tmp_path_factory.mktemp("snapshots")
    (folder / "text.txt").write_text("the carry is passed along, and work moves as a wave. " * 12)
    replicas, stages = {"replicas": 2}, {"stages": 2, "chunk_steps": 2}
    jobs: list[dict[str, Any]] = [
        {"run": "replicas", "plan": replicas},
        {"run": "stages", "plan": stages},
        {"run": "moved", "plan": replicas, "train": {"max_steps": 4}},
        {"run": "moved", "plan": stages, "resume": True},
        {"run": "full", "plan": stages, "full": "step-00000006"},
        {"run": "other-data", "plan": replicas, "apart": True, "own_data": "not the same text. " * 40},
        {"run": "no-data", "plan": replicas, "apart": True, "own_data": None},
    ]
    (folder / "jobs").write_text(json.dumps([job | {"spec": spec(folder, job["plan"], **job.get("train", {}))} for job in jobs]))
    ended = start([sys.executable, str(WORKER), str(folder), "jobs"], 2)
    assert ended.code == 0, ended
    found = [json.loads((folder / f"jobs.{rank}.out").read_text()) for rank in range(2)]
    return folder, {job["run"]: [each[number] for each in found] for number, job in enumerate(jobs)}


Told = tuple[Path, dict[str, list[dict[str, Any]]]]


def test_any_plan_goes_on_from_a_snapshot_of_another(told: Told) -> None:
    folder, ended = told
    whole = load(folder / "replicas" / "snapshots")
    assert {name: tensor.shape[1] for name, tensor in whole.carry.items()} == {
        f"lstm.l{layer}.{part}": 5 for layer in range(3) for part in "hc"
    }
    for run in ("stages", "moved"):
        assert [each["ending"] for each in ended[run]] == ["done"] * 2, ended[run]
        found = load(folder / run / "snapshots")
        assert found.meta["progress"]["step"] == 10
        for group in ("parameters", "optimizer", "carry"):
            ours, theirs = getattr(found, group), getattr(whole, group)
            assert ours.keys() == theirs.keys()
            for name, tensor in theirs.items():
                torch.testing.assert_close(
                    ours[name], tensor, rtol=1e-9, atol=1e-12, msg=f"{run}: {name}"
                )  # float64: sums in another order


def test_one_that_cannot_be_written_ends_the_run_for_all(told: Told) -> None:
    folder, ended = told
    line = "ResourceError: snapshot full/snapshots/step-00000006.safetensors could not be written: No space left on device; the previous"
    assert all(each["error"].startswith(line) for each in ended["full"]), ended["full"]
    assert sorted(path.name for path in (folder / "full" / "snapshots").iterdir()) == ["last", "step-00000003.safetensors"]


@pytest.mark.parametrize("run", ["other-data", "no-data"])
def test_data_that_differs_is_refused_on_every_rank(told: Told, run: str) -> None:
    folder, ended = told
    facts = {
        "other-data": "WorkerError: rank 1 has data.train with SHA-256 ",
        "no-data": f"DataError: rank 1: data.train=text.txt: file not found in {folder / 'apart-1'}; use the path of an existing file",
    }
    assert ended[run][0]["error"] == ended[run][1]["error"]
    assert ended[run][0]["error"].startswith(facts[run])
    assert not (folder / run).exists()
