"""What the launcher's variables say of this process, without torch: whether it is one worker of several, and whether it is the first."""

from __future__ import annotations

import os


def launched() -> bool:
    """Whether a launcher started this process as one worker of several: it says so by RANK or WORLD_SIZE."""
    return "RANK" in os.environ or "WORLD_SIZE" in os.environ


def is_first() -> bool:
    """Whether this process is the one that prints and writes: alone, or rank 0."""
    return os.environ.get("RANK", "0") == "0"
