"""Real processes: programs that tests write into temporary folders."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

Write = Callable[[str, str], str]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a program, and returns its path."""

    def put(name: str, text: str) -> str:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return str(path)

    return put


@pytest.fixture
def python(tmp_path: Path) -> Run:
    """Runs Python with these words in the temporary folder."""

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *words]
        return subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | variables, timeout=600, stdin=subprocess.DEVNULL
        )

    return run
