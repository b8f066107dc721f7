"""Snapshots that two workers write side by side: who writes what, and that both learn where one of them cannot."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from _warm import start
from _whole_snapshots import load

WORKER = Path(__file__).with_name("_snapshots.py")
FULL = "could not be written: No space left on device"


def spec(folder: Path, plan: dict[str, Any]) -> dict[str, Any]:
    """A run of one epoch of some steps, with a snapshot after every third."""
    return {
        "task": "language",
        "data": {"train": str(folder / "text.txt"), "tokens": "char", "cache": str(folder / "cache")},
        "model": {"hidden": 6, "layers": 3, "dropout": 0.3},
        "batch": {"lanes": 5, "steps": 7},
        "train": {"optimizer": "adam", "epochs": 1, "max_steps": 10, "snapshot_every": 3, "keep": 9, "schedule": "constant"},
        "plan": plan,
    }


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[dict[str, Any]]]]:
    """The folder of all runs, and what both workers told of each."""
    folder = tmp_path_factory.mktemp("snapshots")
    (folder / "text.txt").write_text("the carry is passed along, and work moves as a wave. " * 12)
    replicas, stages = {"replicas": 2}, {"stages": 2, "chunk_steps": 2}
    jobs: list[dict[str, Any]] = [
        {"run": "replicas", "plan": replicas},
        {"run": "stages", "plan": stages},
        {"run": "full-1", "plan": replicas, "rank": 1, "full": "tmp-step-00000006"},
        {"run": "full-0", "plan": stages, "rank": 0, "full": "tmp-step-00000006"},
        {"run": "mute", "plan": stages, "rank": 1, "full": "tmp-step-00000006", "mute": True},
        {"run": "read-only", "plan": replicas, "rank": 1, "full": "tmp-step-00000006", "read_only": True},
        {"run": "last", "plan": replicas, "rank": 1, "full": "tmp-step-00000010"},
        {"run": "pointer", "plan": replicas, "rank": 0, "full": r"\.last\.tmp"},
        {"run": "apart", "plan": replicas, "apart": True},
        {"run": "other-data", "plan": replicas, "apart": True, "own_data": "not the same text. " * 40},
        {"run": "no-data", "plan": replicas, "apart": True, "own_data": None},
    ]
    (folder / "jobs").write_text(json.dumps([job | {"spec": spec(folder, job["plan"])} for job in jobs]))
    ended = start([sys.executable, str(WORKER), str(folder), "jobs"], 2)
    assert ended.code == 0, ended
    found = [json.loads((folder / f"jobs.{rank}.out").read_text()) for rank in range(2)]
    return folder, {job["run"]: [each[number] for each in found] for number, job in enumerate(jobs)}


Told = tuple[Path, dict[str, list[dict[str, Any]]]]


def snapshots(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "snapshots").iterdir())


def test_each_worker_writes_its_part(told: Told) -> None:
    folder, ended = told
    for run, carries in (("replicas", ["l0.h-0-2", "l0.h-2-5"]), ("stages", ["l0.h-0-5", "l2.h-0-5"])):
        assert [each["ending"] for each in ended[run]] == ["done"] * 2, ended[run]
        assert [each["said"] for each in ended[run]] == [[], []]
        found = snapshots(folder / run)
        assert found == ["best", "last", "step-00000003", "step-00000006", "step-00000009", "step-00000010"]
        names = [path.name for path in (folder / run / "snapshots" / "step-00000006").iterdir()]
        assert sorted(name for name in names if name.startswith("carry")) == [f"carry-lstm.{carry}.safetensors" for carry in carries]
        for group, count in (("parameters", 2), ("optimizer", 2), ("extra", 1), ("report", 0)):
            assert sum(name.startswith(group) for name in names) == count, (group, names)
        whole = load(folder / run / "snapshots")
        assert {tensor.shape[1] for tensor in whole.carry.values()} == {5}
        assert len(whole.carry) == 6


@pytest.mark.parametrize("run", ["full-1", "full-0", "mute", "read-only"])
def test_a_part_that_cannot_be_written_ends_the_run_for_all(told: Told, run: str) -> None:
    folder, ended = told
    rank, reason = (0 if run == "full-0" else 1), ("Read-only file system" if run == "read-only" else "No space left on device")
    fact = f"rank {rank}: snapshot {run}/snapshots/step-00000006 could not be written: {reason}"
    assert all(each["error"].startswith(f"ResourceError: {fact}; the previous snapshot is kept; ") for each in ended[run]), ended[run]
    assert snapshots(folder / run) == ["last", "step-00000003"]


def test_the_last_one_is_an_error_for_all(told: Told) -> None:
    folder, ended = told
    line = f"ResourceError: rank 1: snapshot last/snapshots/step-00000010 {FULL}; the previous snapshot is kept; free disk space"
    assert all(each["error"].startswith(line) for each in ended["last"]), ended["last"]
    assert snapshots(folder / "last") == ["last", "step-00000003", "step-00000006", "step-00000009"]
    assert (folder / "last" / "snapshots" / "last").read_text() == "step-00000009\n"


def test_a_pointer_that_cannot_be_written_leaves_nothing(told: Told) -> None:
    folder, ended = told
    assert all(f"step-00000003 {FULL}" in each["error"] for each in ended["pointer"]), ended["pointer"]
    assert not (folder / "pointer").exists()


def test_a_worker_that_does_not_see_the_folder_is_refused(told: Told) -> None:
    folder, ended = told
    fact = f"RunError: rank 1: {os.uname().nodename} does not see apart/snapshots of rank 0; set run=... to a folder that all hosts share"
    assert [each["error"] for each in ended["apart"]] == [fact] * 2
    assert not (folder / "apart").exists()


@pytest.mark.parametrize("run", ["other-data", "no-data"])
def test_data_that_differs_is_refused_on_every_rank(told: Told, run: str) -> None:
    folder, ended = told
    host = os.uname().nodename
    facts = {
        "other-data": f"data.train=text.txt is not the same file everywhere: rank 1 on {host} has SHA-256 ",
        "no-data": f"rank 1 on {host}: data.train=text.txt: file not found in {folder / 'apart-1'}; use the path of an existing file",
    }
    assert ended[run][0]["error"] == ended[run][1]["error"]
    assert ended[run][0]["error"].startswith(f"DataError: {facts[run]}")
    assert not (folder / run).exists()
