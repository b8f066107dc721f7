"""A Ray for the tests: the one that is installed, or one that is installed into a folder of its own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest


def path(folder: Path) -> str:
    """What to put on PYTHONPATH so that Ray can be imported; empty if it can be anyway."""
    if importlib.util.find_spec("ray") is not None:
        return ""
    constraints = Path(__file__).parents[2] / "constraints.txt"
    command = [sys.executable, "-m", "pip", "install", "-q", "-c", str(constraints), "--target", str(folder), "ray"]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"Ray cannot be installed here: {made.stderr.strip()[-200:]}")
    return str(folder)
