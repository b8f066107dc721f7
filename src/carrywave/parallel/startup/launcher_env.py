"""Reads from the launcher's variables, without torch, whether this process is one of several workers, and whether it is the first."""

from __future__ import annotations

import os


def launched() -> bool:
    """True if a launcher started this process as one of several workers, as RANK or WORLD_SIZE shows."""
    return "RANK" in os.environ or "WORLD_SIZE" in os.environ


def is_first() -> bool:
    """True if this process is the one that prints and writes: a single process, or rank 0."""
    return os.environ.get("RANK", "0") == "0"
