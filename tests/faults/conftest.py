"""Faults: real processes, in an environment without any launcher's variables. All of these tests carry the mark `faults`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import carrywave

HERE = Path(__file__).parent
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TF_CONFIG", "CARRYWAVE_WORKER")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.faults)
            if sys.platform != "linux":
                item.add_marker(pytest.mark.skip(reason="finds its processes in /proc"))


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    paths = [str(Path(carrywave.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
