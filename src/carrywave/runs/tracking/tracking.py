"""Copies metrics.jsonl of a run to trackers, each in a thread of its own: a slow or broken one neither delays the run nor ends it.

What was copied is noted in the run's folder, so that a resumed run continues the same record where it left off: rows that were written but
not copied are copied then; rows that a resume takes back and writes again are copied again, with the same values.
"""

from __future__ import annotations

import importlib.util
import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from carrywave.errors import SpecError, one_line
from carrywave.runs.checkpoint import atomic_files
from carrywave.runs.tracking.mlflow_tracker import MlflowTracker
from carrywave.runs.tracking.tracker import Description, How, NotFound, Row, Tracker
from carrywave.runs.tracking.wandb_tracker import WandbTracker

FOLDER = "tracking"  # within the run's
TRACKERS: dict[str, Callable[[Description], Tracker]] = {"mlflow": MlflowTracker, "wandb": WandbTracker}
CLOSE_SECONDS = 60.0  # that the end of a run waits for trackers, of which some take long to begin
MOST_ROWS = 1000  # at once

Say = Callable[[str], None]


def check_installed(wanted: Sequence[str]) -> None:
    """Refuse a tracker whose package is missing, before anything is trained."""
    for name in wanted:
        if importlib.util.find_spec(name) is None:
            raise SpecError(f"train.track lists {name}, which is not installed; install it with: pip install 'carrywave[{name}]'")


class Tracking:
    """The trackers of one run; without any, all of this does nothing."""

    def __init__(self, trackers: dict[str, Tracker], metrics: Path, say: Say) -> None:
        self._copies = [_Copy(name, tracker, metrics) for name, tracker in trackers.items()]
        self._say = say
        self._announced: set[str] = set()
        self.how: How = "finished"  # how the run ended

    @staticmethod
    def of(wanted: Sequence[str], described: Description, metrics: Path, say: Say) -> Tracking:
        """The trackers that a spec asks for."""
        return Tracking({name: TRACKERS[name](described) for name in dict.fromkeys(wanted)}, metrics, say)

    def wake(self) -> None:
        """There are new rows."""
        for copy in self._copies:
            copy.wake()
        self._tell()

    def cut_back(self, num_bytes: int) -> None:
        """The file was truncated to this size."""
        for copy in self._copies:
            copy.cut_back(num_bytes)

    def __enter__(self) -> Self:
        for copy in self._copies:
            copy.begin()
        self.wake()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        how: How = self.how if error is None else "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
        for copy in self._copies:
            copy.end(how)
        deadline = time.monotonic() + CLOSE_SECONDS
        for copy in self._copies:
            copy.thread.join(max(0.0, deadline - time.monotonic()))
            if copy.thread.is_alive():
                copy.failure = copy.failure or f"it did not take the last rows within {CLOSE_SECONDS:g} seconds"
        self._tell()

    def _tell(self) -> None:
        """Say, once, that a tracker is not getting what it should."""
        for copy in self._copies:
            if copy.failure is not None and copy.name not in self._announced:
                self._announced.add(copy.name)
                self._say(f"{copy.name} no longer records this run: {copy.failure}; training goes on, and metrics.jsonl has every row")


class _Copy:
    """What one tracker has of the file."""

    def __init__(self, name: str, tracker: Tracker, metrics: Path) -> None:
        self.name, self.tracker, self.metrics = name, tracker, metrics
        self.failure: str | None = None
        self.thread = threading.Thread(target=self._run, name=f"carrywave-{name}", daemon=True)
        self._note = metrics.parent / FOLDER / f"{name}.json"
        self._news = threading.Condition()
        self._awake = False
        self._cut_bytes: int | None = None
        self._how: How | None = None
        self._earlier_id: str | None = None
        self._id, self._done_bytes = "", 0

    def begin(self) -> None:
        # Before the run writes anything: where the file ends now is where a resumed run begins to write.
        self._earlier_id, self._done_bytes = self._read_note()
        self.thread.start()

    def wake(self) -> None:
        with self._news:
            self._awake = True
            self._news.notify()

    def cut_back(self, num_bytes: int) -> None:
        with self._news:
            self._cut_bytes = num_bytes if self._cut_bytes is None else min(self._cut_bytes, num_bytes)

    def end(self, how: How) -> None:
        with self._news:
            self._how = how
            self._news.notify()

    def _run(self) -> None:
        try:
            self._open()
            while (how := self._copy_new()) is None:
                pass
            self.tracker.close(how)
        except BaseException as error:  # even sys.exit: whatever goes wrong in somebody else's package is no reason to end the run
            line = one_line(error)
            self.failure = f"{type(error).__name__}: {line}" if line else type(error).__name__

    def _open(self) -> None:
        try:
            self._id = self.tracker.open(self._earlier_id)
        except NotFound:
            self._id, self._done_bytes = self.tracker.open(None), 0
        self._write_note()

    def _copy_new(self) -> How | None:
        """Wait for news, and copy what is new; returns how the run ended, once it has and all is copied."""
        with self._news:
            self._news.wait_for(lambda: self._awake or self._how is not None)
            how, self._awake = self._how, False
            if self._cut_bytes is not None:
                self._done_bytes, self._cut_bytes = min(self._done_bytes, self._cut_bytes), None
        while (new := self._next_rows())[0]:
            rows, end_bytes = new
            self.tracker.send(rows)
            self._done_bytes = end_bytes
            self._write_note()
        return how

    def _next_rows(self) -> tuple[list[Row], int]:
        """Rows that were not copied yet, and where they end. A line that is still being written is left for later."""
        rows: list[Row] = []
        end_bytes = self._done_bytes
        if not self.metrics.is_file():
            return rows, end_bytes
        with self.metrics.open("rb") as file:
            file.seek(end_bytes)
            for line in file:
                if not line.endswith(b"\n") or len(rows) == MOST_ROWS:
                    break
                rows.append(json.loads(line))
                end_bytes += len(line)
        return rows, end_bytes

    def _read_note(self) -> tuple[str | None, int]:
        try:
            note: Any = json.loads(self._note.read_bytes())
            size = self.metrics.stat().st_size if self.metrics.is_file() else 0
            return str(note["id"]), min(int(note["bytes"]), size)
        except (OSError, ValueError, TypeError, KeyError):
            return None, 0

    def _write_note(self) -> None:
        self._note.parent.mkdir(exist_ok=True)
        atomic_files.write_bytes(self._note, json.dumps({"id": self._id, "bytes": self._done_bytes}).encode())
