"""Launchers of two hosts, here two processes on one, whose workers only wait: who dies, and that all start the next attempt together."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import carrywave

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WORKER = """
import json, os, sys, time
from pathlib import Path

parent = os.getppid()
told = json.loads(Path(os.environ["CARRYWAVE_WORKER"]).read_text())
name = f"{told['launch']}-{told['attempt']}-{os.environ['RANK']}"
Path(f"{name}.part").write_text(str(os.getpid()))
Path(f"{name}.part").rename(f"{name}.at")
while not Path("finish").exists():
    time.sleep(0.05)
    if os.getppid() != parent:
        sys.exit(75)  # as workers do whose launcher is gone
"""
LAUNCHER = """
import sys
from carrywave.launch.engines.hosts import Hosts
from carrywave.launch.launcher import start

node, port = int(sys.argv[1]), int(sys.argv[2])
hosts = Hosts((f"127.0.0.1:{port}", "127.0.0.1:1"), ("host 0", "host 1"), node, "--hosts")
ended = start([sys.executable, "-S", "worker.py"], 1, hosts=hosts, restarts=3)
print(ended.message, file=sys.stderr)
sys.exit(ended.code)
"""


class Scene:
    """The launchers of two hosts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "worker.py").write_text(WORKER)
        (folder / "launcher.py").write_text(LAUNCHER)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.launchers = [self.start(node) for node in range(2)]

    def start(self, node: int) -> subprocess.Popen[bytes]:
        source = str(Path(carrywave.__file__).parents[1])
        environment = os.environ | {"PYTHONPATH": source, "CARRYWAVE_START_SECONDS": "300"}
        command = [sys.executable, "launcher.py", str(node), str(self.port)]
        with (self.folder / f"{node}.err").open("ab") as err:
            return subprocess.Popen(command, cwd=self.folder, env=environment, stderr=err)

    def err(self, node: int) -> str:
        return (self.folder / f"{node}.err").read_text()

    def await_attempt(self, number: int) -> dict[int, tuple[str, int]]:
        """The launch and the process id of each worker of an attempt."""
        found: dict[int, tuple[str, int]] = {}

        def complete() -> bool:
            for path in self.folder.glob(f"*-{number}-*.at"):
                launch, _, rank = path.stem.split("-")
                found[int(rank)] = launch, int(path.read_text())
            return len(found) == 2

        self._await(complete)
        return found

    def finish(self) -> list[int]:
        (self.folder / "finish").touch()
        return [launcher.wait(300) for launcher in self.launchers]

    def _await(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 300
        while not holds():
            assert time.monotonic() < deadline, [self.err(node) for node in range(2)]
            time.sleep(0.05)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    (tmp_path / "finish").touch()
    for launcher in made.launchers:
        launcher.kill()
        launcher.wait()


@pytest.mark.parametrize("node", [0, 1])
def test_a_worker_dies(node: int, scene: Scene) -> None:
    before = scene.await_attempt(0)
    os.kill(before[node][1], signal.SIGKILL)
    after = scene.await_attempt(1)
    assert {launch for launch, _ in (*before.values(), *after.values())} == {before[0][0]}
    assert scene.finish() == [0, 0]
    said = f"carrywave: worker {node} of 2 was killed (signal 9, SIGKILL); restarting from the beginning (restart 1 of 3)\n\n"
    assert [scene.err(each) for each in range(2)] == [said, said]


@pytest.mark.parametrize("node", [0, 1])
def test_a_launcher_dies_and_is_started_again(node: int, scene: Scene) -> None:
    """Of the first host, too: the other one tells it which launch it was."""
    before = scene.await_attempt(0)
    scene.launchers[node].kill()
    scene.launchers[node].wait()
    scene.launchers[node] = scene.start(node)
    after = scene.await_attempt(1)
    assert {launch for launch, _ in (*before.values(), *after.values())} == {before[0][0]}
    assert before[1 - node][1] != after[1 - node][1]  # the workers of the host that was not harmed were restarted, too
    assert scene.finish() == [0, 0]
    expected = f"contact with host 0 (127.0.0.1:{scene.port}) was lost; trying" if node == 0 else "host 1 (127.0.0.1:1) "
    assert f"carrywave: {expected}" in scene.err(1 - node)
