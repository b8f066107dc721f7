"""Errors that a user can act on: each says the fact and the remedy, and becomes one line and exit code 2. One is nobody's mistake."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class UserError(Exception):
    """A mistake in what the user supplied. The command line prints it as one line and exits with 2."""

    told_by: int | None = None  # where all workers raise it: the rank that says it


class SpecError(UserError):
    """The spec asks for something impossible or unknown."""


class DataError(UserError):
    """A data file, or an object given as data, is not what the spec says it is."""


class PlanError(UserError):
    """The plan cannot be carried out with these layers, lanes or workers."""


class RunError(UserError):
    """A run folder, snapshot or weights file cannot be used."""


class Diverged(RunError):
    """The loss or a gradient stopped being a number. Nothing of that step is kept."""


class WorkerError(UserError):
    """The workers cannot start, find each other or agree."""


class ContactLost(RuntimeError):
    """Another worker has gone, or does not answer: no mistake of this one, so that a launcher may start them again. The command line
    prints one line and exits with 1."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank  # whom contact was lost with, where that is known


class _Words:
    by_command = False  # of the whole process: also for a thread that writes in the background


@contextlib.contextmanager
def by_command() -> Iterator[None]:
    """Within it a command of the command line is carried out, and remedies are said in its words; elsewhere in those of Python."""
    before, _Words.by_command = _Words.by_command, True
    try:
        yield
    finally:
        _Words.by_command = before


def option(name: str, value: str | int | None = None) -> str:
    """An option as whoever asked would write it: `--run DIR` or `run=...`."""
    if _Words.by_command:
        return f"--{name}" if value is None else f"--{name} {value}"
    if name == "resume":
        return "resume=True"
    return f"{name}=..." if value is None else f"{name}={value!r}"
