"""Specs of small runs, and jobs that so many workers carry out in processes that are started once."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import carrywave
from _warm import start

WORKER = Path(__file__).with_name("_jobs.py")
SOURCE = str(Path(carrywave.__file__).parents[1])
TEXT = "the carry is passed along, and work moves through layers and time as a wave. " * 12
Job = dict[str, Any]


def spec(folder: Path, *, plan: Job | None = None, model: Job | None = None, **train: Any) -> Job:
    """A language model with carry and dropout, three epochs long unless told otherwise."""
    if not (folder / "text.txt").exists():
        (folder / "text.txt").write_text(TEXT)
    return {
        "task": "language",
        "data": {"train": str(folder / "text.txt"), "tokens": "char"},
        "model": {"hidden": 8, "layers": 2, "dropout": 0.3} | (model or {}),
        "batch": {"lanes": 8, "steps": 6},
        "train": {"optimizer": "adam", "lr": 1e-3, "epochs": 100, "max_steps": 12, "snapshot_every": 5, "log_every": 3, "keep": 9} | train,
        "plan": plan or {},
    }


def carry_out(folder: Path, jobs: list[Job], workers: int, name: str = "jobs") -> list[list[Job]]:
    """What each worker told of each job, by rank."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps(jobs))
    ended = start([sys.executable, str(WORKER), str(path)], workers, environment={"PYTHONPATH": SOURCE})
    assert ended.code == 0, ended
    return [json.loads((folder / f"{name}.{rank}.out").read_text()) for rank in range(workers)]
