"""What workers printed, copied into the run that they trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from carrywave.launch.worker_logs import Outputs
from carrywave.runs.run import Run


@pytest.fixture
def outputs(tmp_path: Path) -> Outputs:
    printed = Outputs(tmp_path / "logs")
    with printed.of(0) as screen, printed.of(1) as file:
        assert screen is None
        assert file is not None
        file.write(b"a word\n")
    printed.add(1, "a traceback")
    return printed


def test_logs_are_copied_into_a_run(outputs: Outputs, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", "language")
    run.make()
    assert outputs.publish(run.path) == run.path / "logs" / "attempt-0"
    assert [path.read_text() for path in run.path.glob("logs/*/*")] == ["a word\na traceback\n"]
    run.release()


def test_a_folder_that_is_not_yet_a_run_stays_free(outputs: Outputs, tmp_path: Path) -> None:
    """A worker that was ended while it made the folder has left it empty; the next attempt, or the same command, takes it."""
    (tmp_path / "run").mkdir()
    assert outputs.publish(tmp_path / "run") is None
    Run.create(tmp_path / "run", "language")
