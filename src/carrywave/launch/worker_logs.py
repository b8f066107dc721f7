"""Keeps what workers print: rank 0 writes to our own output, every other one to a file, `runs/NAME/logs/attempt-0/rank-1.log`.

To files and not to pipes, so that workers can continue if the process that started them is gone. The run's folder is unknown at the start
and may never be created, so the files are written elsewhere and copied at the end of the attempt, with the traceback of each that failed.
"""

from __future__ import annotations

import shutil
import sys
import traceback
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import count
from pathlib import Path
from typing import IO

SHOWN_BYTES = 4000  # of what a worker printed that reported nothing else


class Outputs:
    """The output of one attempt's workers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)

    def of(self, rank: int) -> AbstractContextManager[IO[bytes] | None]:
        """Where a worker's stdout and stderr go; None: to ours. In append mode, so that what `add` writes does not overwrite anything."""
        return nullcontext() if rank == 0 else self._path(rank).open("ab")

    def add(self, rank: int, text: str) -> None:
        """Append what a worker reported to its log."""
        with self._path(rank).open("a", encoding="utf-8") as file:
            file.write(text.rstrip("\n") + "\n")

    def show_end(self, rank: int) -> None:
        """Show the end of what a worker printed, when nothing else says why it ended."""
        if self._path(rank).is_file():
            with suppress(OSError, ValueError):  # whoever read our output is gone
                print(self._path(rank).read_bytes()[-SHOWN_BYTES:].decode(errors="replace"), file=sys.stderr, end="", flush=True)

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

    def _path(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.log"


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
