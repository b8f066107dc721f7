"""Starts one worker for each device of this host, passes signals on to them, and ends when they have ended: one exit code, one cause.

Workers of one host meet in a file and talk over loopback: nothing listens where another machine could reach it. With several hosts they
meet at the address that the user gave. A signal is passed on once, and the workers finish their step and write a snapshot; a second one
ends them there and then. When one fails, the others lose contact and end by themselves within seconds; what does not is ended here.

Not torch's elastic agent: it ends all workers as soon as one exits with anything but 0, so that an orderly stop (75, 130) would cut off
the others' snapshot; its rendezvous unpickles and listens on all interfaces.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from carrywave.errors import WorkerError
from carrywave.train import causes
from carrywave.train.causes import INTERRUPTED, STOPPED, Ended
from carrywave.train.tf_config import Hosts

POLL_SECONDS = 0.05
GRACE_SECONDS = 5.0  # for workers to notice that one of them has failed, then again to end when told to


def is_worker() -> bool:
    """Whether `start` started this process."""
    return causes.folder() is not None


def start(command: Sequence[str], devices: int, *, hosts: Hosts | None = None, environment: Mapping[str, str] | None = None) -> Ended:
    """Run `command` in so many workers on this host, and wait for their end. They learn from the environment who they are."""
    meeting = None if hosts is None else _Meeting(hosts, devices)
    with tempfile.TemporaryDirectory(prefix="carrywave-") as name, _Signals() as signals:
        folder = Path(name)
        (folder / "causes").mkdir()
        shared = {**(environment or {}), causes.FOLDER: str(folder / "causes"), "CARRYWAVE_PARENT": str(os.getpid())}
        if "OMP_NUM_THREADS" not in os.environ:
            shared["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // devices))
        if meeting is None:
            first, size = 0, devices
            shared["CARRYWAVE_STORE"] = str(folder / "store")
            loopback = "lo0" if sys.platform == "darwin" else "lo"
            shared |= {name: loopback for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name not in os.environ}
        else:
            first, size = meeting.first_rank, meeting.size
            shared |= meeting.environment
        workers: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for local_rank in range(devices):
                own = {"RANK": first + local_rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": devices}
                settings = os.environ | shared | {key: str(value) for key, value in own.items()}
                # A process group of its own: Ctrl-C reaches this process alone, which passes it on once.
                workers[first + local_rank] = subprocess.Popen(command, env=settings, process_group=0)
            killed = _wait(workers, signals, folder / "causes")
        finally:
            _kill(workers)
        codes = {rank: worker.returncode for rank, worker in workers.items()}
        return causes.ended(codes, causes.read(folder / "causes"), size=size, asked=signals.asked, killed=killed)


class _Signals:
    """Within its context, signals that ask for an end are noted, to be passed on."""

    def __init__(self) -> None:
        self.noted: list[int] = []
        self.asked: int | None = None  # the first
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.noted.append(number)


def _wait(workers: Mapping[int, subprocess.Popen[bytes]], signals: _Signals, told: Path) -> set[int]:
    """Returns when all have ended: the ranks of those that had to be ended from here."""
    killed: set[int] = set()
    deadline = None
    harder = signal.SIGTERM
    while running := {rank: worker for rank, worker in workers.items() if worker.poll() is None}:
        while signals.noted:
            number = signals.noted.pop(0)
            if signals.asked is not None:
                _kill(running)
                return killed | set(running)
            signals.asked = number
            for worker in running.values():
                worker.send_signal(number)
        now = time.monotonic()
        if deadline is None and _one_failed(workers, told):
            deadline = now + GRACE_SECONDS
        elif deadline is not None and now > deadline:
            for worker in running.values():
                worker.send_signal(harder)
            killed |= set(running)
            harder, deadline = signal.SIGKILL, now + GRACE_SECONDS
        time.sleep(POLL_SECONDS)
    return killed


def _one_failed(workers: Mapping[int, subprocess.Popen[bytes]], told: Path) -> bool:
    """Stopping in good order is no failure: the others are still writing what is to be kept."""
    return any(
        worker.returncode not in (None, 0) and (worker.returncode not in (STOPPED, INTERRUPTED) or (told / f"{rank}.json").exists())
        for rank, worker in workers.items()
    )


def _kill(workers: Mapping[int, subprocess.Popen[bytes]]) -> None:
    for worker in workers.values():
        if worker.poll() is None:
            worker.kill()
    for worker in workers.values():
        worker.wait()


class _Meeting:
    """Hosts tell each other how many workers they start, in a store at the address of the first; their workers meet in the same store."""

    def __init__(self, hosts: Hosts, devices: int) -> None:
        from carrywave.parallel.meeting import open_store, start_seconds

        seconds = start_seconds()
        host, port = hosts.meeting
        count = len(hosts.addresses)
        self.store = open_store(host, port, hosts.node == 0, seconds)
        self.store.set(f"host/{hosts.node}", str(devices))
        deadline = time.monotonic() + seconds
        while missing := [node for node in range(count) if not self.store.check([f"host/{node}"])]:
            if time.monotonic() > deadline:
                named = ", ".join(f"{hosts.names[node]} ({hosts.addresses[node]})" for node in missing)
                raise WorkerError(
                    f"{named} did not show up within {seconds:g} s; start it there too (CARRYWAVE_START_SECONDS waits longer)"
                )
            time.sleep(POLL_SECONDS)
        each = [int(self.store.get(f"host/{node}")) for node in range(count)]
        self.first_rank, self.size = sum(each[: hosts.node]), sum(each)
        self.environment = {
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there, rank 0 need not open it
        }
        interface = _interface_of(hosts.own_host)
        if interface and "GLOO_SOCKET_IFNAME" not in os.environ:
            self.environment["GLOO_SOCKET_IFNAME"] = interface


def _interface_of(host: str) -> str | None:
    """The network interface with the address by which the others know this host: a host's own name often leads to loopback only."""
    try:
        import fcntl

        address = socket.inet_aton(socket.gethostbyname(host))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                request = name.encode()[:15].ljust(40, b"\0")
                try:
                    answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR of Linux
                except OSError:
                    continue
                if answer[20:24] == address:
                    return name
    except (OSError, ImportError):
        pass
    return None
