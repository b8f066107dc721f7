"""A real Ray on this machine: the run that two workers of it make, a worker killed, a signal, and what is refused."""

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


def test_a_run_with_a_killed_worker_is_that_of_two_workers_here(with_ray: dict[str, str], folder: Path, reference: Path) -> None:
    run = folder / "ray-run"
    with started(with_ray, folder, "--devices", "2", *_tiny_run.TWO, run="ray-run") as process:
        _tiny_run.wait_until(lambda: _tiny_run.last_step(run) > 0 or process.poll() is not None, "there is a snapshot")
        os.kill(_tiny_run.workers("ray-run")[1], signal.SIGKILL)
        _, err = process.communicate(timeout=_tiny_run.WAIT_SECONDS)
    assert process.returncode == 0, err
    assert _tiny_run.files(run) == _tiny_run.files(reference / "two")
    assert _tiny_run.losses(run) == pytest.approx(_tiny_run.losses(reference / "one"), rel=1e-9)  # float64, another order of sums


def test_what_a_signal_ended_is_resumed_elsewhere(with_ray: dict[str, str], folder: Path, reference: Path) -> None:
    run = folder / "stopped-run"
    with started(with_ray, folder, "--devices", "2", *_tiny_run.TWO, run="stopped-run") as process:
        _tiny_run.wait_until(lambda: _tiny_run.last_step(run) > 0 or process.poll() is not None, "there is a snapshot")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=_tiny_run.WAIT_SECONDS)
    assert process.returncode != 0, err
    _tiny_run.train(folder, "--devices", "2", *_tiny_run.TWO, "--resume", run="stopped-run")
    assert _tiny_run.files(run) == _tiny_run.files(reference / "two")


def test_a_mistake_of_the_workers_is_said_once(with_ray: dict[str, str], folder: Path) -> None:
    with started(with_ray, folder, "--devices", "2", *_tiny_run.TWO, "batch.lanes=100000", run="run") as process:
        _, err = process.communicate(timeout=_tiny_run.WAIT_SECONDS)
    assert process.returncode == 2
    said = [line for line in err.splitlines() if line.startswith("carrywave: ")]
    assert len(said) == 1, err
    assert said[0].startswith("carrywave: batch.lanes=100000 is more than the ")
    assert not (folder / "run").exists()
