"""Trains on several hosts with torch's elastic agent, used as a library: one on each host, as torchrun starts them.

The agents meet at the first host, start their workers, and start all of them again if one dies on any host or a host comes back. The agent
runs in a thread, so that this process can pass signals on to the workers, which stop in order on all hosts together.
"""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from carrywave.launch import exit_reports, launch_record
from carrywave.launch.exit_reports import FAULT, MISTAKE, Ended
from carrywave.launch.hosts import Hosts
from carrywave.launch.launcher import asked_to_stop, worker_variables
from carrywave.launch.signals import Forwarded
from carrywave.parallel.liveness.failure_file import CAUSES
from carrywave.parallel.startup.addresses import address_towards
from carrywave.parallel.startup.launcher_env import WorkerFile
from carrywave.parallel.startup.rendezvous import open_store, start_seconds

POLL_SECONDS = 0.1
ALIVE_SECONDS = 2  # between signs of life of the agents; without three of them a host is gone
END_SECONDS = 30.0  # for the agents of other hosts to end too


def start_on_hosts(
    command: Sequence[str],
    devices: int,
    hosts: Hosts,
    restarts: int,
    say: Callable[[str], None],
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Run `command` in `devices` workers of this host, together with those of the others, until all have ended.

    If one dies, all are started again, `restarts` times in all; for a host that is gone the others wait for `CARRYWAVE_START_SECONDS`.
    """
    logging.getLogger("torch.distributed.elastic").addHandler(logging.NullHandler())
    logging.getLogger("torch.distributed.elastic").propagate = False  # our lines say what matters
    with tempfile.TemporaryDirectory(prefix="carrywave-launch-") as place, Forwarded() as signals:
        before = dict(os.environ)  # the agent gives workers the variables of this process
        # Otherwise workers that are started again find in the store what the dead ones have left there (pytorch issue 135712).
        os.environ |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **worker_variables(devices), **(environment or {})}
        try:
            return _Agent(command, devices, hosts, restarts, Path(place), say).end(signals)
        finally:
            for name in os.environ.keys() - before.keys():
                del os.environ[name]


class _Agent(LocalElasticAgent):
    """The agent of this host."""

    def __init__(self, command: Sequence[str], devices: int, hosts: Hosts, restarts: int, folder: Path, say: Callable[[str], None]) -> None:
        self.hosts, self.folder, self.say = hosts, folder, say
        (folder / CAUSES).mkdir()
        address, port = hosts.meeting
        self.seconds = start_seconds()
        self.meeting = open_store(address, port, hosts.index == 0, self.seconds)
        self.meeting.set(self._key(f"host {hosts.index}"), "")
        # All hosts take the name of whoever came first, also one that is started anew.
        launch = self.meeting.compare_set(self._key("launch"), "", uuid.uuid4().hex).decode()
        self.file = WorkerFile(launch=launch, folder=folder, parent=os.getpid(), agent=True, threads_dealt=bool(worker_variables(devices)))
        # This host is reached by others as it reaches them, whatever its own name leads to.
        own = address_towards(address) or address
        handler = DynamicRendezvousHandler.from_backend(
            hosts.job,
            self.meeting,
            C10dRendezvousBackend(self.meeting, hosts.job),
            hosts.number,
            hosts.number,
            own,
            RendezvousTimeout(join=timedelta(seconds=self.seconds)),
            ALIVE_SECONDS,
        )
        spec = WorkerSpec(
            role="carrywave",
            local_world_size=devices,
            rdzv_handler=handler,
            entrypoint=command[0],
            args=tuple(command[1:]),
            max_restarts=restarts,
            monitor_interval=POLL_SECONDS,
            local_addr=own,
        )
        super().__init__(spec, DefaultLogsSpecs(log_dir=str(folder / "torch")), exit_barrier_timeout=END_SECONDS)
        self.started = 0  # times
        self.pids: list[int] = []
        self.run_folder: Path | None = None
        self._codes: dict[int, int] = {}  # of workers that failed, by rank
        self._error: BaseException | None = None

    def end(self, signals: Forwarded) -> Ended:
        """Run until the end, and pass signals on."""
        thread = threading.Thread(target=self._run, name="carrywave-agent", daemon=True)
        thread.start()
        idle_since = time.monotonic()  # no worker has run since then
        while thread.is_alive():
            now = time.monotonic()
            idle_since = now if any(map(_runs, self.pids)) else idle_since
            if now - idle_since > self.seconds + END_SECONDS:  # the store keeps the thread, because the first host is out of reach
                return self._broken_off(RendezvousError())
            for number in signals.take():
                self._remaining_restarts = 0  # who is asked to stop is not started again
                for pid in self.pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL if number is None else number)
                if number is None or not self.pids:
                    return asked_to_stop(Ended(128 + (signals.asked or 0)), self.run_folder)
            thread.join(POLL_SECONDS)
        if self._error is not None:
            return self._broken_off(self._error)
        return asked_to_stop(self._ended(signals.asked), self.run_folder)

    def _run(self) -> None:
        try:
            self.run()
        except BaseException as error:
            self._error = error
        with suppress(Exception):  # the first host is gone
            self._rdzv_handler.shutdown()

    def _ended(self, asked: int | None = None) -> Ended:
        """How the workers of this host ended."""
        codes = self._codes | exit_reports.codes_told(self.folder)
        size = max([1, *(worker.world_size for worker in self.get_worker_group().workers)])
        ended = exit_reports.ended(codes, exit_reports.read(self.folder / CAUSES), size, asked)
        self.run_folder = exit_reports.run_of(self.folder / CAUSES) or self.run_folder
        return ended

    def _broken_off(self, error: BaseException) -> Ended:
        if isinstance(error, RendezvousTimeoutError):
            missing = [index for index in range(self.hosts.number) if not self.meeting.check([self._key(f"host {index}")])]
            who = f"host {missing[0]} of {self.hosts.number}" if missing else f"one of the {self.hosts.number} hosts"
            remedy = "start this command there too (to wait longer, set CARRYWAVE_START_SECONDS)"
            said = f"{who} was not at {self.hosts.first} within {self.seconds:g} s; {remedy}"
            return Ended(MISTAKE if missing else FAULT, said, "WorkerError")
        if isinstance(error, RendezvousError):
            who = f"the first host ({self.hosts.first})"
            return Ended(FAULT, f"contact with {who} was lost; start every host again with --resume", died=True)
        raise error

    def _key(self, name: str) -> str:
        return f"carrywave/{self.hosts.job}/{name}"

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        for path in (*self.folder.glob("*.code"), *(self.folder / CAUSES).iterdir()):
            path.unlink()
        file = self.file.model_copy(update={"attempt": self.started})
        os.environ |= file.write(self.folder / f"worker-{self.started}.json")
        self.started += 1
        self._codes = {}
        found: dict[int, Any] = super()._start_workers(worker_group)
        self.pids = list(found.values())
        return found

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        self._codes |= {rank: failure.exitcode for rank, failure in result.failures.items()}
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        ended = self._ended()
        step = launch_record.last_step(self.run_folder)
        where = "" if step is None else f" from step {step}"
        self.say(f"{ended.message.partition(';')[0] or 'another host starts its workers again'}; restarting{where}")
        self.pids = []
        super()._restart_workers(worker_group)


def _runs(pid: int) -> bool:
    """True if a worker has not ended; the agent learns that from it later."""
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    return False
