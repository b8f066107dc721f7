"""What training tells whoever watches it: a terminal, a log file, a program, or nobody. Training decides nothing by it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class StepInfo:
    """Where a run stands after one step."""

    epoch: int
    epochs: int
    step: int
    steps: int  # in this epoch, or in this evaluation
    loss: float | None  # nats a target; None where it is not known before the end, as in an evaluation
    tokens_per_second: float  # of the phase in hand
    waste: float  # share of padding in training, 0 … 1
    lr: float
    eta_seconds: float | None  # of the whole run; None while it cannot be told
    phase: str = "train"  # or valid, test
    unit: str = "tokens"  # what is counted a second; steps, where they are numbers


def printable(text: str) -> str:
    """A text for a terminal: what a name, a label or a model puts out must not move the cursor, or pass for something else."""
    return "".join(each if each.isprintable() or each in "\n\t" else each.encode("unicode_escape").decode("ascii") for each in text)


class Watcher(Protocol):
    """Is told what happens, in this order: begin, then steps, evaluations and lines, then end."""

    def begin(self, summary: str) -> None:
        """Take the model summary, before the first step."""

    def step(self, info: StepInfo) -> None:
        """Take one step; called after every one, so it must be cheap."""

    def evaluated(self, row: Mapping[str, object]) -> None:
        """Take the row of one evaluation: split, epoch, step, loss and the task's metrics."""

    def say(self, line: str) -> None:
        """Take something a person should know, on one line."""

    def end(self, line: str) -> None:
        """Take the last line: where the run is and what was reached."""


class Silent:
    """Nobody watches."""

    def begin(self, summary: str) -> None:
        """Nothing."""

    def step(self, info: StepInfo) -> None:
        """Nothing."""

    def evaluated(self, row: Mapping[str, object]) -> None:
        """Nothing."""

    def say(self, line: str) -> None:
        """Nothing."""

    def end(self, line: str) -> None:
        """Nothing."""


class Logged(Silent):
    """Nobody watches; what a person should know goes to the logger `carrywave`, which unless told otherwise writes it to stderr."""

    def say(self, line: str) -> None:
        """A warning of the logger."""
        logging.getLogger("carrywave").warning(printable(line))
