"""Keeps what workers print: `runs/NAME/logs/attempt-0/rank-1.log` (stderr and tracebacks) and `.out` (stdout).

Workers write to files, not to pipes, so that they can continue if the process that started them is gone; that process forwards what should
be visible: all of stdout, and the stderr of rank 0. Only rank 0's stdout, if it is a terminal, is not kept: a live display needs the
terminal itself. The run's folder is unknown at the start and may never be created, so the files are written elsewhere and copied at the end
of the attempt.
"""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import IO

OUT, ERR = 1, 2
SHOWN_BYTES = 4000  # of the stderr of a worker that reported nothing else


class Outputs:
    """The output of one attempt's workers."""

    def __init__(self, folder: Path, *, direct: bool = False) -> None:
        self.folder = folder
        self._direct = direct  # rank 0 writes its result to our standard output itself, and finds out if nobody reads it
        folder.mkdir(parents=True)
        self._shown: list[tuple[int, IO[bytes]]] = []  # a descriptor to forward to, and a log file read up to what was forwarded
        self._written: list[IO[bytes]] = []

    def of(self, rank: int) -> tuple[IO[bytes] | None, IO[bytes]]:
        """Files for a worker's stdout (None: inherit ours) and stderr."""
        inherited = rank == 0 and (self._direct or os.isatty(OUT))
        return None if inherited else self._open(f"rank-{rank}.out", OUT), self._open(f"rank-{rank}.log", ERR if rank == 0 else None)

    def _open(self, name: str, shown: int | None) -> IO[bytes]:
        # Append mode, so that our additions and the worker's writes do not overwrite each other.
        file = (self.folder / name).open("ab")
        self._written.append(file)
        if shown is not None:
            self._shown.append((shown, (self.folder / name).open("rb")))
        return file

    def pass_on(self) -> None:
        """Forward the output written since the last call."""
        for to, file in self._shown:
            while data := file.read(1 << 16):
                _show(to, data)

    def add(self, rank: int, text: str) -> None:
        """Append what a worker reported to its log."""
        with (self.folder / f"rank-{rank}.log").open("a", encoding="utf-8") as file:
            file.write(text.rstrip("\n") + "\n")

    def show_errors(self, rank: int) -> None:
        """Show the end of a worker's stderr, when nothing else says why it ended; that of rank 0 has been forwarded already."""
        path = self.folder / f"rank-{rank}.log"
        if rank > 0 and path.is_file():
            _show(ERR, path.read_bytes()[-SHOWN_BYTES:])

    def publish(self, run: Path | None) -> Path | None:
        """Copy the logs that are not empty into an existing run; returns the folder, or None if nothing was copied."""
        found = [path for path in sorted(self.folder.iterdir()) if path.stat().st_size]
        # A folder that is still empty is no run yet: with logs in it, the next attempt would be refused it.
        if run is None or not found or not run.is_dir() or not any(run.iterdir()):
            return None
        target = next(free for number in count() if not (free := run / "logs" / f"attempt-{number}").exists())
        try:
            target.mkdir(parents=True)
            for path in found:
                shutil.copyfile(path, target / path.name)
        except OSError:
            return None  # a full disk must not hide why the attempt ended
        return target

    def close(self) -> None:
        """Close all files."""
        for file in (*self._written, *(file for _, file in self._shown)):
            file.close()


def keep_trace(run: Path | None, attempt: str, rank: str, error: BaseException) -> Path | None:
    """Append this worker's traceback to its log in the run, for workers that another launcher started; returns the file, or None."""
    if run is None or not run.is_dir():
        return None
    path = run / "logs" / f"attempt-{attempt}" / f"rank-{rank}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(traceback.format_exception(error)))
    except OSError:
        return None
    return path


def _show(to: int, data: bytes) -> None:
    """Write what a worker has printed to this process's own stdout or stderr, given by descriptor."""
    stream = sys.stdout if to == OUT else sys.stderr
    if stream is None:  # closed at startup: the descriptor may belong to another file by now
        return
    with suppress(OSError, ValueError):  # whoever read our output is gone: the workers continue
        stream.flush()
        while data:
            data = data[os.write(to, data) :]
