"""Workers of a benchmark: their rows come back by rank, and the cause of a failure is told in one line."""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from carrywave.benchmarks.harness import workers
from carrywave.errors import RunError, UserError
from carrywave.measure import profiles
from carrywave.parallel import worker_pool
from carrywave.parallel.startup.launcher_env import WorkerFile

# Stands in for `python -m carrywave.parallel.worker_pool MODULE FOLDER`: tells what it was given, or fails as it is told to.
STAND_IN = """#!{python}
import json, os, pathlib, sys, time
folder, rank = pathlib.Path(sys.argv[-1]), os.environ["RANK"]
job = json.loads((folder / "job.json").read_text())
if rank in job["failures"]:
    print("first line")
    sys.exit(job["failures"][rank])
time.sleep(job["seconds"])
row = {{"rank": rank, "bench": sys.argv[-2], "threads": os.environ["OMP_NUM_THREADS"], "of": os.environ["WORLD_SIZE"]}}
(folder / (rank + ".jsonl")).write_text(json.dumps(row) + "\\n")
"""


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = tmp_path / "program"
    program.write_text(STAND_IN.format(python=os.path.realpath("/proc/self/exe")))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    return program


def test_rows_come_back_by_rank_and_nothing_is_left(tmp_path: Path, stand_in: Path) -> None:
    rows = workers.start("carrywave.benchmarks.some", {"failures": {}, "seconds": 0}, 3)
    assert rows == [[{"rank": str(rank), "bench": "carrywave.benchmarks.some", "threads": "1", "of": "3"}] for rank in range(3)]
    assert list(tmp_path.iterdir()) == [stand_in]


def test_a_failure_ends_all_workers_and_is_told_by_its_last_line(tmp_path: Path, stand_in: Path) -> None:
    with pytest.raises(RunError, match="worker 1 of bench some exited with code 1: it is tired"):
        workers.start("carrywave.benchmarks.some", {"failures": {"1": "it is tired"}, "seconds": 60}, 2)
    assert list(tmp_path.iterdir()) == [stand_in]


def test_of_several_failures_the_cause_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "POLL_SECONDS", 2.0)  # both are seen at once
    failures = {"0": "RuntimeError: Connection closed by peer [127.0.0.1]", "1": "ValueError: the cause"}
    with pytest.raises(RunError, match=r"worker 1 .* the cause"):
        workers.start("carrywave.benchmarks.some", {"failures": failures, "seconds": 0}, 2)


def test_worker_counts_follow_the_cores() -> None:
    assert [workers.crew_sizes(cores) for cores in (2, 4, 8, 16, 64)] == [[2], [2], [2, 4], [2, 4, 8], [2, 4, 8]]
    with pytest.raises(UserError, match="two or more"):
        workers.crew_sizes(1)


def test_the_peak_starts_anew_and_sees_what_is_held() -> None:
    held = np.ones(60_000_000, dtype=np.uint8)
    del held
    workers.reset_peak()
    before = workers.memory_mib("VmHWM")
    held = np.frombuffer(mmap.mmap(-1, 40 * 2**20), dtype=np.uint8)  # not from the allocator, which may have it already
    held[:] = 1
    del held
    assert workers.memory_mib("VmHWM") - before == pytest.approx(40, abs=4)  # whatever else moves meanwhile


def test_what_a_user_set_reaches_the_workers_and_what_a_launcher_set_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile says over which transport it was measured: the one that was asked for."""
    of_launch = WorkerFile(launch="a", attempt=3).write(tmp_path / "launch.json")
    for name, value in {"CARRYWAVE_TRANSPORT": "gloo", "MASTER_ADDR": "elsewhere", **of_launch}.items():
        monkeypatch.setenv(name, value)
    environment = worker_pool.environment_of(tmp_path, 0, 2, 1)
    assert environment["CARRYWAVE_TRANSPORT"] == profiles.versions()["transport"] == "gloo"
    assert environment["CARRYWAVE_WORKER"] == str(tmp_path / "worker.json")
    assert "MASTER_ADDR" not in environment
