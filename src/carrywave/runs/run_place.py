"""Where a run may be: which folders are free for a new one, by name and by what is in them, and why others are not."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

from carrywave.errors import RunError, option
from carrywave.runs import owner
from carrywave.runs.checkpoint.snapshot import NONE_YET, POINTER


def free_place(task: str) -> Path:
    """runs/TASK-NUMBER with the first number that is free."""
    return next(free for number in count(1) if not (free := Path("runs") / f"{task}-{number}").exists())


def check_name(path: Path) -> None:
    """Require a UTF-8 name: it goes into JSON, to other workers and to TensorBoard."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise RunError(f"the folder name {path} is not valid UTF-8; use another {option('run')}, or rename the folder") from None


def refuse_occupied(path: Path) -> None:
    """Refuse a folder in which something is, with the remedy for what it is."""
    if path.exists() and not path.is_dir():
        raise RunError(f"{path} is a file, but a run must be a folder; use another {option('run')}")
    # A process killed at its start may have left only its owner file.
    if not path.is_dir() or all(entry.name == owner.FILE for entry in path.iterdir()):
        return
    there = owner.read(path)
    if there is not None and not owner.is_gone(there, owner.this_process()):
        raise RunError(f"{path} is being trained by {there}; use another {option('run')}")
    if (path / "spec.yaml").is_file() and not (path / "snapshots" / POINTER).is_file():
        known = (path / "snapshots" / NONE_YET).is_file()
        remedy = f"use {option('resume')} to start it over" if known else "remove the folder"
        raise RunError(f"{path} contains a run that ended before its first snapshot; {remedy}, or use another {option('run')}")
    raise RunError(f"{path} already exists and is not empty; use {option('resume')} to continue it, or use another {option('run')}")


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove folders, innermost first, as far as they are empty."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()
