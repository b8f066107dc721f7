"""Runs that are trained in processes of their own, as many at a time as there are places: each is an ordinary `carrywave train`.

One that dies ends nothing but itself. Whoever is asked to stop asks the runs to stop, which write their snapshots, and waits for them. What
a run prints is kept in a file beside its folder.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from carrywave.errors import PlanError, RunError, WorkerError, option
from carrywave.launch.exit_reports import INTERRUPTED, RESOURCE, STOPPED
from carrywave.launch.hardware import cores, visible
from carrywave.launch.hosts import hosts_of
from carrywave.launch.signals import Reason, Stop
from carrywave.parallel.startup.launcher_env import launched
from carrywave.runs import owner
from carrywave.runs.checkpoint import atomic_files
from carrywave.runs.run_place import check_name, check_place, is_draft, refuse_occupied

COMMAND = (sys.executable, "-m", "carrywave", "train")
POLL_SECONDS = 0.2
# Exit codes of runs that may succeed later: the machine lacked something, or they were asked to stop.
PASSING = (RESOURCE, STOPPED, INTERRUPTED, 128 + signal.SIGTERM, 128 + signal.SIGHUP, 128 + signal.SIGUSR1)

Place = Mapping[str, str]  # the variables of the environment that give a run its devices
Why = Reason | Literal["time"]  # why runs were stopped: a signal, or the time that was given is over


@dataclass
class ChildRun:
    """A run that is trained: its folder, and the arguments of `carrywave train` besides."""

    folder: Path
    words: tuple[str, ...]
    place: Place = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    asked: bool = False  # to stop

    @property
    def log(self) -> Path:
        """What the run prints."""
        return self.folder.parent / "logs" / f"{self.folder.name}.log"

    def start(self, place: Place) -> None:
        """Start the run, or go on with it."""
        self.place, self.started = place, time.monotonic()
        self.log.parent.mkdir(exist_ok=True)
        command, surrounding = [*COMMAND, *self.words, "--run", str(self.folder), "--continue"], {**os.environ, **place}
        with self.log.open("ab") as log:
            # A session of its own: Ctrl-C in a terminal reaches this process, which stops its runs in order.
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=surrounding, start_new_session=True
            )

    def code(self) -> int | None:
        """The exit code; None while it goes on."""
        return None if self.process is None else self.process.poll()

    def stop(self) -> None:
        """Ask the run to write its snapshot and to end."""
        if not self.asked and self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.asked = True

    def can_go_on(self, code: int) -> bool:
        """True if a run that has ended before its end is worth starting again: nothing in its input was wrong."""
        return code != 0 and (self.asked or code in PASSING)

    def complaint(self, code: int) -> str:
        """Why a run ended that nobody asked to: the last line that it printed, and its exit code."""
        lines = [line.strip() for line in self.log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
        said = lines[-1].removeprefix("carrywave: ") if lines else "it printed nothing"
        how = f"exit code {code}" if code > 0 else f"ended by {signal.Signals(-code).name}"
        return f"{said[:300]} ({how}; {self.log})"

    def evaluations(self) -> list[dict[str, Any]]:
        """The evaluations on valid so far; the last line of the metrics may be cut off."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text("utf-8").splitlines(keepends=True) if path.is_file() else []
        return [json.loads(line) for line in lines if line.startswith('{"split": "valid"') and line.endswith("\n")]


def run_children(
    next_child: Callable[[], ChildRun | None],
    places: Sequence[Place],
    look: Callable[[ChildRun], bool],
    ended: Callable[[ChildRun, int], None],
    *,
    until: float | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Why | None:
    """Train runs until there are no more: returns None then, or why they were stopped before.

    `next_child` is asked for a run whenever a place is free, None if there is none. `look` is shown every run that goes on, and a last time
    when it has ended; it returns True to stop it. `until` is the time on the monotonic clock at which all are stopped. A run that a process
    of an earlier, killed search still trains is waited for, and `say` told so.
    """
    free, running = list(places), list[ChildRun]()
    why: Why | None = None
    held: ChildRun | None = None  # an earlier process still trains it
    with Stop() as stop:
        try:
            while True:
                while free and why is None and (child := held or next_child()) is not None:
                    if owner.is_held(child.folder):
                        if held is None:
                            say(f"{child.folder} is still being trained by a process that was started before; waiting for it to end")
                        held = child
                        break
                    held = None
                    child.start(free.pop(0))
                    running.append(child)
                if not running and (held is None or why is not None):
                    return why
                time.sleep(POLL_SECONDS)
                if why is None and (stop.asked is not None or (until is not None and time.monotonic() > until)):
                    why = stop.asked or "time"
                    for child in running:  # before any of them is looked at: a cluster may have asked them too
                        child.stop()
                for child in [*running]:
                    code = child.code()
                    if look(child) and code is None:
                        child.stop()
                    if code is not None:
                        running.remove(child)
                        free.append(child.place)
                        ended(child, code)
        finally:  # a second Ctrl-C, or a fault of ours
            for child in running:
                if child.process is not None:
                    child.process.kill()
                    child.process.wait()


def places_for(at_once: int | None, device: str, devices: int | None) -> list[Place]:
    """Where runs are trained side by side, on `devices` devices each: by default on every GPU, one after the other on a CPU."""
    for name, count in (("at-once", at_once), ("devices", devices)):
        if count is not None and count < 1:
            raise PlanError(f"{option(name)} is {count}; use a number >= 1")
    hosts = hosts_of(os.environ)
    if launched() or (hosts is not None and hosts.number > 1):
        raise WorkerError(
            "several runs are trained on one machine, but a launcher or an engine has started workers here; start this command once"
        )
    each, gpus = devices or 1, [str(gpu) for gpu in visible()] if device != "cpu" else []
    if gpus and len(gpus) < each:
        raise PlanError(f"{option('devices', each)} for each run, but there are {len(gpus)} GPUs; use {option('devices', len(gpus))}")
    if gpus:
        groups = [gpus[first : first + each] for first in range(0, len(gpus) - each + 1, each)]
        return [{"CUDA_VISIBLE_DEVICES": ",".join(groups[number % len(groups)])} for number in range(at_once or len(groups))]
    count = at_once or 1
    threads = max(1, cores() // (count * each))
    return [{} if count == 1 or "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(threads)}] * count


def options_of(device: str, devices: int | None) -> tuple[str, ...]:
    """The options of `carrywave train` for where to compute."""
    return "--device", device, "--devices", str(devices or 1)


@contextmanager
def holding(folder: Path, *, resume: bool, marker: str, before: str) -> Iterator[None]:
    """Own the folder that runs are trained in: a new one, or one with the file `marker`, which says that they were.

    `before` is what is written before that file: a process that was killed in between has left a folder that is as good as new.
    """
    check_name(folder)
    if resume and not (folder / marker).is_file():
        raise RunError(f"{folder} has nothing to resume (no {marker}); correct {option('run')}, or remove {option('resume')}")
    if not resume:
        if not (folder.is_dir() and all(entry.name in (*owner.FILES, before) or is_draft(entry) for entry in folder.iterdir())):
            refuse_occupied(folder)
        check_place(folder)
    with atomic_files.writing(str(folder)):
        folder.mkdir(parents=True, exist_ok=True)
        claim = owner.take(folder)
    try:
        yield
    finally:
        claim.release()
