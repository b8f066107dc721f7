"""The interface by which training reports to a terminal, a log file, a program, or nobody. It never influences training."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class StepInfo:
    """The position of a run after one step."""

    epoch: int
    epochs: int
    step: int
    steps: int  # in this epoch, or in this evaluation
    loss: float | None  # nats per target; None if it is not known before the end, as in an evaluation
    tokens_per_second: float  # of the current phase
    waste: float  # fraction of padding in training, 0 … 1
    lr: float
    eta_seconds: float | None  # of the whole run; None while it is not known
    phase: str = "train"  # or valid, test
    unit: str = "tokens"  # what is counted per second: tokens, or steps of numeric data


def printable(text: str) -> str:
    """Escape text for a terminal: a name, a label or a model's output must not move the cursor, or pass for something else."""
    return "".join(each if each.isprintable() or each in "\n\t" else each.encode("unicode_escape").decode("ascii") for each in text)


def size_text(num_bytes: int) -> str:
    """Bytes with a unit, to three digits."""
    for size, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {name}" if num_bytes < 1000 * size else f"{num_bytes / size:.0f} {name}"
    return f"{num_bytes} bytes"


class Watcher(Protocol):
    """Receives events in this order: begin, then steps, evaluations and lines, then end."""

    def begin(self, summary: str) -> None:
        """Receive the model summary, before the first step."""

    def step(self, info: StepInfo) -> None:
        """Receive the position after a step or a batch of an evaluation; called several times per second, so it must be cheap."""

    def evaluated(self, row: Mapping[str, object]) -> None:
        """Receive the row of one evaluation: split, epoch, step, loss and the task's metrics."""

    def say(self, line: str) -> None:
        """Receive something a person should know, on one line."""

    def end(self, line: str) -> None:
        """Receive the last line: where the run is and what it reached."""


class Silent:
    """A watcher that ignores everything."""

    def begin(self, summary: str) -> None:
        """Do nothing."""

    def step(self, info: StepInfo) -> None:
        """Do nothing."""

    def evaluated(self, row: Mapping[str, object]) -> None:
        """Do nothing."""

    def say(self, line: str) -> None:
        """Do nothing."""

    def end(self, line: str) -> None:
        """Do nothing."""


class Logged(Silent):
    """A watcher that passes what a person should know to the logger `carrywave`, which by default writes it to stderr."""

    def say(self, line: str) -> None:
        """Log the line as a warning."""
        logging.getLogger("carrywave").warning(printable(line))
