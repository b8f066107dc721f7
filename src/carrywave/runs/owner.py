"""Ownership of a run: one process at a time trains it, records itself in `owner.json` in the run's folder, and keeps a heartbeat there.

With several workers the owner is rank 0. The file identifies the process uniquely, across hosts too, and holds a counter that a thread
increments. A second process checks:

- On the same host, whether the owner's process still exists, by pid and start time: while it does, the second process is refused; once it
  is gone the run is free immediately, however the owner ended.
- A process on another host (or in another container) is not visible, and hosts' clocks differ, so the counter is watched for up to
  `SILENT_SECONDS` by our own clock: if it advances, the run is in use; if it does not, the run is free. Operating system locks are not
  relied on, since on network file systems they may only work within one host; they merely serialize takeovers.
- Workers that a launcher restarted take over immediately: the launcher has ended their predecessors.

An owner that was suspended while another process took over finds a foreign entry in the file, or no file if the folder was removed, and
stops at its next write. Torch-free.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from carrywave.errors import RunError, option
from carrywave.launch import launch_record
from carrywave.parallel.startup.process_identity import has_ended, identity

FILE = launch_record.OWNER
BEAT_SECONDS = 5.0
SILENT_SECONDS = 60.0  # without a heartbeat from another host; a network file system may show the counter late
LOOK_SECONDS = 0.5
WRITTEN_SECONDS = 1.0  # within which a newly created file is filled
SETTLE_SECONDS = 0.2  # without a lock two processes may take over at once: after this time, the last to write has won
FILE_BYTES = 4096  # fixed size of the file, so that a write in place leaves nothing of the old content


@dataclass(frozen=True)
class Owner:
    """A process that trains a run, as recorded in the file."""

    host: str
    machine: str  # id of the operating system's installation, if it has one
    boot: str  # id of the kernel's current boot
    space: str  # PID namespace: a container has its own
    pid: int
    born: str  # start time, in clock ticks since boot
    token: str  # unique to this acquisition of the run
    launch: tuple[str, ...] = ()  # the names of the launch that started the process
    call: int = 0
    attempt: int = 0
    beats: int = 0

    def encode(self) -> bytes:
        """The content of the file, padded to its fixed size."""
        return json.dumps(asdict(self)).encode().ljust(FILE_BYTES - 1) + b"\n"

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def read(folder: Path) -> Owner | None:
    """The recorded owner; None if there is none, or the record is unreadable."""
    try:
        if not (folder / FILE).is_file():
            return None  # nothing, or something that would block a reader
        return TypeAdapter(Owner).validate_json((folder / FILE).read_bytes())
    except (OSError, ValidationError):
        return None


def this_process() -> Owner:
    """This process, as the owner that it would be."""
    process = identity(os.getpid())
    try:
        machine = Path("/etc/machine-id").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        machine = ""
    return Owner(
        str(process["host"]),
        machine,
        str(process["boot"]),
        str(process["space"]),
        os.getpid(),
        str(process["born"]),
        secrets.token_hex(8),
        tuple(launch_record.names()),
        launch_record.call(),
        launch_record.attempt(),
    )


class Claim:
    """This process's ownership of a run, from `take` to `release`."""

    def __init__(self, folder: Path, owner: Owner) -> None:
        self.folder, self._owner = folder, owner
        self._lost: str | None = None
        self._over = threading.Event()
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
            with suppress(OSError):
                (self.folder / FILE).unlink()

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
                # Opened and closed each time: on a network file system, closing makes a write visible to other hosts.
                with (self.folder / FILE).open("r+b", buffering=0) as file:
                    file.write(self._owner.encode())


def take(folder: Path, say: Callable[[str], None] = lambda _: None) -> Claim:
    """Become the owner of a run whose folder exists; raises if another process owns it."""
    ours = this_process()
    while True:
        recorded = _settled(folder)
        if recorded is not None:
            _judge(folder, recorded, ours, say)
        if _write(folder, recorded, ours):
            return Claim(folder, ours)


def _settled(folder: Path) -> Owner | None:
    """The recorded owner. A record being written gets a moment to become complete; one that stays incomplete is nobody's, and removed."""
    deadline = time.monotonic() + WRITTEN_SECONDS
    while (recorded := read(folder)) is None and (folder / FILE).exists():
        if time.monotonic() > deadline:
            (folder / FILE).unlink(missing_ok=True)
        time.sleep(0.01)
    return recorded


def _write(folder: Path, judged: Owner | None, ours: Owner) -> bool:
    """Record this process in the file; False if the file is no longer what was judged."""
    with _guarded(folder) as guarded:
        now = read(folder)
        if now is not None and (judged is None or (now.token, now.beats) != (judged.token, judged.beats)):
            return False  # another process was faster, or the owner is alive after all
        try:
            handle = os.open(folder / FILE, os.O_WRONLY | (os.O_CREAT | os.O_EXCL if now is None else 0), 0o644)
        except (FileExistsError, FileNotFoundError):
            if not folder.is_dir():
                raise
            return False
        try:
            with os.fdopen(handle, "wb", buffering=0) as file:
                file.write(ours.encode())
        except OSError:
            if now is None:
                (folder / FILE).unlink(missing_ok=True)  # an incomplete record
            raise
    if now is not None and not guarded:
        time.sleep(SETTLE_SECONDS)
    written = read(folder)
    return written is not None and written.token == ours.token


def _judge(folder: Path, recorded: Owner, ours: Owner, say: Callable[[str], None]) -> None:
    """Return if the recorded owner no longer trains the run; raise if it does."""
    if recorded.call == ours.call and set(recorded.launch) & set(ours.launch) and recorded.attempt < ours.attempt:
        return
    gone = is_gone(recorded, ours)
    if gone is None:
        gone = not _moves(folder, recorded, say)
    if not gone:
        raise RunError(f"{folder} is being trained by {recorded}; wait until it ends, stop it, or use another {option('run')}")


def is_gone(recorded: Owner, ours: Owner) -> bool | None:
    """True if the process of an owner has ended; None if that cannot be seen from here."""
    if recorded.machine and (recorded.host, recorded.machine) == (ours.host, ours.machine) and recorded.boot != ours.boot:
        return True  # the host has rebooted since
    if (recorded.host, recorded.boot, recorded.space) != (ours.host, ours.boot, ours.space):
        return None
    return has_ended(recorded.pid, recorded.born)


def _moves(folder: Path, recorded: Owner, say: Callable[[str], None]) -> bool:
    """True if an owner that cannot be seen from here shows a heartbeat."""
    say(f"{folder} was last trained by {recorded}; waiting up to {SILENT_SECONDS:g} s for a heartbeat from it")
    deadline = time.monotonic() + SILENT_SECONDS
    while time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        now = read(folder)
        if now is None or (now.token, now.beats) != (recorded.token, recorded.beats):
            # Released, or taken by another process: `take` judges again. Only the same owner with an advancing counter is alive.
            return now is not None and now.token == recorded.token
    return False


@contextmanager
def _guarded(folder: Path) -> Iterator[bool]:
    """Lock the folder if the file system supports it; yields whether it is locked."""
    try:
        import fcntl
    except ImportError:
        yield False
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        deadline = time.monotonic() + WRITTEN_SECONDS
        held = False
        while not held and time.monotonic() < deadline:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = True
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:
                break  # this file system has no locks
        yield held
    finally:
        os.close(handle)
