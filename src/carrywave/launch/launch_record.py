"""Identifies the run that a launch created, so that restarted workers resume it by themselves.

A launch is what a user started: `--devices`, torchrun, an engine. Its workers may be started several times. The first worker to create a
run's folder leaves a note in it, `launch.json`, with the names of the launch and the number of the call (one program may train several
runs); workers of a later attempt look for that note. So `--run DIR` without `--resume` keeps its meaning: a folder written by another
launch is refused, and one written by this launch is resumed. Torch-free.
"""

from __future__ import annotations

import json
import os
import re
import socket
from contextlib import suppress
from pathlib import Path

from carrywave.parallel.startup.launcher_env import worker_file

NOTE = "launch.json"
OWNER = "owner.json"  # written by `runs.owner`: the process that trains the run
KEPT = (NOTE, OWNER, "logs")  # what remains when a run is started over


class _Call:
    """The training call in progress in this process, and its run."""

    number = -1  # index of the call, from 0
    run: Path | None = None
    training = False  # the training loop has started


def next_call() -> None:
    """Record that a training call starts."""
    _Call.number += 1
    _Call.run = None
    _Call.training = False


def begins_to_train() -> None:
    """Record that the training loop starts: everything that could be refused has been checked."""
    _Call.training = True


def trains() -> bool:
    """True if the current call has started its training loop."""
    return _Call.training


def call() -> int:
    """The index of the current call, from 0."""
    return _Call.number


def set_run(run: Path) -> None:
    """Record the run of the current call."""
    _Call.run = run


def current_run() -> Path | None:
    """The folder of the current call's run; None if it is not known yet."""
    return _Call.run


def attempt() -> int:
    """How many times the workers of this launch have been restarted, as far as they are told."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return max(worker_file().attempt, int(count) if count.isdecimal() else 0)


def warning() -> str | None:
    """A warning to give torchrun's users up front, since no worker can change this setting later; None if it does not apply."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    remedy = "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of torchrun"
    if os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1":  # without effect on torchrun's default, a static rendezvous
        remedy = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 acts only with --standalone or --rdzv-backend c10d; pass one of them"
    return f"torchrun may restart workers (--max-restarts {restarts}), which can then hang on stale entries in its store; {remedy}"


def with_fewer() -> bool:
    """True if the launch continues with fewer workers than it started with."""
    return worker_file().fewer


def names() -> list[str]:
    """The names that identify the launch of this process; empty if a user started it by hand."""
    if launch := worker_file().launch:
        return [f"carrywave {launch}"]
    given = os.environ.get("TORCHELASTIC_RUN_ID")
    if given is None:
        return []
    # torchrun's default id is the same for every job; then the agent, which outlives its workers, identifies the launch.
    return [f"torchrun {given}" if given not in ("", "none") else f"agent {socket.gethostname()} {os.getppid()}"]


def note(run: Path) -> None:
    """Write the note into a folder that was just created, before anything else is written there."""
    if known := names():
        (run / NOTE).write_text(json.dumps({"launch": known, "call": _Call.number}) + "\n", encoding="utf-8")


def find(run: Path | None, task: str) -> Path | None:
    """The folder that an earlier attempt of this launch created for this call: `run`, or if that is None one of runs/TASK-NUMBER."""
    folders = sorted(Path("runs").glob(f"{task}-*")) if run is None else [run]
    return next((folder for folder in folders if _is_ours(folder)), None)


def _is_ours(run: Path) -> bool:
    if not (run / NOTE).is_file():  # nothing, or something that would block a reader
        return False
    try:
        note_read = json.loads((run / NOTE).read_bytes())
        return note_read["call"] == _Call.number and any(name in note_read["launch"] for name in names())
    except (OSError, ValueError, TypeError, KeyError):
        return False


def last_step(run: Path | None) -> int | None:
    """The step of a run's last snapshot; None if it has none."""
    with suppress(OSError, UnicodeDecodeError):
        # Read from the `last` pointer because the launcher, which calls this, loads neither torch nor snapshots.
        if run is not None and (last := run / "snapshots" / "last").is_file():
            named = re.match(r"step-(\d+)", last.read_text(encoding="utf-8"))
            return None if named is None else int(named[1])
    return None
