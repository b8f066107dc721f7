"""A process that is killed while it writes a run's initial files leaves a folder in which the same command works; one that is asked to stop
leaves none.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import carrywave as cw

TEXT = "the carry goes on and on\n" * 4
PROGRAM = """
import os, signal
from pathlib import Path
import carrywave as cw
from carrywave.runs.run import Run
Run.{method} = lambda *_: os.kill(os.getpid(), {number})
cw.fit({{"hidden": 4}}, {text!r}, task="language", batch={{"lanes": 2, "steps": 8}}, train={{"max_steps": 1}}, run=Path({run!r}))
"""


@pytest.mark.parametrize("method", ["expect_snapshot", pytest.param("write_spec", marks=pytest.mark.slow)])
def test_the_same_call_trains_after_a_kill_among_the_initial_files(tmp_path: Path, method: str) -> None:
    run = tmp_path / "run"
    program = PROGRAM.format(method=method, text=TEXT, run=str(run), number=int(signal.SIGKILL))
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
    assert (run / "facts.json").is_file()
    assert not (run / "spec.yaml").exists()
    result = cw.fit({"hidden": 4}, TEXT, task="language", batch={"lanes": 2, "steps": 8}, train={"max_steps": 1}, run=run, progress=False)
    assert result.ending == "done"
    assert (run / "weights.safetensors").is_file()


@pytest.mark.slow
def test_a_stop_among_the_initial_files_leaves_no_folder(tmp_path: Path) -> None:
    program = PROGRAM.format(method="write_history", text=TEXT, run=str(tmp_path / "runs" / "run"), number=int(signal.SIGTERM))
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGTERM
    assert list(tmp_path.iterdir()) == []
