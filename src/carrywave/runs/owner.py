"""One process at a time trains a run: it holds a lock on a file in the run's folder, and keeps a heartbeat beside it.

With several workers that is rank 0. The lock (`filelock`) ends with the process, however it ends. Locks of network file systems may only
work within one host, so the owner also counts its beats in `owner.json`: a run that a process of another host trained last is watched for
`SILENT_SECONDS`, and is free if the counter stands still. An owner that finds the file gone, or another process in it, stops at its next
write. Torch-free.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from filelock import FileLock, Timeout

from carrywave.errors import RunError, option

FILE, LOCK = "owner.json", ".owner.lock"
FILES = (FILE, LOCK)
BEAT_SECONDS = 5.0
SILENT_SECONDS = 30.0  # without a heartbeat from another host; a network file system may show the counter late
LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Owner:
    """A process that trains a run, as recorded in the file."""

    host: str
    pid: int
    token: str  # unique to this acquisition of the run
    beats: int = 0

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def read(folder: Path) -> Owner | None:
    """The recorded owner; None if there is none, or the record is unreadable."""
    with suppress(OSError, ValueError, TypeError):
        return Owner(**json.loads((folder / FILE).read_bytes()))
    return None


class Claim:
    """This process's ownership of a run, from `take` to `release`."""

    def __init__(self, folder: Path, lock: FileLock) -> None:
        self.folder, self._lock = folder, lock
        self._owner = Owner(os.uname().nodename, os.getpid(), secrets.token_hex(8))
        self._over = threading.Event()
        self._write()
        self._thread = threading.Thread(target=self._beat, name="carrywave-owner", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise if another process owns the run by now, or its folder or file is gone."""
        recorded = read(self.folder)
        if recorded is not None and recorded.token != self._owner.token:
            raise RunError(f"{self.folder} was taken over by {recorded} because this process sent no heartbeat; this process stops")
        if recorded is None and not (self.folder / FILE).exists():
            gone = "folder" if not self.folder.is_dir() else f"file {FILE}"
            raise RunError(f"the {gone} of run {self.folder} was removed during training; restart the run, and leave it in place")

    def release(self) -> None:
        """Give up the run. A second call does nothing."""
        if self._over.is_set():
            return
        self._over.set()
        self._thread.join(BEAT_SECONDS)
        recorded = read(self.folder)
        if recorded is not None and recorded.token == self._owner.token:
            with suppress(OSError):
                for name in FILES:  # the lock too: whoever opened it meanwhile opens it again
                    (self.folder / name).unlink(missing_ok=True)
        self._lock.release()

    def _beat(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            try:
                self.check()
                self._owner = replace(self._owner, beats=self._owner.beats + 1)
                self._write()
            except OSError:
                continue  # a disk that does not respond now may do so at the next beat
            except RunError:
                return  # the next write finds out too

    def _write(self) -> None:
        """Replace the record at once: whoever reads it sees a whole one."""
        draft = self.folder / f".{FILE}.tmp"
        draft.write_text(json.dumps(asdict(self._owner)), encoding="utf-8")
        os.replace(draft, self.folder / FILE)


def take(folder: Path, say: Callable[[str], None] = lambda _: None) -> Claim:
    """Become the owner of a run whose folder exists; raises if another process owns it."""
    lock = FileLock(folder / LOCK, is_singleton=False)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise _held(folder) from None
    try:
        recorded = read(folder)
        if recorded is not None and recorded.host != os.uname().nodename and _moves(folder, recorded, say):
            raise _held(folder)
        return Claim(folder, lock)
    except BaseException:
        lock.release()
        raise


def is_held(folder: Path) -> bool:
    """True if a process of this host trains the run in a folder."""
    if not (folder / LOCK).exists():
        return False
    lock = FileLock(folder / LOCK, is_singleton=False)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return True
    lock.release()
    return False


def refuse_held(folder: Path) -> None:
    """Raise if a process of this host trains the run in a folder."""
    if is_held(folder):
        raise RunError(f"{folder} is being trained by {read(folder) or 'another process'}; use another {option('run')}")


def _held(folder: Path) -> RunError:
    who = read(folder) or "another process"
    return RunError(f"{folder} is being trained by {who}; wait until it ends, stop it, or use another {option('run')}")


def _moves(folder: Path, recorded: Owner, say: Callable[[str], None]) -> bool:
    """True if an owner on another host shows a heartbeat."""
    say(f"{folder} was last trained by {recorded}; waiting up to {SILENT_SECONDS:g} s for a heartbeat from it")
    deadline = time.monotonic() + SILENT_SECONDS
    while time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        now = read(folder)
        if now is None and not (folder / FILE).exists():
            return False  # it was released
        if now is not None and now != recorded:
            return True
    return False
