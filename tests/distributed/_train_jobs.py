"""OpaqueModel runs on several real workers: `_train.py` carries out a list of jobs on each of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from _warm import start

WORKER = Path(__file__).with_name("_train.py")


def carry_out(folder: Path, workers: int, jobs: list[dict[str, Any]], name: str) -> list[list[dict[str, Any]]]:
    """What each worker told of each job, by rank."""
    (folder / name).write_text(json.dumps(jobs))
    ended = start([sys.executable, str(WORKER), str(folder), name], workers)
    assert ended.code == 0, ended
    return [json.loads((folder / f"{name}.{rank}.out").read_text()) for rank in range(workers)]


def rows_of(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The rows of a run's metrics."""
    return [json.loads(line) for line in (run / name).read_text().splitlines()]
