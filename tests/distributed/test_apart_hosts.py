"""Two hosts that have the same path and not the same folder: each in a mount namespace of its own, with its own disk in that place."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import _disturbed_run as disturbed_run
import carrywave

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


class Pair:
    """Two hosts with one worker each; `place` is another folder on each of them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.place = folder, folder / "place"
        for path in (self.place, *self.disks):
            path.mkdir()
        for disk in self.disks:
            disturbed_run.write_data(disk)

    @property
    def disks(self) -> list[Path]:
        return [self.folder / f"disk-{host}" for host in range(2)]

    def start(self, *words: str) -> list[subprocess.Popen[str]]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        return [self._start(host, port, words) for host in range(2)]

    def _start(self, host: int, port: str, words: tuple[str, ...]) -> subprocess.Popen[str]:
        mount = f'mount --bind {self.disks[host]} {self.place} && cd {self.place} && exec "$@"'
        variables = {"RANK": str(host), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(Path(carrywave.__file__).parents[1])}
        command = [sys.executable, "-m", "carrywave", "train", *words, "--device", "cpu", "--run", str(self.place / "run")]
        return subprocess.Popen(
            ["unshare", "-m", "sh", "-c", mount, "sh", *command],
            env=os.environ | variables | own | {"CARRYWAVE_CACHE": str(self.place / "cache")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("mount namespaces cannot be made here")
    return Pair(tmp_path)


def ended(processes: list[subprocess.Popen[str]]) -> list[str]:
    try:
        return [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


def step_of(run: Path) -> int:
    last = run / "snapshots" / "last"
    return int(last.read_text().strip().rpartition("-")[2]) if last.exists() else 0


def test_a_run_that_one_host_keeps_goes_on_wherever_it_was_killed(pair: Pair) -> None:
    """With `--resume` the other host has nothing but the command: the spec and the snapshot come from rank 0."""
    spec = [*disturbed_run.SPEC, "train.max_steps=60", "train.epochs=1000000", "plan.replicas=2"]
    run = pair.disks[0] / "run"
    draw = random.Random(5)
    for number in range(4):
        processes = pair.start(*(["--resume"] if number else spec))
        if number < 3:
            aim = step_of(run) + draw.randrange(1, 12)
            while step_of(run) < aim and all(process.poll() is None for process in processes):
                time.sleep(0.001)
            processes[draw.randrange(2)].send_signal(signal.SIGKILL)
        said = ended(processes)
        if number < 3:
            assert -signal.SIGKILL in [process.returncode for process in processes], said
            assert not (pair.disks[1] / "run").exists()
    assert [process.returncode for process in processes] == [0, 0], said
    assert "does not share it, so the parts of 1 of 2 workers go there over the network" in said[0]
    assert sorted(path.name for path in pair.disks[1].iterdir()) == ["cache", "rows.jsonl"]
    again = Pair(_fresh(pair.folder / "calm"))
    processes = again.start(*spec)
    said = ended(processes)
    assert [process.returncode for process in processes] == [0, 0], said
    ours, theirs = disturbed_run.contents(run), disturbed_run.contents(again.disks[0] / "run")
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


def _fresh(folder: Path) -> Path:
    folder.mkdir()
    return folder
