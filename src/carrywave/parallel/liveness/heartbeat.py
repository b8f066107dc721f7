"""Heartbeats of workers on one host: each writes to a file, and the process that started them detects who has fallen silent.

Two questions, two limits. *Is the process alive?* A thread beats every second, so long work in the main thread (reading data, compiling) is
not silence, but a stopped process (SIGSTOP, a debugger) is, because its threads stop too. A process that holds the GIL for long cannot
beat, but it uses CPU time, which also counts as a sign of life. *Is training progressing?* The loop marks every step; once it has started,
a period without a step on any worker is a hang, and the worker with the fewest steps is the one the others are waiting for.

Files hold counters, not times, and the listener uses its own monotonic clock, so setting the system clock has no effect. Time during which
the listener itself did not run (a frozen machine) does not count. Torch-free.
"""

from __future__ import annotations

import os
import struct
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from carrywave.parallel.startup.environment import seconds_of
from carrywave.parallel.startup.launcher_env import worker_file
from carrywave.parallel.startup.process_identity import processor_ticks

BEATS = "beats"  # the folder of these files, within that of an attempt
BEAT_SECONDS = 1.0
SILENT_SECONDS = 10.0
HANG_SECONDS = 600.0
LONGER = 4  # factor on the limit for a worker that has not beaten yet, or where CPU time cannot be read
_FORM = struct.Struct("<QQQ")  # beats, steps, whether training is in progress


@dataclass
class _Progress:
    """What this process reports about itself."""

    steps: int = 0
    training: bool = False
    thread: threading.Thread | None = None


_progress = _Progress()


def silent_seconds() -> float:
    """How long a worker may go without a sign of life; infinite if the check is off."""
    return seconds_of("CARRYWAVE_HEARTBEAT_SECONDS", SILENT_SECONDS, or_off=True)


def hang_seconds() -> float:
    """How long training may go without a step on any worker; infinite if the check is off."""
    return seconds_of("CARRYWAVE_HANG_SECONDS", HANG_SECONDS, or_off=True)


def start() -> None:
    """Start beating if somebody listens; call it early. A second call does nothing."""
    folder = worker_file().folder
    if folder is None or not (folder / BEATS).is_dir() or _progress.thread is not None:
        return
    handle = os.open(folder / BEATS / os.environ.get("RANK", "0"), os.O_WRONLY | os.O_CREAT, 0o600)
    every_seconds = min(BEAT_SECONDS, silent_seconds() / 5)

    def beat() -> None:
        beats = 0
        while True:
            beats += 1
            # One write of a few bytes, so a reader never sees half of it.
            os.pwrite(handle, _FORM.pack(beats, _progress.steps, _progress.training), 0)
            time.sleep(every_seconds)

    _progress.thread = threading.Thread(target=beat, name="carrywave-heartbeat", daemon=True)
    _progress.thread.start()


def mark() -> None:
    """Record that training has advanced by a step."""
    _progress.steps += 1
    _progress.training = True


def rest() -> None:
    """Record that training has paused: what follows may take a long time."""
    _progress.training = False


def is_training() -> bool:
    """True while training steps follow each other."""
    return _progress.training


class Silence:
    """How long a value has not changed, counting only time during which this process ran."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last: object = None

    def after(self, value: object, passed: float) -> float:
        """The seconds of silence, given the current value and the time that has passed since the last one."""
        self.seconds = 0.0 if value != self._last else self.seconds + passed
        self._last = value
        return self.seconds


@dataclass
class _Signs:
    """What was last read from one worker, and for how long nothing has changed."""

    beats: int = 0
    steps: int = 0
    training: bool = False
    silence: Silence = field(default_factory=Silence)  # of beats and CPU time
    stillness: Silence = field(default_factory=Silence)  # of steps


class Listener:
    """Listens to workers, given as process ids by rank."""

    def __init__(self, folder: Path, pids: Mapping[int, int], now: float) -> None:
        self._folder, self._pids, self._now = folder, pids, now
        self._signs = {rank: _Signs() for rank in pids}
        self._silent_limit, self._hang_limit = silent_seconds(), hang_seconds()

    @property
    def steps(self) -> int:
        """The number of training steps taken, as far as known."""
        return max((signs.steps for signs in self._signs.values()), default=0)

    def failed(self, ranks: Iterable[int], now: float) -> tuple[int, str] | None:
        """Of these running ranks, one that has fallen silent or hangs, with a message about it; None if there is none."""
        # Count only time during which this process ran: after a pause of the whole machine, workers get time to beat again.
        passed, self._now = min(now - self._now, BEAT_SECONDS), now
        running = {rank: self._read_signs(rank, passed) for rank in ranks}
        somebody_beats = any(signs.beats for signs in self._signs.values())
        for rank, signs in running.items():
            usual = signs.beats > 0 and sys.platform == "linux"
            if somebody_beats and signs.silence.seconds > self._silent_limit * (1 if usual else LONGER):
                return rank, f"gave no sign of life for {signs.silence.seconds:.0f} s (stopped?) and was killed"
        if running and all(signs.training and signs.stillness.seconds > self._hang_limit for signs in running.values()):
            rank = min(running, key=lambda rank: running[rank].steps)
            return rank, f"hung: no worker took a step for {self._hang_limit:g} s, and this one had taken the fewest"
        return None

    def _read_signs(self, rank: int, passed: float) -> _Signs:
        signs = self._signs[rank]
        signs.beats, signs.steps, signs.training = _read(self._folder / str(rank))
        signs.silence.after((signs.beats, processor_ticks(self._pids[rank])), passed)
        signs.stillness.after((signs.steps, signs.training), passed)
        return signs


def _read(path: Path) -> tuple[int, int, bool]:
    try:
        beats, steps, training = _FORM.unpack(path.read_bytes())
    except (OSError, struct.error):
        return 0, 0, False  # not started yet
    return beats, steps, bool(training)
