"""Starts one worker per device, restarts them when one dies, and reports one exit code and one cause.

Workers of a single host rendezvous through a file and communicate over loopback: nothing listens where another machine could reach it.
`supervisor` watches them. Hosts that an engine names are brought together by torch's elastic agent (`elastic`).

A worker that dies (killed, crashed, stopped, lost) ends the attempt; the next attempt resumes from the last snapshot by itself. User errors
and orderly exits are final. So are repeated deaths (`Restarts`).
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from carrywave.launch import launch_record
from carrywave.launch.exit_reports import STOPPED, Ended
from carrywave.launch.hardware import cores
from carrywave.launch.signals import REQUESTS, Forwarded
from carrywave.launch.supervisor import supervise
from carrywave.launch.worker_logs import Outputs
from carrywave.parallel.startup.addresses import GLOO, LOOPBACK, NCCL
from carrywave.parallel.startup.launcher_env import FitCall, WorkerFile, worker_file

RESTARTS = 3  # without progress in between, unless the user sets another limit
DEATHS = 2  # in a row of one device's worker, without progress, after which the device is left out


@dataclass(frozen=True)
class Patience:
    """How often workers that die are started again, and with how few."""

    restarts: int | None = None  # without a newer snapshot in between; None: `RESTARTS`
    least: int | None = None  # workers; None: as many as were asked for

    @property
    def most(self) -> int:
        """The limit of restarts."""
        return RESTARTS if self.restarts is None else self.restarts


NEVER = Patience(restarts=0)


def is_worker() -> bool:
    """True if one of our launchers started this process."""
    return bool(worker_file().launch)


def start(
    command: Sequence[str],
    devices: int,
    patience: Patience = NEVER,
    *,
    environment: Mapping[str, str] | None = None,
    fit: FitCall | None = None,
    resumes: Path | None = None,
    say: Callable[[str], None] | None = None,
) -> Ended:
    """Run `command` in `devices` workers on this host and wait for them to end. They learn their rank from the environment.

    `fit` is the call of a script that they are for. `resumes` is the run that the workers go on with, if that is known before they say so.
    """
    launch, run, number = uuid.uuid4().hex, resumes, 0
    restarts = Restarts(devices, patience)
    variables = {**worker_variables(devices), **(environment or {})}
    variables |= {name: LOOPBACK for name in (GLOO, NCCL) if name not in os.environ}
    with tempfile.TemporaryDirectory(prefix="carrywave-launch-") as place, Forwarded() as signals:
        while True:
            folder = Path(place) / f"attempt-{number}"
            outputs = Outputs(folder / "logs")
            file = WorkerFile(
                launch=launch,
                attempt=number,
                fewer=len(restarts.devices) < devices,
                one_host=True,
                store=folder / "store",
                folder=folder,
                parent=os.getpid(),
                devices=tuple(restarts.devices),
                threads_dealt="OMP_NUM_THREADS" in variables,
                fit=fit,
            )
            attempt = supervise(command, file, variables, outputs, signals)
            ended, run = attempt.ended, attempt.run or run  # one that died early has not reported its run; the attempt before did
            logs = outputs.publish(run)
            if logs is None and ended.died and ended.rank is not None and not ended.trace:
                outputs.show_end(ended.rank)
            if signals.asked is None and ended.died and signals.noted:
                ended = Ended(128 + next(number for number in signals.take() if number is not None))  # nobody was left to receive it
            if signals.asked is not None:
                return replace(asked_to_stop(ended, run), logs=logs)
            again = restarts.after(ended, launch_record.last_step(run)) if ended.died else None
            if again is None:
                return replace(ended, message=ended.message + restarts.given_up, logs=logs)
            (say or _say)(again)
            number += 1


class Restarts:
    """Decides what follows when workers die: another attempt, one with fewer workers, or the end.

    Restarts are counted, and a newer snapshot than at the previous death resets the count; an internal error without one is final.
    If fewer workers are acceptable, a device whose worker keeps dying is left out, and the others share the same global batch.
    """

    def __init__(self, devices: int, patience: Patience) -> None:
        self.devices = list(range(devices))  # in use, by rank
        self.given_up = ""  # what to append to the final message
        self._all, self._most, self._least = devices, patience.most, patience.least or devices
        self._used, self._step = 0, -1  # restarts since the newest snapshot, and its step
        self._deaths: Counter[int] = Counter()  # since then, by device

    def after(self, ended: Ended, step: int | None) -> str | None:
        """The line to print before the next attempt; None if there is none. `step`: of the newest snapshot."""
        if self._most == 0:
            return None
        progressed = step is not None and step > self._step
        if progressed and step is not None:
            self._used, self._step = 0, step
            self._deaths.clear()
        self._used += 1
        where = "from the beginning" if step is None else f"from step {step}"
        what = ended.message.partition(";")[0]
        if ended.rank is not None and len(self.devices) > self._least:
            device = self.devices[ended.rank]
            self._deaths[device] += 1
            if self._deaths[device] >= DEATHS:
                self.devices.remove(device)
                self._used = 0
                self._deaths.clear()
                return f"{what}; continuing with {len(self.devices)} of {self._all} workers {where}"
        if ended.trace and not progressed:
            self.given_up = "; it failed again at the same point" if self._used > 1 else ""
            return None
        if self._used > self._most:
            self.given_up = f"; gave up after {self._most} restart{'s' * (self._most != 1)} without progress"
            return None
        return f"{what}; restarting {where} (restart {self._used} of {self._most})"


def worker_variables(devices: int) -> dict[str, str]:
    """Variables of all workers of a host: their share of its cores, unless the user has set another number of threads."""
    return {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(max(1, cores() // devices))}


def asked_to_stop(ended: Ended, run: Path | None) -> Ended:
    """Treat a stop before the attempt's first step as an orderly one if there is a snapshot to resume from."""
    step, number = launch_record.last_step(run), ended.code - 128
    if step is None or number not in REQUESTS or ended.message:
        return ended
    return Ended(STOPPED, f"stopped by {signal.Signals(number).name} before the first step; the run is unchanged, at step {step}")


def _say(line: str) -> None:
    # A live display that was killed leaves the cursor hidden.
    with suppress(OSError):  # nobody reads it any more: the workers continue
        shown = "\x1b[?25h" if sys.stderr.isatty() else ""
        print(f"{shown}carrywave: {line}", file=sys.stderr, flush=True)
