"""Where a run may be: which folders are free for a new one, by name and by what is in them, and why others are not."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

from carrywave.data.files.remote import check_local
from carrywave.errors import RunError, from_system, option, remedy_for
from carrywave.launch import launch_record
from carrywave.runs import owner
from carrywave.runs.checkpoint import atomic_files
from carrywave.runs.checkpoint.snapshot import NONE_YET, POINTER
from carrywave.runs.history import HISTORY
from carrywave.runs.tracking import EVENTS
from carrywave.runs.tracking import FOLDER as TRACKING

METRICS, TIMING, SNAPSHOTS, WEIGHTS = "metrics.jsonl", "timing.jsonl", "snapshots", "weights.safetensors"
LINEAR = "linear.safetensors"  # the part of a model that is fitted before the network is trained
BANDS = "bands.json"  # how far bands reach around forecasts, which is measured when training ends
MADE = (
    METRICS,
    TIMING,
    HISTORY,
    EVENTS,
    TRACKING,
    "spec.yaml",
    "plan.json",
    "codec.json",
    "facts.json",
    LINEAR,
    BANDS,
    SNAPSHOTS,
    launch_record.NOTE,
)  # everything a run writes, except its weights, logs and owner file; without spec.yaml, what follows it is no run
BEGINNING = ("spec.yaml", "plan.json", "codec.json", "facts.json", LINEAR, SNAPSHOTS)  # what a run without a snapshot is started over from
INITIAL = (
    "plan.json",
    "codec.json",
    "facts.json",
    LINEAR,
    HISTORY,
    *launch_record.KEPT,
    *owner.FILES,
)  # with snapshots/.none-yet, all that precedes spec.yaml


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
        if missing:
            path.mkdir(parents=True, exist_ok=True)
        elif not os.access(path, os.W_OK | os.X_OK):
            number = errno.EROFS if os.statvfs(path).f_flag & os.ST_RDONLY else errno.EACCES
            raise OSError(number, os.strerror(number))
    except OSError as error:
        dangling = next((folder for folder in missing if folder.is_symlink()), None)
        if dangling is not None:
            fact = f"{dangling} is a link to {os.readlink(dangling)}, which does not exist"
            raise RunError(f"the run's folder {path} cannot be created: {fact}; create it, or use another {option('run')}") from error
        remedy = remedy_for(error, f"use another {option('run')}")
        raise from_system(error, RunError)(f"the run's folder {path} cannot be created: {error.strerror or error}; {remedy}") from error
    finally:
        remove_empty(missing)


def refuse_occupied(path: Path) -> None:
    """Refuse a folder in which something is, with the remedy for what it is."""
    if path.exists() and not path.is_dir():
        raise RunError(f"{path} is a file, but a run must be a folder; use another {option('run')}")
    if not path.is_dir() or all(entry.name in owner.FILES for entry in path.iterdir()):
        return
    owner.refuse_held(path)
    if owner.read(path) is not None and never_began(path):
        return  # whoever takes the folder still has to become its owner
    if (path / "spec.yaml").is_file() and not (path / "snapshots" / POINTER).is_file():
        may_restart = (path / "snapshots" / NONE_YET).is_file()
        remedy = f"use {option('resume')} to start it over" if may_restart else "remove the folder"
        raise RunError(f"{path} contains a run that ended before its first snapshot; {remedy}, or use another {option('run')}")
    raise RunError(f"{path} already exists and is not empty; use {option('resume')} to continue it, or use another {option('run')}")


def never_began(path: Path) -> bool:
    """True if a folder is empty, or has only what a process writes before a run's spec.yaml, the last of its initial files.

    A process that was killed at its start leaves that: nothing in it was trained, so a new run may take its place.
    """
    return all(
        entry.name in INITIAL or is_draft(entry) or (entry.name == SNAPSHOTS and entry.is_dir() and _is_unused(entry))
        for entry in path.iterdir()
    )


def clear(path: Path, *, start_over: bool) -> None:
    """Remove what an earlier attempt wrote, except for its history, and nothing else from the folder.

    A run that is started over keeps what that takes until it is replaced, as the process may be killed before.
    """
    kept = (*launch_record.KEPT, *owner.FILES, HISTORY, *(BEGINNING if start_over else ()))
    made = [path / name for name in (WEIGHTS, *MADE) if name not in kept]
    if start_over and (path / SNAPSHOTS).is_dir():
        made += [entry for entry in (path / SNAPSHOTS).iterdir() if entry.name != NONE_YET]
    for entry in made:
        atomic_files.remove(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink(missing_ok=True)


def _is_unused(snapshots: Path) -> bool:
    return all(entry.name == NONE_YET or is_draft(entry) for entry in snapshots.iterdir())


def is_draft(entry: Path) -> bool:
    """True for a file that was being written."""
    return entry.name.startswith(".") and entry.suffix == ".tmp"


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove folders, innermost first, as far as they are empty."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()
