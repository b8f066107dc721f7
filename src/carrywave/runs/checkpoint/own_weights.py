"""Whose a file of weights is: its metadata names the step, and the first row of metrics that the run wrote, by its SHA-256.

That row holds a loss with all its digits, so it tells runs apart, even those of the same shapes and the same number of steps; and as equal
runs write equal rows, their weights are equal files. It is written before any weights, and nothing that comes later changes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from carrywave.errors import RunError, option
from carrywave.runs.checkpoint import atomic_files

METRICS = "metrics.jsonl"
MARK = "first_row_sha256"


def bound_to(first_row: bytes) -> dict[str, str]:
    """The metadata of weights of the run whose metrics begin with this row."""
    return {MARK: hashlib.sha256(first_row.rstrip()).hexdigest()} if first_row.endswith(b"\n") else {}


def first_row(folder: Path, waiting: bytes = b"") -> bytes:
    """The first row of a run's metrics, or else of those that wait to be written there; empty if there is none yet."""
    row = b""
    if (folder / METRICS).is_file():
        with (folder / METRICS).open("rb") as file:
            row = file.readline()
    return row or waiting[: waiting.find(b"\n") + 1]


def are_of(weights: Path, step: int) -> bool:
    """True if a file of weights is sound, of this step and of the run beside it; or if it does not say, written by an older version."""
    try:
        described = atomic_files.read_metadata(weights)
    except RunError:
        return False
    return described.get("step", str(step)) == str(step) and _match(weights, described)


def check(weights: Path) -> None:
    """Refuse the weights of another run in a run's folder; where there are no metrics, nothing can be said."""
    if weights.is_file() and not _match(weights, atomic_files.read_metadata(weights)):
        raise RunError(
            f"{weights} is from another run, or the first row of {METRICS} was changed; restore the run's own two files, "
            f"have {option('resume')} restore the weights from their snapshot, or copy the file elsewhere to use it with {option('init')}"
        )


def _match(weights: Path, described: Mapping[str, str]) -> bool:
    found = bound_to(first_row(weights.parent))
    return MARK not in described or not found or found[MARK] == described[MARK]
