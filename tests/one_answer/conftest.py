"""Tests that know nothing of the insides: public names, the command line, and real processes where several workers are meant."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from _workers import LAUNCHERS, Workers

import carrywave


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    # Programs in other folders find the package that is under test, installed or not.
    paths = [str(Path(carrywave.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    with Workers() as started:
        yield started
