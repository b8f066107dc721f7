"""Whose a file of weights is: its metadata names the step, and the metrics that the run had written by then, by length and SHA-256.

So the weights of another run are recognized, even of one with the same shapes and the same number of steps; and as equal runs write equal
metrics, their weights are equal files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from carrywave.errors import RunError, option
from carrywave.runs.checkpoint import atomic_files
from carrywave.runs.checkpoint.atomic_files import HashedLog

METRICS = "metrics.jsonl"
BYTES, SHA256 = "metrics_bytes", "metrics_sha256"


def bound_to(metrics: HashedLog) -> dict[str, str]:
    """The metadata of weights that are written when the run has written these metrics."""
    return {BYTES: str(metrics.num_bytes), SHA256: metrics.digest.hexdigest()}


def are_of(weights: Path, step: int) -> bool:
    """True if a file of weights is sound, of this step and of the run beside it; or if it does not say, written by an older version."""
    try:
        described = atomic_files.read_metadata(weights)
    except RunError:
        return False
    return described.get("step", str(step)) == str(step) and _match(weights, described)


def check(weights: Path) -> None:
    """Refuse the weights of another run in a run's folder; where the metrics are missing, nothing can be said."""
    if weights.is_file() and not _match(weights, atomic_files.read_metadata(weights)):
        raise RunError(
            f"{weights} was written beside another {METRICS}: it is from another run, or the metrics were changed; "
            f"restore the run's own two files, have {option('resume')} restore the weights from their snapshot, "
            f"or copy the file elsewhere to use it with {option('init')}"
        )


def _match(weights: Path, described: Mapping[str, str]) -> bool:
    metrics, length = weights.with_name(METRICS), described.get(BYTES, "")
    if SHA256 not in described or not length.isdecimal() or not metrics.is_file():
        return True
    found = HashedLog.of(metrics, int(length))
    return found.num_bytes == int(length) and found.digest.hexdigest() == described[SHA256]
