"""What a run could not write yet, on a full disk for example: rows of its logs, and the newest version of whole files.

It is kept in memory, in order, and tried again with every later write of the same log, before every snapshot and at the end. So a run goes
on while there is no room, and what it leaves is what it would have left anyway. Torch-free.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import IO

from carrywave.errors import RunError, from_system, remedy_for

BLOCK_BYTES = 1 << 20
MOST_BYTES = 1 << 26  # of rows kept in memory: hundreds of thousands of them


class Backlog:
    """The open logs of a run, and what waits for room. The thread that publishes snapshots may work it off meanwhile."""

    def __init__(self, folder: Path, before_opening: Callable[[], None]) -> None:
        self._folder, self._before_opening = folder, before_opening
        self.say: Callable[[str], None] = lambda _: None  # called once when something waits, and once when all is written
        self._announced = False
        self._elsewhere: set[str] = set()  # what others keep
        self._lock = threading.RLock()
        self._logs: dict[str, IO[bytes]] = {}
        self._rows: dict[str, bytearray] = {}  # by log
        self._files: dict[str, Callable[[], None]] = {}  # by name: what writes the whole file

    @property
    def waiting(self) -> tuple[str, ...]:
        """The names of all that is not written yet."""
        return (*self._rows, *self._files, *self._elsewhere)

    def num_bytes(self, name: str | None = None) -> int:
        """How much waits to be appended to a log, or to all of them."""
        return sum(len(rows) for log, rows in self._rows.items() if name in (None, log))

    def append(self, name: str, data: bytes) -> None:
        """Append to a log, after what waits for it; keep the data if that fails."""
        with self._lock:
            self._rows.setdefault(name, bytearray()).extend(data)
            why = self._write_rows(name)
        self._tell(name, why)

    def replace(self, name: str, write: Callable[[], None], kept: Callable[[], Callable[[], None]] | None = None) -> None:
        """Write a whole file; keep it if that fails. What `kept` returns writes it later, if that is not `write` itself."""
        with self._lock:
            self._files[name] = write
            why = self._write_file(name)
            if why is not None and kept is not None:
                self._files[name] = kept()
        self._tell(name, why)

    def rows(self, name: str) -> bytes:
        """The rows that wait for a log."""
        return bytes(self._rows.get(name, b""))

    def note(self, name: str, why: OSError | None) -> None:
        """What others keep if it cannot be written: `why` it was not, or None."""
        self._elsewhere = self._elsewhere - {name} if why is None else self._elsewhere | {name}
        self._tell(name, why)

    def work_off(self) -> dict[str, OSError]:
        """Try to write all that waits; returns why what is still waiting does, by name."""
        with self._lock:
            tried = {name: self._write_rows(name) for name in tuple(self._rows)}
            tried |= {name: self._write_file(name) for name in tuple(self._files)}
        return {name: why for name, why in tried.items() if why is not None}

    def close(self, *, without: Collection[str] = ()) -> None:
        """Close the logs, and forget the rows that wait for these."""
        with self._lock:
            for name in without:
                self._rows.pop(name, None)
            while self._logs:
                self._logs.popitem()[1].close()

    def _tell(self, name: str, why: OSError | None) -> None:
        """After a write: say once that something waits, and once that all is written. Raise if no more can be kept, or it has no place."""
        if why is None:
            if self._announced and not self.waiting:
                self._announced = False
                self.say(f"{self._folder}: all that was kept in memory is written")
            return
        self._before_opening()
        fact = f"{self._folder / name} could not be written: {why.strerror or why}"
        remedy = remedy_for(why, "make the folder writable")
        if self.num_bytes() > MOST_BYTES:
            kept = f"{MOST_BYTES >> 20} MiB of rows wait in memory, and no more are kept"
            raise from_system(why, RunError)(f"{fact}; {kept}; {remedy}, then resume") from why
        if not self._announced:
            self._announced = True
            self.say(f"{fact}; the run continues, and keeps it in memory; {remedy}")

    def _write_rows(self, name: str) -> OSError | None:
        rows, done = self._rows[name], 0
        try:
            if name not in self._logs:
                self._before_opening()
                if (self._folder / name).exists() and not (self._folder / name).is_file():
                    raise RunError(f"{self._folder / name} is not a regular file; remove it, then resume")
                # Unbuffered, so that the file on disk ends with a complete line.
                self._logs[name] = (self._folder / name).open("ab", buffering=0)
            log = self._logs[name]
            size = os.fstat(log.fileno()).st_size
            try:
                while done < len(rows):  # a nearly full disk accepts a part, and refuses the rest
                    done += log.write(bytes(rows[done : done + BLOCK_BYTES]))
            except OSError:
                with suppress(OSError):
                    os.ftruncate(log.fileno(), size)
                    done = 0
                raise
        except OSError as error:
            del rows[:done]
            return error
        del self._rows[name]
        return None

    def _write_file(self, name: str) -> OSError | None:
        try:
            self._before_opening()
            self._files[name]()
        except OSError as error:
            return error
        del self._files[name]
        return None
