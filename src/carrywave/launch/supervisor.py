"""Supervises one attempt on this machine: starts the workers together, watches them until all have ended, and forwards signals.

A signal is forwarded once, and the workers finish their step and write a snapshot; a second one kills them immediately. When one worker
dies the others are of no use, and are terminated after a short grace period in which they can report what they know; after a user error,
which every worker may be about to report, the grace period is longer. Workers find out by themselves if one is stopped (`peer_watchdog`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from carrywave.launch import exit_reports
from carrywave.launch.exit_reports import FINAL, INTERRUPTED, STOPPED, Ended
from carrywave.launch.signals import REQUESTS, Forwarded
from carrywave.launch.worker_logs import Outputs
from carrywave.parallel.liveness.failure_file import CAUSES
from carrywave.parallel.startup.launcher_env import WorkerFile

POLL_SECONDS = 0.05
GRACE_SECONDS = 5.0  # after a user error: for the others to report it too, and then again between SIGTERM and SIGKILL
FAULT_SECONDS = 1.5  # after an internal error, which the others may hit too
DEATH_SECONDS = 0.2  # after a death without a report: nobody has anything to add

Process = subprocess.Popen  # as tests may have another


@dataclass(frozen=True)
class Attempt:
    """The result of one attempt."""

    ended: Ended
    run: Path | None  # the run's folder, if a worker reported it


def supervise(command: Sequence[str], file: WorkerFile, variables: Mapping[str, str], outputs: Outputs, signals: Forwarded) -> Attempt:
    """Start a worker for each of the file's devices and wait for them to end. The file's folder is there for this attempt."""
    assert file.folder is not None
    size, causes = len(file.devices), file.folder / CAUSES
    causes.mkdir()
    shared = {**os.environ, **variables, **file.write(file.folder / "worker.json")}
    workers: dict[int, subprocess.Popen[bytes]] = {}
    watch = _Watch(workers, signals, causes)
    try:
        for rank in range(size):
            own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            # In a process group of its own, so that Ctrl-C reaches this process alone, which forwards it once.
            environment = shared | {name: str(number) for name, number in own.items()}
            with outputs.of(rank) as log:
                workers[rank] = Process(command, env=environment, process_group=0, stdout=log, stderr=log)
        watch.until_all_have_ended()
    finally:
        _kill(workers)
    found = exit_reports.read(causes)
    for cause in found.values():
        outputs.add(cause.rank, cause.trace or cause.message)
    codes = {rank: worker.returncode for rank, worker in workers.items() if rank not in watch.killed}
    ended = exit_reports.ended(codes, found, size, signals.asked)
    if watch.at_once and signals.asked is not None:
        ended = Ended(128 + signals.asked, "stopped immediately; progress since the last snapshot is lost")
    return Attempt(ended, exit_reports.run_of(causes))


class _Watch:
    """Watches running workers until all have ended."""

    def __init__(self, workers: Mapping[int, subprocess.Popen[bytes]], signals: Forwarded, causes: Path) -> None:
        self.workers, self.signals, self.causes = workers, signals, causes
        self.killed: set[int] = set()  # ranks that were terminated from here
        self.at_once = False  # by a second signal
        self._deadline: float | None = None  # of those that are left, after one has failed
        self._harder = signal.SIGKILL

    def until_all_have_ended(self) -> None:
        while running := {rank: worker for rank, worker in self.workers.items() if worker.poll() is None}:
            self._heed_requests()
            for number in self.signals.take():
                if number is None:
                    self.at_once = True
                    self._end(running, signal.SIGKILL)
                    return
                for worker in running.values():
                    worker.send_signal(number)
            if self._deadline is None and (grace_seconds := self._since_a_failure()) is not None:
                self._deadline = time.monotonic() + grace_seconds
            elif self._deadline is not None and time.monotonic() > self._deadline:
                self._end(running, self._harder)
                self._harder, self._deadline = signal.SIGKILL, time.monotonic() + GRACE_SECONDS
            time.sleep(POLL_SECONDS)
        self._heed_requests()

    def _heed_requests(self) -> None:
        """Take a request to stop that ended one worker before its first step, and came from elsewhere, as one to all."""
        ends = (-worker.returncode for rank, worker in self.workers.items() if worker.returncode is not None and rank not in self.killed)
        number = next((number for number in ends if number in REQUESTS), None)
        if number is not None and self.signals.asked is None:
            self.signals.note(number)
            if all(worker.returncode is not None for worker in self.workers.values()):
                self.signals.asked = number

    def _end(self, running: Mapping[int, subprocess.Popen[bytes]], number: signal.Signals) -> None:
        for worker in running.values():
            worker.send_signal(number)
        self.killed |= set(running)

    def _since_a_failure(self) -> float | None:
        """Grace period of the remaining workers if one has failed, else None. An orderly stop is no failure: others are still saving."""
        for rank, worker in self.workers.items():
            code = worker.returncode
            spoke = (self.causes / f"{rank}.json").exists()
            if code in (None, 0) or (code in (STOPPED, INTERRUPTED) and not spoke):
                continue
            if code in FINAL:
                self._harder = signal.SIGTERM
                return GRACE_SECONDS
            return FAULT_SECONDS if spoke else DEATH_SECONDS
        return None


def _kill(workers: Mapping[int, subprocess.Popen[bytes]]) -> None:
    for worker in workers.values():
        if worker.poll() is None:
            worker.kill()
    for worker in workers.values():
        worker.wait()
