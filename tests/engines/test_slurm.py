"""A real Slurm: srun with one task a worker and one a node, a batch script that is queued again, and a worker that is killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import _slurm_cluster
import _tiny_run
import pytest
from _slurm_cluster import Slurm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    folder = tmp_path_factory.mktemp("slurm")
    with _slurm_cluster.running(folder) as found:
        yield found


def srun(slurm: Slurm, folder: Path, *options: str, words: tuple[str, ...] = (), run: str = "run") -> subprocess.CompletedProcess[str]:
    command = ["srun", *options, *_tiny_run.command(*words, run=run)]
    return slurm.run(*command, cwd=folder, seconds=_tiny_run.WAIT_SECONDS, **_tiny_run.environment())


def test_one_task_a_worker_on_one_node(slurm: Slurm, folder: Path, reference: Path) -> None:
    ended = srun(slurm, folder, "-N1", "-n2", words=tuple(_tiny_run.TWO))
    assert ended.returncode == 0, ended.stderr
    assert _tiny_run.files(folder / "run") == _tiny_run.files(reference / "two")


def test_one_task_a_worker_on_two_nodes(slurm: Slurm, folder: Path, reference: Path) -> None:
    """Dealt out in turns, so that neighbouring tasks are on different nodes; two stages by two replicas."""
    ended = srun(slurm, folder, "-N2", "-n4", "--distribution=cyclic", words=("plan.stages=2",))
    assert ended.returncode == 0, ended.stderr
    assert _tiny_run.losses(folder / "run") == pytest.approx(
        _tiny_run.losses(reference / "one"), rel=1e-9
    )  # float64, another order of sums


def test_one_task_a_node(slurm: Slurm, folder: Path, reference: Path) -> None:
    ended = srun(slurm, folder, "-N2", "-n2", words=("--devices", "1", *_tiny_run.TWO))
    assert ended.returncode == 0, ended.stderr
    assert _tiny_run.files(folder / "run") == _tiny_run.files(reference / "two")
    assert _tiny_run.losses(folder / "run") == pytest.approx(
        _tiny_run.losses(reference / "one"), rel=1e-9
    )  # float64, another order of sums


def test_a_mistake_is_said_once(slurm: Slurm, folder: Path) -> None:
    ended = srun(slurm, folder, "-N2", "-n2", "--ntasks-per-node=1", words=("--devices", "1", "model.hiden=3"))
    assert ended.returncode == 2
    said = [line for line in ended.stderr.splitlines() if line.startswith("carrywave: ")]
    assert set(said) == {"carrywave: unknown key model.hiden; did you mean model.hidden?"}
    ended = srun(slurm, folder, "-N1", "-n2", words=("model.hiden=3",))
    assert [line for line in ended.stderr.splitlines() if line.startswith("carrywave: ")] == said[:1]
    assert not (folder / "run").exists()


def test_a_signal_to_all_tasks_writes_a_snapshot(slurm: Slurm, folder: Path, reference: Path) -> None:
    """As of sbatch --signal=USR1@60, without B: it goes to the tasks, not to the script."""
    command = ["srun", "-N1", "-n2", *_tiny_run.command(*_tiny_run.TWO, run="signalled-run")]
    step = subprocess.Popen(command, cwd=folder, env=slurm.environment | _tiny_run.environment(), stderr=subprocess.PIPE, text=True)
    try:
        _tiny_run.wait_until(lambda: _tiny_run.last_step(folder / "signalled-run") > 0 or step.poll() is not None, "there is a snapshot")
        with _tiny_run.held("signalled-run", signal.SIGUSR1, by="SLURM_PROCID"):
            job = slurm.run("squeue", "-h", "-o", "%A").stdout.split()[0]
            slurm.run("scancel", "--signal=USR1", f"{job}.0")
        assert step.wait(timeout=_tiny_run.WAIT_SECONDS) == 75
    finally:
        step.kill()
        step.wait()
        assert step.stderr is not None
        step.stderr.close()
    assert 0 < _tiny_run.last_step(folder / "signalled-run") < _tiny_run.last_step(reference / "two")
    ended = srun(slurm, folder, "-N1", "-n2", words=(*_tiny_run.TWO, "--resume"), run="signalled-run")
    assert ended.returncode == 0, ended.stderr
    assert _tiny_run.files(folder / "signalled-run") == _tiny_run.files(reference / "two")


def submit(slurm: Slurm, folder: Path, run: str) -> str:
    """Have `carrywave launch` write the batch script, and submit it; returns the job."""
    (folder / "carrywave").write_text(f'#!/bin/sh\nexec {sys.executable} -m carrywave "$@"\n')
    (folder / "carrywave").chmod(0o755)
    where = ["--nodes", "2", "--devices", "1", "--device", "cpu", "--cpus", "1", "--time", "1h", "--run", run]
    words = [sys.executable, "-m", "carrywave", "launch", "--to", "slurm", "small.yaml", *_tiny_run.TWO, *where, "-o", "job.sh"]
    made = subprocess.run(words, cwd=folder, env=_tiny_run.environment(), capture_output=True, text=True)
    assert made.stderr == "carrywave: wrote job.sh; start it with: sbatch job.sh\n"
    variables = slurm.environment | _tiny_run.environment()
    submitted = slurm.run("sbatch", "--parsable", "job.sh", cwd=folder, **(variables | {"PATH": f"{folder}:{slurm.environment['PATH']}"}))
    assert submitted.returncode == 0, submitted.stderr
    return submitted.stdout.strip()


def log(folder: Path, job: str) -> str:
    return (folder / f"small-{job}.log").read_text()


def finished(slurm: Slurm, job: str) -> bool:
    return slurm.state(job) in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def test_a_job_that_is_queued_again_goes_on(slurm: Slurm, folder: Path, reference: Path) -> None:
    job = submit(slurm, folder, "queued-run")
    _tiny_run.wait_until(lambda: _tiny_run.last_step(folder / "queued-run") > 0, "there is a snapshot")
    # What Slurm does before the time limit, because of --signal=B:USR1@120.
    with _tiny_run.held("queued-run", signal.SIGUSR1):
        slurm.run("scancel", "--batch", "--signal=USR1", job)
    _tiny_run.wait_until(lambda: "Restarts=1" in slurm.run("scontrol", "show", "job", job).stdout, "the job is queued again")
    assert 0 < _tiny_run.last_step(folder / "queued-run") < _tiny_run.last_step(reference / "two")

    # A job that was queued again waits for two minutes, in which its last traces go; this is the way past that.
    _tiny_run.wait_until(lambda: not slurm.has_steps(job), "its old script has ended")
    time.sleep(3)  # slurmd takes a job that comes back within the same second for one that it was told to kill

    def started() -> bool:
        slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")
        return slurm.state(job) not in ("PENDING", "COMPLETING")

    _tiny_run.wait_until(started, "the job runs again")
    _tiny_run.wait_until(lambda: finished(slurm, job), "the job has ended")
    assert slurm.state(job) == "COMPLETED", log(folder, job)
    assert _tiny_run.files(folder / "queued-run") == _tiny_run.files(reference / "two")


def test_a_job_with_a_killed_worker_goes_on(slurm: Slurm, folder: Path, reference: Path) -> None:
    job = submit(slurm, folder, "killed-run")
    _tiny_run.wait_until(lambda: _tiny_run.last_step(folder / "killed-run") > 0, "there is a snapshot")
    os.kill(_tiny_run.workers("killed-run")[1], signal.SIGKILL)
    _tiny_run.wait_until(lambda: finished(slurm, job), "the job has ended")
    said = log(folder, job)
    assert slurm.state(job) == "COMPLETED", said
    assert re.search(r"worker 1 of 2 was killed \(signal 9, SIGKILL\)", said)
    assert _tiny_run.files(folder / "killed-run") == _tiny_run.files(reference / "two")
