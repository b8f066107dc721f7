"""A real Ray on this machine: the run that two workers of it make, a worker killed, an actor killed, a signal, and what is refused."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import _ray_packages
import _tiny_run
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def with_ray(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which Ray can be imported."""
    found = _ray_packages.path(tmp_path_factory.mktemp("ray") / "packages")
    variables = _tiny_run.environment()
    return variables | {"PYTHONPATH": f"{variables['PYTHONPATH']}:{found}"}


@contextmanager
def started(variables: dict[str, str], folder: Path, *words: str, run: str) -> Iterator[subprocess.Popen[str]]:
    command = _tiny_run.command("--on", "ray", *words, run=run)
    process = subprocess.Popen(command, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_two_workers_one_killed_and_then_its_actor(with_ray: dict[str, str], folder: Path, reference: Path) -> None:
    run = folder / "ray-run"
    with started(with_ray, folder, "--devices", "2", *_tiny_run.TWO, run="ray-run") as process:
        _tiny_run.wait_until(lambda: _tiny_run.last_step(run) > 0 or process.poll() is not None, "there is a snapshot")
        os.kill(_tiny_run.workers("ray-run")[1], signal.SIGKILL)
        reached = _tiny_run.last_step(run)
        _tiny_run.wait_until(lambda: _tiny_run.last_step(run) > reached + 5 or process.poll() is not None, "the run has gone on")
        worker = _tiny_run.workers("ray-run")[0]
        actor = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(actor, signal.SIGKILL)
        out, err = process.communicate(timeout=_tiny_run.WAIT_SECONDS)
    assert process.returncode == 0, err
    said = [line for line in err.splitlines() if line.startswith("carrywave: ")]
    assert len(said) == 2, err
    assert said[0].startswith("carrywave: worker 1 of 2 was killed (signal 9, SIGKILL); restarting from step ")
    assert said[1].startswith("carrywave: worker 0 of 2 was lost with its Ray actor on ")
    assert "best valid loss" in out  # what rank 0 prints is seen here
    assert _tiny_run.files(run) == _tiny_run.files(reference / "two")
    assert _tiny_run.losses(run) == pytest.approx(_tiny_run.losses(reference / "one"), rel=1e-9)  # float64, another order of sums


def test_a_signal_stops_the_run_and_it_is_continued(with_ray: dict[str, str], folder: Path, reference: Path) -> None:
    run = folder / "stopped-run"
    with started(with_ray, folder, "--devices", "2", *_tiny_run.TWO, "--continue", run="stopped-run") as process:
        _tiny_run.wait_until(lambda: _tiny_run.last_step(run) > 0 or process.poll() is not None, "there is a snapshot")
        with _tiny_run.held("stopped-run", signal.SIGUSR1):
            process.send_signal(signal.SIGUSR1)
        _, err = process.communicate(timeout=_tiny_run.WAIT_SECONDS)
    assert process.returncode == 75, err
    assert 0 < _tiny_run.last_step(run) < _tiny_run.last_step(reference / "two")
    _tiny_run.train(folder, "--devices", "2", *_tiny_run.TWO, "--continue", run="stopped-run")  # elsewhere
    assert _tiny_run.files(run) == _tiny_run.files(reference / "two")


def test_a_cluster_without_room(with_ray: dict[str, str], folder: Path) -> None:
    variables = with_ray | {"CARRYWAVE_START_SECONDS": "5", "OMP_NUM_THREADS": "4000"}
    with started(variables, folder, "--devices", "2", *_tiny_run.TWO, run="run") as process:
        _, err = process.communicate(timeout=_tiny_run.WAIT_SECONDS)
    assert process.returncode == 2
    assert "carrywave: 2 workers need 8000 CPUs, and Ray had no room for them within 5 s (it has " in err
    assert not (folder / "run").exists()


def test_a_mistake_of_the_workers_is_said_once(with_ray: dict[str, str], folder: Path) -> None:
    with started(with_ray, folder, "--devices", "2", *_tiny_run.TWO, "batch.lanes=100000", run="run") as process:
        _, err = process.communicate(timeout=_tiny_run.WAIT_SECONDS)
    assert process.returncode == 2
    said = [line for line in err.splitlines() if line.startswith("carrywave: ")]
    assert len(said) == 1, err
    assert said[0].startswith("carrywave: batch.lanes=100000 is more than the ")
    assert not (folder / "run").exists()
