"""A worker of test_snapshots.py: trains while snapshots fail here or there, as its job file lists it, one run after the other."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from carrywave.errors import UserError
from carrywave.runs.watcher import Silent
from carrywave.spec.load import parse
from carrywave.train.fit import train

RANK = int(os.environ["RANK"])


class Listening(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.summary = ""

    def begin(self, summary: str) -> None:
        self.summary = summary

    def say(self, line: str) -> None:
        self.lines.append(line)


def harm(patch: pytest.MonkeyPatch, where: str) -> None:
    """A disk that is full where paths match."""
    real = os.fsync

    def fsync(handle: int) -> None:
        if re.search(where, os.readlink(f"/proc/self/fd/{handle}")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    patch.setattr(os, "fsync", fsync)


def carry_out(job: dict[str, Any]) -> dict[str, Any]:
    watch = Listening()
    told: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        if "full" in job:
            harm(patch, job["full"])
        if job.get("apart") and RANK:
            Path(f"apart-{RANK}").mkdir(exist_ok=True)
            patch.chdir(f"apart-{RANK}")
        values = job["spec"]
        if "own_data" in job:
            values = values | {"data": values["data"] | {"train": "text.txt"}}
            if RANK and job["own_data"] is not None:
                Path("text.txt").write_text(job["own_data"])
        try:
            told["ending"] = train(parse(values), run=Path(job["run"]), resume=job.get("resume", False), device="cpu", watch=watch).ending
        except UserError as error:
            told["error"] = f"{type(error).__name__}: {error}"
        if RANK and "own_data" in job:
            Path("text.txt").unlink(missing_ok=True)
    return told | {"summary": watch.summary, "said": [line for line in watch.lines if "could not" in line]}


def main() -> None:
    folder, name = Path(sys.argv[1]), sys.argv[2]
    os.chdir(folder)
    told = [carry_out(job) for job in json.loads((folder / name).read_text())]
    (folder / f"{name}.{RANK}.out").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
