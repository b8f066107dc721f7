"""TensorBoard's events of a run: its floats, by split and name. The folder is created at the first of them."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

MOST_ROWS = 10_000  # kept where there is no room for them; metrics.jsonl has them all

Row = Mapping[str, float | int | str | bool | None]


class EventLog:
    """The events in one folder. Rows are kept until they are flushed: after a failure, all of them go to a new file at the next flush."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._failure: OSError | None = None  # of the last attempt to write
        self._writer: SummaryWriter | None = None
        self._purge_step: int | None = None
        self._rows: deque[Row] = deque(maxlen=MOST_ROWS)  # not flushed yet

    def add(self, row: Row) -> OSError | None:
        """Add the floats of a row, which also has `split` and `step`; returns why that failed."""
        self._rows.append(dict(row))
        return self._failure or self._try(lambda: self._write([self._rows[-1]]))

    def purge(self, after: int | None) -> None:
        """Have TensorBoard discard what came after this step, once there is more; None: nothing."""
        self._purge_step = None if after is None else after + 1
        self._rows.clear()

    def flush(self) -> OSError | None:
        """Write out what was added so far; returns why that failed."""

        def flush() -> None:
            if self._failure is not None:
                self._write(self._rows)
            if self._writer is not None:
                self._writer.flush()
                self._rows.clear()
                self._purge_step = None

        return self._try(flush)

    def close(self) -> OSError | None:
        """Close the file; a later row opens another. Returns why that failed."""
        why = self.flush()
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()
        return why

    def _write(self, rows: Iterable[Row]) -> None:
        writer = self._open()
        for row in rows:
            for key, value in row.items():
                if isinstance(value, float):
                    writer.add_scalar(f"{row['split']}/{key}", value, row["step"])

    def _try(self, work: Callable[[], None]) -> OSError | None:
        try:
            work()
        except OSError as error:
            self._failure = error
            writer, self._writer = self._writer, None
            if writer is not None:
                with suppress(OSError):
                    writer.close()
            return error
        self._failure = None
        return None

    def _open(self) -> SummaryWriter:
        if self._writer is None:
            with warnings.catch_warnings():
                # TensorBoard's imports emit warnings that a user can do nothing about.
                warnings.simplefilter("ignore")
                from torch.utils.tensorboard import SummaryWriter

                _hush()
                self._writer = SummaryWriter(str(self.folder), purge_step=self._purge_step)
        return self._writer


def _hush() -> None:
    """Suppress tracebacks of disk errors in TensorBoard's thread: the same error is raised, and reported, at the next write."""
    before = threading.excepthook
    if getattr(before, "hushes_events", False):
        return

    def hook(failed: threading.ExceptHookArgs, /) -> None:
        writes_events = type(failed.thread).__module__ == "tensorboard.summary.writer.event_file_writer"
        if not writes_events or not issubclass(failed.exc_type, OSError):
            before(failed)

    hook.hushes_events = True  # type: ignore[attr-defined]
    threading.excepthook = hook
