"""A worker that carries out run after run in one process, as its job file lists them, and tells how each went and how long it took.

`python _jobs.py JOBS.json`: each job has a `run` and its `spec`; and as needed `other`, the spec that all but rank 0 are given,
`resume`, `init`, `clock`: whether the wall clock jumps meanwhile, and `instead`: a file that is changed before.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from carrywave.errors import UserError
from carrywave.runs.watcher import Silent
from carrywave.spec.load import parse
from carrywave.train.fit import train

RANK = int(os.environ.get("RANK", "0"))
JUMPS_SECONDS = (0.0, 86_400.0, -3e8, 3600.0, 4e8, -7200.0)  # hours and years, forward and back


class Listening(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def jump(patch: pytest.MonkeyPatch) -> None:
    """A wall clock that says something else at every look, and on every worker."""
    real, by = time.time, itertools.cycle(JUMPS_SECONDS[RANK:] + JUMPS_SECONDS[:RANK])
    patch.setattr(time, "time", lambda: real() + next(by))
    patch.setattr(time, "time_ns", lambda: int(1e9 * time.time()))


def carry_out(job: dict[str, Any]) -> dict[str, Any]:
    watch = Listening()
    told: dict[str, Any] = {}
    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if job.get("clock"):
            jump(patch)
        if "instead" in job:  # this file holds something else from now on
            Path(job["instead"]).write_text("something else. " * 99)
        try:
            spec = parse(job.get("other", job["spec"]) if RANK else job["spec"])
            result = train(spec, run=Path(job["run"]), resume=job.get("resume", False), init=job.get("init"), device="cpu", watch=watch)
            told["ending"] = result.ending
        except UserError as error:
            told["error"] = str(error)  # which the command line says in one line, with exit code 2
    return told | {"seconds": time.monotonic() - began, "said": watch.lines}


def main() -> None:
    path = Path(sys.argv[1])
    told = [carry_out(job) for job in json.loads(path.read_text())]
    path.with_suffix(f".{RANK}.out").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
