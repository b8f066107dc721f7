"""`history.jsonl`: when a run was started, went back and ended. It depends on the clock, and is not truncated on resume: steps that were
computed twice are part of a run's history. Torch-free.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HISTORY = "history.jsonl"
STOPPED = ("interrupted", "terminated")  # endings of a process, not of the run
TAIL_BYTES = 1 << 16  # of a log: enough for its last line


@dataclass(frozen=True)
class Trace:
    """How far an earlier process got, before the logs are truncated to its snapshot."""

    step: int
    time: float | None  # UNIX time of its last line; None: not known


def last_trace(timing: Path) -> Trace | None:
    """The last line of timing.jsonl; None if there is none that can be read."""
    if not timing.is_file():  # nothing, or something that would block a reader
        return None
    try:
        with timing.open("rb") as file:
            file.seek(max(0, timing.stat().st_size - TAIL_BYTES))
            for line in reversed(file.read().splitlines()):
                row = json.loads(line)
                when = row.get("time")
                return Trace(int(row["step"]), float(when) if when is not None else None)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return None


def unended(folder: Path) -> bool:
    """True if the process that was started last recorded no end of the run: it was killed, it failed, or it was asked to stop."""
    if not (folder / HISTORY).is_file():
        return False
    try:
        lines = (folder / HISTORY).read_text().splitlines(keepends=True)
        rows = [json.loads(line) for line in lines if line.endswith("\n")]  # a power cut may tear the last one
        last = next((row for row in reversed(rows) if row["event"] in ("start", "end")), {"event": "end"})
        return last["event"] == "start" or last.get("ending") in STOPPED
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False


def drop_torn(folder: Path) -> None:
    """Cut off a last line without its end: the next one must not be joined to it."""
    path = folder / HISTORY
    if path.is_file() and (data := path.read_bytes()) and not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)


def start_row(step: int, before: Trace | None, *, attempt: int, workers: int, device: str, versions: Mapping[str, str]) -> dict[str, Any]:
    """The line that says that training starts at `step`; `before` is what a process before this one left."""
    row: dict[str, Any] = {"event": "start", "time": time.time(), "step": step, "attempt": attempt, "workers": workers, "device": device}
    row |= dict(versions) | {"python": platform.python_version(), "machine": platform.machine()}
    return row if before is None else row | {"reached": before.step, "last_seen": before.time}


def back_row(step: int, reached: int) -> dict[str, Any]:
    """The line that says that a run went back from a non-finite step to its last snapshot."""
    return {"event": "back", "time": time.time(), "step": step, "reached": reached}


def end_row(step: int, ending: str) -> dict[str, Any]:
    """The line that says that training ended in order: done, stopped early, or asked to stop."""
    return {"event": "end", "time": time.time(), "step": step, "ending": ending}
