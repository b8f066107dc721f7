"""Faults: real processes. All of these tests carry the mark `faults`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.faults)
            if sys.platform != "linux":
                item.add_marker(pytest.mark.skip(reason="finds its processes in /proc"))
