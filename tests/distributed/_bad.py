"""A worker of test_bad.py: trains on the plans that its job file lists, with numbers that are made bad on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from _poison import poisoned
from _train import main

from carrywave.errors import UserError
from carrywave.runs.watcher import Silent
from carrywave.spec.load import parse
from carrywave.train.fit import train


class Listening(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def carry_out(folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    """How the run ended, what was said on the way, and with which batches its steps began."""
    watch, told = Listening(), {}
    with poisoned(**job["poison"]) as begun:
        try:
            told["ending"] = train(parse(job["spec"]), run=folder / job["run"], device="cpu", watch=watch).ending
        except UserError as error:
            told = {"error": f"{type(error).__name__}: {error}", "reported_by": error.reported_by}
    return told | {"lines": [line for line in watch.lines if "no longer finite" in line], "begun": begun}


if __name__ == "__main__":
    main(carry_out)
