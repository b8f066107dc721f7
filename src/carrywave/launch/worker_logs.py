"""What workers print, kept whole: `runs/NAME/logs/attempt-0/rank-1.log` (errors and tracebacks) and `.out` (the rest).

Workers write to files, not into pipes, so that they can go on when the process that started them is gone; that process passes on what is to
be seen: all of stdout, and the errors of rank 0. Only the display of rank 0 on a terminal is the terminal's alone. The folder of the run is
not known at the start, and may never come to be: the files are made elsewhere and copied at the end of the attempt.
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
SHOWN_BYTES = 4000  # of the errors of a worker that said nothing else


class Outputs:
    """The output of the workers of one attempt."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self._shown: list[tuple[int, IO[bytes]]] = []  # where the bytes of a file go, and the file, read as far as they were passed on
        self._handles: list[int] = []

    def of(self, rank: int) -> tuple[int | None, int]:
        """Handles for a worker's stdout (None: this process's own) and stderr."""
        to_terminal = rank == 0 and os.isatty(OUT)  # a live display needs the terminal itself
        return None if to_terminal else self._open(f"rank-{rank}.out", OUT), self._open(f"rank-{rank}.log", ERR if rank == 0 else None)

    def _open(self, name: str, shown: int | None) -> int:
        path = self.folder / name
        # Appending: what is added here and what the worker writes do not overwrite each other.
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        if shown is not None:
            self._shown.append((shown, path.open("rb")))
        self._handles.append(handle)
        return handle

    def pass_on(self) -> None:
        """Show what has come since the last time."""
        for to, file in self._shown:
            while data := file.read(1 << 16):
                _write_all(to, data)

    def add(self, rank: int, text: str) -> None:
        """Add what a worker told to its log."""
        with (self.folder / f"rank-{rank}.log").open("a", encoding="utf-8") as file:
            file.write(text.rstrip("\n") + "\n")

    def show_errors(self, rank: int) -> None:
        """Show the last that a worker wrote to stderr: nothing else says why it ended."""
        path = self.folder / f"rank-{rank}.log"
        if rank > 0 and path.is_file():
            _write_all(ERR, path.read_bytes()[-SHOWN_BYTES:])

    def publish(self, run: Path | None) -> Path | None:
        """Copy what there is into a run that is there; returns where, or None where there is none."""
        found = [path for path in sorted(self.folder.iterdir()) if path.stat().st_size]
        if run is None or not run.is_dir() or not found:
            return None
        logs = run / "logs"
        target = next(free for number in count() if not (free := logs / f"attempt-{number}").exists())
        try:
            target.mkdir(parents=True)
            for path in found:
                shutil.copyfile(path, target / path.name)
        except OSError:
            return None  # a disk that is full must not hide why the attempt ended
        return target

    def close(self) -> None:
        """Let go of the files."""
        for _, file in self._shown:
            file.close()
        for handle in self._handles:
            os.close(handle)
        self._shown.clear()
        self._handles.clear()


def keep_trace(run: Path | None, attempt: str, rank: str, error: BaseException) -> Path | None:
    """Add the traceback of this worker to its log, where no process of ours started it; returns the file, or None."""
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


def _write_all(to: int, data: bytes) -> None:
    stream = sys.stdout if to == OUT else sys.stderr
    if stream is None:  # closed from the start: the number may be that of another file by now
        return
    with suppress(OSError, ValueError):  # whoever read our output has left: the workers go on
        stream.flush()
        while data:
            data = data[os.write(to, data) :]
