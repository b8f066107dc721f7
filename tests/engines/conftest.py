"""What the runs on engines are compared with: the same spec on one worker, and on two of this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import _tiny_run


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the spec, its data, and the runs `one` and `two`."""
    folder = tmp_path_factory.mktemp("reference")
    _tiny_run.write(folder)
    _tiny_run.train(folder, run="one")
    _tiny_run.train(folder, "--devices", "2", *_tiny_run.TWO, run="two")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the spec and its data."""
    _tiny_run.write(tmp_path)
    return tmp_path
