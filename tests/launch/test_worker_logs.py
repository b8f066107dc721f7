"""What workers printed, copied into the run that they trained."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from carrywave.launch.worker_logs import Outputs
from carrywave.runs.run import Run


@pytest.fixture
def outputs(tmp_path: Path) -> Outputs:
    printed = Outputs(tmp_path / "logs", direct=False)
    os.write(printed.of(0)[1].fileno(), b"a word\n")
    printed.close()
    return printed


def test_logs_are_copied_into_a_run(outputs: Outputs, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", "language")
    run.make()
    assert outputs.publish(run.path) == run.path / "logs" / "attempt-0"
    assert [path.read_bytes() for path in run.path.glob("logs/*/rank-0*")] == [b"a word\n"]
    run.release()


def test_a_folder_that_is_not_yet_a_run_stays_free(outputs: Outputs, tmp_path: Path) -> None:
    """A worker that was ended while it made the folder has left it empty; the next attempt, or the same command, takes it."""
    (tmp_path / "run").mkdir()
    assert outputs.publish(tmp_path / "run") is None
    Run.create(tmp_path / "run", "language")
