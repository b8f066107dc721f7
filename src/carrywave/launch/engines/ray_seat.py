"""A `Seat` is the place of one worker in a Ray cluster: an actor that starts the worker as a process of its own, and watches it.

The worker is a process, not the actor itself, so that it is the same program as everywhere else: signals reach it, its exit code counts,
and it may die without harm to Ray. The seat is watched by Ray, the worker by the seat. Without Ray this is an ordinary class. Torch-free.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from carrywave.launch.exit_reports import MISTAKE, Ended
from carrywave.launch.supervisor import Signals, WorkerGroup, supervise
from carrywave.launch.work_folder import work_folder
from carrywave.launch.worker_logs import ERR, OUT
from carrywave.parallel.startup.addresses import interface_of
from carrywave.parallel.startup.launcher_env import WorkerFile

LOG_BYTES = 1 << 20  # of each log that is sent to the process that started the run: its end


@dataclass(frozen=True)
class SeatPlace:
    """Where a seat is. Made of plain values, because it travels."""

    node: str  # Ray's name of the node
    host: str
    address: str  # by which other nodes reach it
    interface: str | None
    port: int  # one that is free there
    gpus: tuple[str, ...]  # those that Ray gave to this seat


@dataclass(frozen=True)
class Outcome:
    """How the worker of a seat ended."""

    ended: Ended
    steps: int = 0
    run: str | None = None
    logs: Mapping[str, bytes] = field(default_factory=dict)  # by file name


class Seat:
    """Starts one worker, and passes signals to it and its output on. Methods are called from several threads."""

    def __init__(self) -> None:
        self._signals = Signals()  # noted here instead of by handlers: an actor receives no signals
        self._shown: dict[int, IO[bytes]] = {}

    def place(self) -> SeatPlace:
        """Where this seat is."""
        import ray

        address = ray.util.get_node_ip_address()
        with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as free:
            port = free.getsockname()[1]
        node = ray.get_runtime_context().get_node_id()
        gpus = tuple(str(gpu) for gpu in ray.get_gpu_ids())
        return SeatPlace(node, socket.gethostname(), address, interface_of(address), port, gpus)

    def work(self, command: Sequence[str], folder: str, file: Mapping[str, Any], variables: Mapping[str, str], size: int) -> Outcome:
        """Run the command, given without its interpreter, as the worker that the file and the variables describe, until it ends."""
        rank = int(variables["RANK"])
        try:
            os.chdir(folder)
        except OSError as error:
            why = f"{socket.gethostname()} has no folder {folder} ({error.strerror}); start the run in a folder that all nodes of Ray have"
            return Outcome(Ended(MISTAKE, why, "WorkerError", rank=rank))
        with work_folder() as place:
            self._show(place)
            crew = WorkerGroup([sys.executable, *command], WorkerFile(**file), {}, {rank: variables}, size)
            outcome = supervise(crew, place / "attempt", self._signals)
            outcome.outputs.close()
            logs = {path.name: path.read_bytes()[-LOG_BYTES:] for path in outcome.outputs.folder.iterdir()}
        return Outcome(outcome.ended, outcome.steps, None if outcome.run is None else str(outcome.run), logs)

    def news(self) -> dict[int, bytes]:
        """What the worker has printed since the last call and is to be seen, by descriptor."""
        return {descriptor: file.read() for descriptor, file in self._shown.items()}

    def stop(self, *numbers: int) -> None:
        """Pass signals to the worker; the second one kills it."""
        self._signals.noted.extend(numbers)

    def _show(self, folder: Path) -> None:
        """Let what the supervision prints reach `news` instead of Ray's logs."""
        shown: dict[int, IO[bytes]] = {}
        for descriptor in (OUT, ERR):
            path = folder / f"shown-{descriptor}"
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(handle, descriptor)
            os.close(handle)
            shown[descriptor] = path.open("rb")
        self._shown = shown  # at once: `news` may be looking through it in another thread
