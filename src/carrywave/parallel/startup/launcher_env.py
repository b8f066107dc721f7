"""Reads from the launcher's variables, without torch, whether this process is one of several workers, and whether it is the first."""

from __future__ import annotations

import os
from collections.abc import Mapping

LAUNCH = "CARRYWAVE_LAUNCH"  # the name of the launch, set in workers that carrywave itself started
JOB = "CARRYWAVE_JOB"  # the id of an engine's job, set in processes that the engine started as workers


def launched(environment: Mapping[str, str] | None = None) -> bool:
    """True if a launcher started this process as one of several workers, as RANK or WORLD_SIZE shows."""
    given = os.environ if environment is None else environment
    return "RANK" in given or "WORLD_SIZE" in given


def is_first() -> bool:
    """True if this process is the one that prints and writes: a single process, or rank 0."""
    return os.environ.get("RANK", "0") == "0"
