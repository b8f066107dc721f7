"""Where a run may be: which folders are free for a new one, and why others are not.

A run without a snapshot begins anew: nothing in its folder is needed that would not be made again.
"""

from __future__ import annotations

import errno
import os
import shutil
from itertools import count
from pathlib import Path

from carrywave.data.files.remote import check_local
from carrywave.errors import RunError, from_system, option, remedy_for
from carrywave.launch import launch_record
from carrywave.runs import owner
from carrywave.runs.checkpoint.snapshot import has_snapshot
from carrywave.runs.tracking import EVENTS
from carrywave.runs.tracking import FOLDER as TRACKING

METRICS, TIMING, HISTORY, SNAPSHOTS, WEIGHTS = "metrics.jsonl", "timing.jsonl", "history.jsonl", "snapshots", "weights.safetensors"
LINEAR = "linear.safetensors"  # the part of a model that is fitted before the network is trained
BANDS = "bands.json"  # how far bands reach around forecasts, which is measured when training ends
MADE = (METRICS, TIMING, HISTORY, SNAPSHOTS, LINEAR, BANDS, EVENTS, TRACKING, "spec.yaml", "plan.json", "codec.json", "facts.json")
KEPT = (*launch_record.KEPT, *owner.FILES)  # by a run that begins anew


def free_place(task: str) -> Path:
    """runs/TASK-NUMBER with the first number that is free."""
    return next(free for number in count(1) if not (free := Path("runs") / f"{task}-{number}").exists())


def check_name(path: Path) -> None:
    """Require a UTF-8 name: it goes into JSON, to other workers and to TensorBoard."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise RunError(f"the folder name {path} is not valid UTF-8; use another {option('run')}, or rename the folder") from None


def check_place(path: Path) -> None:
    """Refuse a folder that cannot be created, before the work: it is created and removed again."""
    check_local(path, RunError)
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            number = errno.EROFS if os.statvfs(path).f_flag & os.ST_RDONLY else errno.EACCES
            raise OSError(number, os.strerror(number))
        for folder in missing:
            folder.rmdir()
    except OSError as error:
        remedy = remedy_for(error, f"use another {option('run')}")
        raise from_system(error, RunError)(f"the run's folder {path} cannot be created: {error.strerror or error}; {remedy}") from error


def refuse_occupied(path: Path) -> None:
    """Refuse a folder that is not free for a new run."""
    if path.exists() and not path.is_dir():
        raise RunError(f"{path} is a file, but a run must be a folder; use another {option('run')}")
    if path.is_dir():
        owner.refuse_held(path)
        if not begins_anew(path):
            raise RunError(f"{path} already exists and is not empty; use {option('resume')} to continue it, or use another {option('run')}")


def begins_anew(path: Path) -> bool:
    """True if a folder holds nothing but what a run writes before its first snapshot and its first weights."""
    names = {entry.name for entry in path.iterdir() if not is_draft(entry)}
    return names <= {*MADE, *KEPT} and not has_snapshot(path / SNAPSHOTS)


def clear(path: Path) -> None:
    """Remove what an earlier attempt wrote."""
    for entry in (path / name for name in (WEIGHTS, *MADE)):
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink(missing_ok=True)


def is_draft(entry: Path) -> bool:
    """True for a file that was being written."""
    return entry.name.startswith(".") and entry.suffix == ".tmp"
