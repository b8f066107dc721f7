"""Supervises one attempt: starts workers together, watches them until all have ended, forwards signals, and keeps their output.

A signal is forwarded once, and the workers finish their step and write a snapshot; a second one kills them immediately. When one worker
dies the others are of no use, and are terminated after a short grace period in which they can report what they know; after a user error,
which every worker may be about to report, the grace period is longer. A worker whose heartbeat stops is killed like one that died. At the
end, the logs of the workers go to the run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from carrywave.launch import exit_reports, launch_record
from carrywave.launch.exit_reports import INTERRUPTED, MISTAKE, RESOURCE, STOPPED, Ended, WorkerEnds
from carrywave.launch.hardware import cores
from carrywave.launch.signals import ECHO_SECONDS, REQUESTS, SignalContext, let_go_of_terminal
from carrywave.launch.work_folder import held
from carrywave.launch.worker_logs import Outputs
from carrywave.parallel.liveness import heartbeat
from carrywave.parallel.liveness.failure_file import CAUSES
from carrywave.parallel.startup.launcher_env import WorkerFile

POLL_SECONDS = 0.05
GRACE_SECONDS = 5.0  # after a user error: for the others to report it too, and then again between SIGTERM and SIGKILL
FAULT_SECONDS = 1.5  # after an internal error, which the others may hit too
DEATH_SECONDS = 0.2  # after a death without a report: nobody has anything to add


class Signals(SignalContext):
    """Context in which signals that ask for an end are recorded, to be forwarded."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[int] = []
        self.asked: int | None = None  # the first one
        self._last = 0, 0.0  # signal and time; a repeat within ECHO_SECONDS is the same request, except SIGINT

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            let_go_of_terminal()
        before, now = self._last, time.monotonic()
        self._last = number, now
        if number == signal.SIGINT or number != before[0] or now - before[1] > ECHO_SECONDS:
            self.noted.append(number)


@dataclass(frozen=True)
class WorkerGroup:
    """The workers to start on this host: their command, what they are told, and the world size."""

    command: Sequence[str]
    file: WorkerFile  # what all of them are told
    shared: Mapping[str, str]  # variables of all
    own: Mapping[int, Mapping[str, str]]  # and of each, by rank
    size: int
    direct_output: bool = False  # rank 0 inherits standard output

    @staticmethod
    def of(
        command: Sequence[str], devices: Sequence[int], file: WorkerFile, shared: Mapping[str, str], *, first: int, size: int, direct: bool
    ) -> WorkerGroup:
        """A worker for each of these devices of this host, by index; their ranks start at `first`."""
        here, common = len(devices), dict(shared)
        dealt = "OMP_NUM_THREADS" not in os.environ
        if dealt:
            common["OMP_NUM_THREADS"] = str(max(1, cores() // here))
        own = {}
        for local_rank in range(here):
            numbers = {"RANK": first + local_rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": here}
            own[first + local_rank] = {key: str(value) for key, value in numbers.items()}
        told = file.model_copy(update={"devices": tuple(devices), "threads_dealt": dealt})
        return WorkerGroup(command, told, common, own, size, direct)


@dataclass(frozen=True)
class AttemptOutcome:
    """The result of one attempt."""

    ended: Ended
    steps: int  # by which training advanced
    run: Path | None  # the run's folder, if a worker reported it
    outputs: Outputs
    ends: WorkerEnds = field(default_factory=lambda: WorkerEnds({}, {}))  # what `ended` sums up, where several hosts need it


def supervise(crew: WorkerGroup, folder: Path, signals: Signals, elsewhere: Callable[[], float | None] = lambda: None) -> AttemptOutcome:
    """Start the workers and wait for them to end. `folder` is created for the files of this attempt.

    `elsewhere` is asked again and again: once the attempt has failed on another host, it returns the seconds in which the workers of this
    one may still end by themselves, with what they know.
    """
    causes, beats = folder / CAUSES, folder / heartbeat.BEATS
    for made in (causes, beats):
        made.mkdir(parents=True)
    outputs = Outputs(folder / "logs", direct=crew.direct_output)
    file = crew.file.model_copy(update={"folder": folder, "parent": os.getpid()})
    shared = {**crew.shared, **file.write(folder / "worker.json")}
    workers: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for rank, own in crew.own.items():
            out, err = outputs.of(rank)
            # In a process group of its own, so that Ctrl-C reaches this process alone, which forwards it once.
            workers[rank] = subprocess.Popen(
                crew.command, env={**os.environ, **shared, **own}, process_group=0, stdout=out, stderr=err, pass_fds=held()
            )
        watch = _Supervision(workers, signals, causes, outputs, heartbeat.Listener(beats, _pids(workers), time.monotonic()), elsewhere)
        watch.until_all_have_ended()
    finally:
        _kill(workers)
        outputs.pass_on()
    codes = {rank: worker.returncode for rank, worker in workers.items() if rank not in watch.called_off}
    found = exit_reports.read(causes)
    for cause in found.values():
        outputs.add(cause.rank, cause.trace or cause.message)
    ends = WorkerEnds(codes, found, signals.asked, frozenset(watch.killed), watch.silent)
    return AttemptOutcome(ends.ended(crew.size), watch.listener.steps, exit_reports.run_of(causes), outputs, ends)


def with_logs(outcome: AttemptOutcome, signals: Signals, host: str = "") -> Ended:
    """How an attempt ended, after copying its logs into the run's folder."""
    ended, run = outcome.ended, outcome.run
    logs = outcome.outputs.publish(run, host)
    if logs is None and ended.died and ended.rank is not None and not ended.trace and not ended.lost:
        outcome.outputs.show_errors(ended.rank)
    outcome.outputs.close()
    ended = replace(ended, logs=logs)
    return ended if signals.asked is None else asked_to_stop(ended, run)


def asked_to_stop(ended: Ended, run: Path | None) -> Ended:
    """Treat a stop before the attempt's first step as an orderly one if there is a snapshot to resume from."""
    step, number = launch_record.last_step(run), ended.code - 128
    if step is None or number not in REQUESTS or ended.message:
        return ended
    return Ended(STOPPED, f"stopped by {signal.Signals(number).name} before the first step; the run is unchanged, at step {step}")


class _Supervision:
    """Watches running workers until all have ended."""

    def __init__(
        self,
        workers: Mapping[int, subprocess.Popen[bytes]],
        signals: Signals,
        causes: Path,
        outputs: Outputs,
        listener: heartbeat.Listener,
        elsewhere: Callable[[], float | None],
    ) -> None:
        self.workers, self.signals, self.causes, self.outputs, self.listener = workers, signals, causes, outputs, listener
        self.elsewhere = elsewhere
        self.killed: set[int] = set()  # ranks terminated from here, for a cause on this host
        self.called_off: set[int] = set()  # ranks terminated because the attempt failed on another host
        self.silent: dict[int, str] = {}  # ranks without a heartbeat, or hung, and what to report
        self._deadline: float | None = None
        self._called_off_at: float | None = None
        self._harder = signal.SIGKILL
        self._stopped_by: int | None = None  # a signal that came from elsewhere and ended a worker

    def until_all_have_ended(self) -> None:
        while running := {rank: worker for rank, worker in self.workers.items() if worker.poll() is None}:
            self.outputs.pass_on()
            self._heed_stopped()
            if self._pass_on_signals(running):
                return
            now = time.monotonic()
            failed = self.listener.failed(running, now)
            if self._deadline is None and failed is not None:
                self.silent[failed[0]] = failed[1]
                self._end(running)
            elif self._deadline is None and (grace_seconds := self._since_a_failure()) is not None:
                self._deadline = now + grace_seconds
            elif (grace_seconds := self.elsewhere()) is not None and self._deadline is None and self._called_off_at is None:
                self._called_off_at = now + grace_seconds
            elif self._deadline is None and self._called_off_at is not None and now > self._called_off_at:
                self.called_off |= set(running)
                _kill(running)
            elif self._deadline is not None and now > self._deadline:
                for worker in running.values():
                    worker.send_signal(self._harder)
                self.killed |= set(running)
                self._harder, self._deadline = signal.SIGKILL, now + GRACE_SECONDS
            time.sleep(POLL_SECONDS)
        self._heed_stopped()
        if self.signals.asked is None and self._stopped_by is not None:
            self.signals.asked = self._stopped_by

    def _heed_stopped(self) -> None:
        """Take a signal that ended a worker before its first step, and came from elsewhere, as what it is to one that trains: a request."""
        if self._stopped_by is not None or self.signals.asked is not None:
            return
        ours = self.killed | self.called_off
        ends = (-worker.returncode for rank, worker in self.workers.items() if worker.returncode is not None and rank not in ours)
        self._stopped_by = next((number for number in ends if number in REQUESTS), None)
        if self._stopped_by is not None:
            self.signals.noted.append(self._stopped_by)

    def _pass_on_signals(self, running: Mapping[int, subprocess.Popen[bytes]]) -> bool:
        """Forward recorded signals; True if one was a second request, and all workers have been killed."""
        while self.signals.noted:
            number = self.signals.noted.pop(0)
            if self.signals.asked is not None and number != signal.SIGHUP:
                self._end(running)
                return True
            if self.signals.asked is not None:
                continue
            self.signals.asked = number
            for worker in running.values():
                worker.send_signal(number)
        return False

    def _end(self, running: Mapping[int, subprocess.Popen[bytes]]) -> None:
        _kill(running)
        self.killed |= set(running)

    def _since_a_failure(self) -> float | None:
        """Grace period of the remaining workers if one has failed, else None. An orderly stop is no failure: others are still saving."""
        for rank, worker in self.workers.items():
            code = worker.returncode
            spoke = (self.causes / f"{rank}.json").exists()
            if code in (None, 0) or (code in (STOPPED, INTERRUPTED) and not spoke):
                continue
            if code in (MISTAKE, RESOURCE, STOPPED, INTERRUPTED):
                self._harder = signal.SIGTERM
                return GRACE_SECONDS
            return FAULT_SECONDS if spoke else DEATH_SECONDS
        return None


def _pids(workers: Mapping[int, subprocess.Popen[bytes]]) -> dict[int, int]:
    return {rank: worker.pid for rank, worker in workers.items()}


def _kill(workers: Mapping[int, subprocess.Popen[bytes]]) -> None:
    for worker in workers.values():
        if worker.poll() is None:
            worker.kill()
    for worker in workers.values():
        worker.wait()
