"""Errors that a user can act on: each says the fact and the remedy, and becomes one line and exit code 2. One is nobody's mistake."""

from __future__ import annotations


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


class _Asked:
    by_command = False  # whether this process carries out a command, or a program that imports the library


def by_command() -> None:
    """From here on, remedies are said in the words of the command line."""
    _Asked.by_command = True


def words(python: str, command: str) -> str:
    """A remedy in the words of whoever asked: what to write in a program, or on the command line."""
    return command if _Asked.by_command else python
