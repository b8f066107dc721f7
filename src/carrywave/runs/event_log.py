"""TensorBoard's events of a run: its floats, by split and name. The folder is created at the first of them."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class EventLog:
    """The events in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer: SummaryWriter | None = None
        self._purge_step: int | None = None

    def add(self, row: Mapping[str, float | int | str | bool | None]) -> None:
        """Add the floats of a row, which also has `split` and `step`."""
        writer, step = self._open(), row["step"]
        for key, value in row.items():
            if isinstance(value, float):
                writer.add_scalar(f"{row['split']}/{key}", value, step)

    def purge(self, after: int | None) -> None:
        """Have TensorBoard discard what came after this step, once there is more; None: nothing."""
        self._purge_step = None if after is None else after + 1

    def flush(self) -> None:
        """Write out what was added so far."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Close the file; a later row opens another."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()

    def _open(self) -> SummaryWriter:
        if self._writer is None:
            with warnings.catch_warnings():
                # TensorBoard's imports emit warnings that a user can do nothing about.
                warnings.simplefilter("ignore")
                from torch.utils.tensorboard import SummaryWriter

                _hush()
                self._writer = SummaryWriter(str(self.folder), purge_step=self._purge_step)
                self._purge_step = None
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
