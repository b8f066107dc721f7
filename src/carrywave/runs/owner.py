"""Who trains a run: one process at a time, which says so in the run's folder, in `owner.json`, and shows there that it lives.

Of several workers it is rank 0. The file names the process so that it can be told from every other one, here and elsewhere, and holds
a count that a thread moves on. Who comes second looks:

- On the same host the process itself is looked for, by its number and the moment it was born: while it is there it is refused, and
  when it is gone the run is free at once, however it went.
- A process of another host (or of another container) cannot be seen, and clocks of hosts differ, so the count is watched for up to
  `SILENT_SECONDS` of our own clock: where it moves, the run is taken; where it stands still, it is free. Locks of the operating
  system are not relied on, since on network file systems they may hold for one host alone; they only make a take-over orderly.
- Workers that a launcher started again go on at once: the launcher has ended the ones before.

An owner that was asleep while another took the run finds a foreign name in the file, or no file where the folder was removed, and
ends at its next write. Torch-free.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from carrywave.errors import RunError, option
from carrywave.launch import launch_record

FILE = launch_record.OWNER
BEAT_SECONDS = 5.0
SILENT_SECONDS = 60.0  # without a sign of life from another host; a count may be seen late on a network file system
LOOK_SECONDS = 0.5
WRITTEN_SECONDS = 1.0  # in which a file that was made is written
SETTLE_SECONDS = 0.2  # where nothing keeps two from taking over at once, the last to write has it
FILE_BYTES = 4096  # of the file: one length for all, so that a write in place leaves nothing of what was there


@dataclass(frozen=True)
class Owner:
    """A process that trains a run, as it stands in the file."""

    host: str
    machine: str  # an identity of the installation, where there is one
    boot: str  # of the start of its kernel
    space: str  # of its process numbers: those of a container are its own
    pid: int
    born: str  # in ticks since the start
    token: str  # of this time that the run was taken
    launch: tuple[str, ...] = ()  # the names of the launch that started it
    call: int = 0
    attempt: int = 0
    beats: int = 0

    def encode(self) -> bytes:
        """As it stands in the file: always as many bytes."""
        return json.dumps(asdict(self)).encode().ljust(FILE_BYTES - 1) + b"\n"

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def read(folder: Path) -> Owner | None:
    """Who is said to train the run; None where nobody is, or what is said cannot be read."""
    try:
        if not (folder / FILE).is_file():
            return None  # nothing, or something that would keep a reader waiting
        said = json.loads((folder / FILE).read_bytes())
        found = Owner(**{field.name: said[field.name] for field in fields(Owner)})
        return replace(found, launch=tuple(map(str, found.launch)), pid=int(found.pid), beats=int(found.beats), attempt=int(found.attempt))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def this_process() -> Owner:
    """This process, as the owner that it would be."""
    return Owner(
        socket.gethostname(),
        _text("/etc/machine-id"),
        _text("/proc/sys/kernel/random/boot_id"),
        _space(),
        os.getpid(),
        _born(os.getpid()) or "",
        secrets.token_hex(8),
        tuple(launch_record.names()),
        launch_record.call(),
        launch_record.attempt(),
    )


class Claim:
    """This process's hold on a run, from `take` to `release`."""

    def __init__(self, folder: Path, own: Owner) -> None:
        self.folder, self._own = folder, own
        self._lost: str | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="carrywave-owner", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> bool:
        """Whether the run is another's by now, or gone."""
        return self._lost is not None

    def check(self) -> None:
        """Refuse to go on where the run is not this process's any more. As far as the last beat knows: it costs nothing."""
        if self._lost is not None:
            raise RunError(self._lost)

    def look(self) -> None:
        """The same by a look at the file, before something large is written."""
        if not self._over.is_set():
            self._see()
        self.check()

    def release(self) -> None:
        """Let go of the run. A second call does nothing."""
        if self._over.is_set():
            return
        self._over.set()
        self._thread.join(BEAT_SECONDS)
        there = read(self.folder)
        if there is not None and there.token == self._own.token:
            with suppress(OSError):
                (self.folder / FILE).unlink()

    def _see(self) -> None:
        there = read(self.folder)
        if there is not None and there.token != self._own.token:
            self._lost = f"{self.folder} was taken over by {there}, because this process gave no sign of life; it ends here"
        elif not self.folder.is_dir() or not (self.folder / FILE).exists():
            gone = "folder" if not self.folder.is_dir() else f"file {FILE}"
            self._lost = f"the {gone} of the run {self.folder} was removed while it was trained; start the run again, and leave it in place"

    def _beat(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            with suppress(OSError):  # a disk that does not answer now may do so at the next beat
                self._see()
                if self._lost is not None:
                    return
                self._own = replace(self._own, beats=self._own.beats + 1)
                # Opened and closed each time: on a network file system that is when others get to see it.
                with (self.folder / FILE).open("r+b", buffering=0) as file:
                    file.write(self._own.encode())


def take(folder: Path, say: Callable[[str], None] = lambda _: None) -> Claim:
    """Become the owner of a run whose folder is there; refused where another process is."""
    own = this_process()
    while True:
        there = _settled(folder)
        if there is not None:
            _judge(folder, there, own, say)
        if _write(folder, there, own):
            return Claim(folder, own)


def _settled(folder: Path) -> Owner | None:
    """What the file says. One that is being written gets a moment to become whole; one that does not is nobody's, and removed."""
    deadline = time.monotonic() + WRITTEN_SECONDS
    while (found := read(folder)) is None and (folder / FILE).exists():
        if time.monotonic() > deadline:
            (folder / FILE).unlink(missing_ok=True)
        time.sleep(0.01)
    return found


def _write(folder: Path, judged: Owner | None, own: Owner) -> bool:
    """Put our name into the file; False where what stands there is not what was judged any more."""
    with _guarded(folder) as guarded:
        now = read(folder)
        if now is not None and (judged is None or (now.token, now.beats) != (judged.token, judged.beats)):
            return False  # another was quicker, or it lives after all
        try:
            handle = os.open(folder / FILE, os.O_WRONLY | (os.O_CREAT | os.O_EXCL if now is None else 0), 0o644)
        except (FileExistsError, FileNotFoundError):
            if not folder.is_dir():
                raise
            return False
        try:
            with os.fdopen(handle, "wb", buffering=0) as file:
                file.write(own.encode())
        except OSError:
            if now is None:
                (folder / FILE).unlink(missing_ok=True)  # it says nothing
            raise
    if now is not None and not guarded:
        time.sleep(SETTLE_SECONDS)
    there = read(folder)
    return there is not None and there.token == own.token


def _judge(folder: Path, there: Owner, own: Owner, say: Callable[[str], None]) -> None:
    """Return where the one that is said to train the run does not; refuse where it does."""
    if there.call == own.call and set(there.launch) & set(own.launch) and there.attempt < own.attempt:
        return
    gone = is_gone(there, own)
    if gone is None:
        gone = not _moves(folder, there, say)
    if not gone:
        raise RunError(f"{folder} is being trained by {there}; wait for its end or stop it, or use another {option('run')}")


def is_gone(there: Owner, own: Owner) -> bool | None:
    """Whether the process of an owner has ended; None: from here that cannot be seen."""
    if there.machine and (there.host, there.machine) == (own.host, own.machine) and there.boot != own.boot:
        return True  # the host was started anew since
    if (there.host, there.boot, there.space) != (own.host, own.boot, own.space):
        return None
    born = _born(there.pid)
    if born:
        return born != there.born
    try:
        os.kill(there.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return None  # another user's, and hidden from us
    if born is None:
        return True  # what is left of a process until its parent has asked how it ended
    return False if there.pid == own.pid else None


def _moves(folder: Path, there: Owner, say: Callable[[str], None]) -> bool:
    """Whether an owner that cannot be seen shows a sign of life."""
    say(f"{folder} was last trained by {there}; waiting up to {SILENT_SECONDS:g} s for a sign of life from there")
    deadline = time.monotonic() + SILENT_SECONDS
    while time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        now = read(folder)
        if now is None or (now.token, now.beats) != (there.token, there.beats):
            # Released, or another has it: what is there then is judged anew. Only the same one that counts on is alive.
            return now is not None and now.token == there.token
    return False


@contextmanager
def _guarded(folder: Path) -> Iterator[bool]:
    """One at a time where the system can see to it; tells whether it can."""
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
                break  # this file system knows no locks
        yield held
    finally:
        os.close(handle)


def _born(pid: int) -> str | None:
    """When a process was born; None where there is none, or only what is left of one; empty where the system does not tell."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return None if words[0] in ("Z", "X") else words[19]
    except (FileNotFoundError, ProcessLookupError):
        return None if sys.platform == "linux" else ""
    except (OSError, IndexError):
        return ""


def _space() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
