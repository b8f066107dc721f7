"""Another job comes to the port of a job that runs on two hosts: it is turned away in one line, and the first one never notices.

The hosts are processes on one machine, forked from one that has loaded torch; the workers of the first job only wait.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import _warm
import carrywave

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="forks with pidfds"), pytest.mark.timeout(300)]

COMMAND = """
import sys
from carrywave.__main__ import main
from carrywave.launch import launcher
from carrywave.cli import workers

workers.script_command = lambda: [sys.executable, "-S", "worker.py"]
sys.argv[0] = "carrywave"
main()
"""
WORKER = """
import json, os, time
from pathlib import Path

told = json.loads(Path(os.environ["CARRYWAVE_WORKER"]).read_text())
Path(f"{os.environ['RANK']}-{told['attempt']}.at").touch()
while not Path("finish").exists() and os.getppid() != 1:
    time.sleep(0.05)
"""
SPEC = ["model.hidden=8", "model.layers=1", "data.train=text.txt"]


class Scene:
    """A folder in which jobs are started on two hosts, at one port."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, text in (("command.py", COMMAND), ("worker.py", WORKER), ("text.txt", "the carry is passed along. " * 20)):
            (folder / name).write_text(text)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.processes: list[_warm.Warm] = []

    def start(self, node: int, *words: str, **variables: str) -> tuple[_warm.Warm, Path]:
        """`carrywave train` on one of the hosts, and the file with what it says."""
        said = self.folder / f"said-{len(self.processes)}"
        hosts = ["--hosts", f"127.0.0.1:{self.port},localhost", "--host-index", str(node)]
        command = [sys.executable, "command.py", "train", "--device", "cpu", *SPEC, *words, *hosts]
        source = str(Path(carrywave.__file__).parents[1])
        before = Path.cwd()
        os.chdir(self.folder)
        try:
            with said.open("wb") as err:
                env = os.environ | {"PYTHONPATH": source, "CARRYWAVE_START_SECONDS": "100"} | variables
                process = _warm.Warm(command, env=env, stdout=err, stderr=err)
        finally:
            os.chdir(before)
        self.processes.append(process)
        return process, said

    def await_(self, *names: str) -> None:
        deadline = time.monotonic() + 100
        while not all((self.folder / name).exists() for name in names):
            assert time.monotonic() < deadline, [path.read_text() for path in sorted(self.folder.glob("said-*"))]
            time.sleep(0.02)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """A job that runs on two hosts; at the end, both must have finished as if nothing had happened."""
    made = Scene(tmp_path_factory.mktemp("strangers"))
    first = [made.start(node, "--run", "one") for node in range(2)]
    try:
        made.await_("0-0.at", "1-0.at")
        yield made
        (made.folder / "finish").touch()
        assert [process.wait(100) for process, _ in first] == [0, 0]
        assert [said.read_text() for _, said in first] == ["", ""]
        assert sorted(path.name for path in made.folder.glob("*.at")) == ["0-0.at", "1-0.at"]  # no worker was started again
    finally:
        for process in made.processes:
            process.kill()


def turned_away(scene: Scene, node: int, *words: str, code: int = 2, **variables: str) -> str:
    process, said = scene.start(node, *words, **variables)
    assert process.wait(100) == code, said.read_text()
    [line] = said.read_text().splitlines()
    return line


CASES: dict[str, tuple[list[str], dict[str, str], str]] = {
    "other spec": (["train.lr=0.5", "--run", "one"], {}, "another job (run one) uses port {} on 127.0.0.1 (it has another spec)"),
    "other run": (["--run", "two"], {}, "another job (run one) uses port {} on 127.0.0.1 (it has another --run)"),
    "both": (["train.lr=0.5"], {}, "another job (run one) uses port {} on 127.0.0.1 (it has another --run and another spec)"),
    "other secret": (
        ["--run", "one"],
        {"CARRYWAVE_SECRET": "x"},
        "another job (run one) uses port {} on 127.0.0.1, with another CARRYWAVE_SECRET than is set here",
    ),
    "the same once more": (["--run", "./one"], {}, "host 1 (localhost:{}) already takes part in this job, from another process"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_a_second_host_of_another_job_is_turned_away(case: str, scene: Scene) -> None:
    words, variables, line = CASES[case]
    assert turned_away(scene, 1, *words, **variables).startswith(f"carrywave: {line.format(scene.port)}; ")


def test_a_first_host_of_another_job_is_told_whose_port_it_is(scene: Scene) -> None:
    line = f"carrywave: another job (run one) uses port {scene.port} on 127.0.0.1; use a free one (--hosts HOST:PORT, MASTER_PORT, "
    told = turned_away(scene, 0, "--run", "two", code=74)  # the same command may succeed later
    assert told.startswith(line)
    assert told.endswith("or start this one again when that one has ended")


def test_files_may_be_elsewhere_on_each_host(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    (tmp_path / "copy.txt").write_text((tmp_path / "text.txt").read_text())
    pair = [scene.start(node, "--run", "one", *words) for node, words in enumerate(([], ["data.train=copy.txt"]))]
    try:
        scene.await_("0-0.at", "1-0.at")
        (tmp_path / "finish").touch()
        assert [process.wait(100) for process, _ in pair] == [0, 0], [said.read_text() for _, said in pair]
    finally:
        for process, _ in pair:
            process.kill()
