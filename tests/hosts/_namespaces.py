"""Two hosts on one machine: network namespaces joined by a wire, each with a host name and a hosts file of its own. They share the disk.

`wired()` makes them, or skips the test with the reason; a `Cluster` runs commands on them, pulls their cable and plugs it in again.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import carrywave

ADDRESSES = ("10.77.0.1", "10.77.0.2")
NAMES = ("node0", "node1")
MOST_SECONDS = 600  # on a busy machine; the runs themselves take a few seconds


@contextmanager
def wired(*lonely: str) -> Iterator[tuple[str, str]]:
    """The names of two network namespaces, with a wire between them. `lonely`: addresses of each that nobody else can reach."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("needs root, ip and unshare, for network namespaces")
    names = (f"cw{os.getpid()}a", f"cw{os.getpid()}b")
    commands = [f"ip netns add {name}" for name in names]
    commands.append(f"ip link add {wire(names[0])} netns {names[0]} type veth peer name {wire(names[1])} netns {names[1]}")
    for name, address in zip(names, ADDRESSES, strict=True):
        link = f"ip -n {name} link set"
        commands += [f"ip -n {name} addr add {address}/24 dev {wire(name)}", f"{link} {wire(name)} up", f"{link} lo up"]
        commands += [f"ip -n {name} addr add {each}/32 dev lo" for each in lonely]
    try:
        for command in commands:
            made = subprocess.run(command.split(), capture_output=True, text=True)
            if made.returncode:
                pytest.skip(f"network namespaces cannot be made here: {command}: {made.stderr.strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def wire(namespace: str) -> str:
    """The network interface of a host."""
    return f"{namespace[-8:]}w"


class OnHost:
    """A command that runs on one of the hosts. What it prints goes to files."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, name: str) -> None:
        self.process, self._folder, self._name = process, folder, name

    @property
    def out(self) -> str:
        return (self._folder / f"{self._name}.out").read_text()

    @property
    def err(self) -> str:
        return (self._folder / f"{self._name}.err").read_text()

    def wait(self, seconds: float = MOST_SECONDS) -> int:
        """The exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self._name} is still running after {seconds} s:\n{self.out}{self.err}") from None

    def workers(self) -> dict[int, int]:
        """Process ids of the live workers that this command has started, by rank."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if int(_stat(path)[1]) != self.process.pid or _stat(path)[0] == "Z":
                    continue
                words = dict(word.partition("=")[::2] for word in (path / "environ").read_text().split("\0"))
                found[int(words["RANK"])] = int(path.name)
            except (OSError, KeyError, ValueError, IndexError):
                continue
        return found

    def await_workers(self, count: int = 1) -> dict[int, int]:
        """The workers, once there are so many."""
        found: dict[int, int] = {}

        def complete() -> bool:
            found.clear()
            found.update(self.workers())
            return len(found) == count

        await_(complete, f"{self._name} has {count} workers", self)
        return found

    def kill(self) -> None:
        """End the command and all that it has started, at once."""
        for pid in [*self.workers().values(), self.process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


class Cluster:
    """Runs commands on the hosts. With `at_home`, a host's own name leads to loopback, as on many machines."""

    def __init__(self, namespaces: tuple[str, str], folder: Path, *, at_home: bool = False) -> None:
        self.namespaces, self.folder = namespaces, folder
        self.started: list[OnHost] = []
        for node in range(2):
            own = "127.0.1.1" if at_home else ADDRESSES[node]
            lines = ["127.0.0.1 localhost", f"{own} {NAMES[node]}", f"{ADDRESSES[1 - node]} {NAMES[1 - node]}"]
            (folder / f"hosts-{node}").write_text("\n".join(lines) + "\n")

    def start(self, node: int, words: list[str], **variables: str) -> OnHost:
        """Start Python with these words on a host."""
        script = f'mount --bind {self.folder}/hosts-{node} /etc/hosts && hostname {NAMES[node]} && exec "$@"'
        command = ["ip", "netns", "exec", self.namespaces[node], "unshare", "-mu", "sh", "-c", script, "sh", sys.executable, *words]
        name = f"{NAMES[node]}-{len(self.started)}"
        source = str(Path(carrywave.__file__).parents[1])
        clean = {key: text for key, text in os.environ.items() if not key.startswith(("TF_CONFIG", "PET_", "SKYPILOT_", "SLURM_"))}
        environment = clean | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"} | variables
        with (self.folder / f"{name}.out").open("wb") as out, (self.folder / f"{name}.err").open("wb") as err:
            process = subprocess.Popen(command, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        self.started.append(OnHost(process, self.folder, name))
        return self.started[-1]

    def both(self, words: Callable[[int], list[str]], variables: Callable[[int], dict[str, str]]) -> tuple[OnHost, OnHost]:
        """Start a command on each host."""
        return self.start(0, words(0), **variables(0)), self.start(1, words(1), **variables(1))

    def unplug(self) -> None:
        """Pull the cable: connections stay open, and nothing passes."""
        subprocess.run(["ip", "-n", self.namespaces[0], "link", "set", wire(self.namespaces[0]), "down"], check=True)

    def plug(self) -> None:
        """Plug the cable in again."""
        subprocess.run(["ip", "-n", self.namespaces[0], "link", "set", wire(self.namespaces[0]), "up"], check=True)

    def close(self) -> None:
        """End what is still running."""
        self.plug()
        for command in self.started:
            command.kill()


def await_(holds: Callable[[], bool], what: str, *commands: OnHost, seconds: float = MOST_SECONDS) -> None:
    """Wait until something holds; fail at once if a command ends before."""
    deadline = time.monotonic() + seconds
    while not holds():
        said = "".join(f"\n{command.out}{command.err}" for command in commands)
        assert time.monotonic() < deadline, f"waited {seconds} s until {what}{said}"
        assert all(command.process.poll() is None for command in commands), f"ended before {what}{said}"
        time.sleep(0.05)


def _stat(path: Path) -> list[str]:
    return (path / "stat").read_text(errors="replace").rpartition(")")[2].split()
