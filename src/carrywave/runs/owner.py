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
from pydantic import TypeAdapter, ValidationError

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
    try:
        return TypeAdapter(Owner).validate_json((folder / FILE).read_bytes()) if (folder / FILE).is_file() else None
    except (OSError, ValidationError):
        return None


def beats(folder: Path) -> bool:
    """True if a process trains the run, as far as its last heartbeat tells."""
    try:
        return time.time() - (folder / FILE).stat().st_mtime < SILENT_SECONDS
    except OSError:
        return False


class Claim:
    """This process's ownership of a run, from `take` to `release`."""

    def __init__(self, folder: Path, owner: Owner, lock: FileLock) -> None:
        self.folder, self._owner, self._lock = folder, owner, lock
        self._lost: str | None = None
        self._over = threading.Event()
        self._write()
        self._thread = threading.Thread(target=self._beat, name="carrywave-owner", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> bool:
        """True if another process owns the run by now, or its folder or file is gone."""
        return self._lost is not None

    def check(self) -> None:
        """Raise if this process no longer owns the run, as of the last heartbeat; this costs nothing."""
        if self._lost is not None:
            raise RunError(self._lost)

    def look(self) -> None:
        """As `check`, but reads the file first; for use before something large is written."""
        if not self._over.is_set():
            self._see()
        self.check()

    def release(self) -> None:
        """Give up the run. A second call does nothing."""
        if self._over.is_set():
            return
        self._over.set()
        self._thread.join(BEAT_SECONDS)
        recorded = read(self.folder)
        if recorded is not None and recorded.token == self._owner.token:
            _remove(self.folder, *FILES)  # the lock too: whoever opened it meanwhile opens it again
        self._lock.release()

    def _see(self) -> None:
        recorded = read(self.folder)
        if recorded is not None and recorded.token != self._owner.token:
            self._lost = f"{self.folder} was taken over by {recorded} because this process sent no heartbeat; this process stops"
        elif not self.folder.is_dir() or not (self.folder / FILE).exists():
            gone = "folder" if not self.folder.is_dir() else f"file {FILE}"
            self._lost = f"the {gone} of run {self.folder} was removed during training; restart the run, and leave it in place"

    def _beat(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            with suppress(OSError):  # a disk that does not respond now may do so at the next beat
                self._see()
                if self._lost is not None:
                    return
                self._owner = replace(self._owner, beats=self._owner.beats + 1)
                self._write()

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
        return Claim(folder, Owner(os.uname().nodename, os.getpid(), secrets.token_hex(8)), lock)
    except BaseException:
        lock.release()
        raise


def refuse_held(folder: Path) -> None:
    """Raise if a process of this host trains the run in a folder."""
    if (folder / LOCK).exists():
        take_and_let_go = FileLock(folder / LOCK, is_singleton=False)
        try:
            take_and_let_go.acquire(blocking=False)
        except Timeout:
            raise RunError(f"{folder} is being trained by {_who(folder)}; use another {option('run')}") from None
        take_and_let_go.release()


def _held(folder: Path) -> RunError:
    return RunError(f"{folder} is being trained by {_who(folder)}; wait until it ends, stop it, or use another {option('run')}")


def _who(folder: Path) -> Owner | str:
    """The owner, who may have taken the lock only just now."""
    deadline = time.monotonic() + 1.0
    while (recorded := read(folder)) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return recorded or "another process"


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


def _remove(folder: Path, *names: str) -> None:
    with suppress(OSError):
        for name in names:
            (folder / name).unlink(missing_ok=True)
