"""Which run this launch has begun, so that workers that are started again go on with it by themselves.

A launch is what a user started: `--devices`, torchrun, a Slurm job. Its workers may be started several times. The first of them that makes
the folder of a run leaves a note in it, `launch.json`, with the names of the launch and the number of the call (a program may train several
runs); workers of a later attempt look for this note. So `--run DIR` without `--resume` keeps its meaning: a folder that another launch
filled is refused, and one that this launch filled is gone on with. Torch-free.
"""

from __future__ import annotations

import json
import os
import re
import socket
from contextlib import suppress
from pathlib import Path

LAUNCH = "CARRYWAVE_LAUNCH"  # the name of the launch, in workers that `launch.start` started
ATTEMPT = "CARRYWAVE_ATTEMPT"  # which attempt of it, from 0
FEWER = "CARRYWAVE_FEWER"  # set where this attempt has fewer workers than the launch began with
NOTE = "launch.json"
OWNER = "owner.json"  # of `owner`: who trains the run
KEPT = (NOTE, OWNER, "logs")  # of a run that is begun anew


class _Call:
    """The run that this process works on."""

    number = -1  # of the call that trains, from 0
    run: Path | None = None
    training = False  # steps are taken


def next_call() -> None:
    """A call that trains a run begins."""
    _Call.number += 1
    _Call.run = None
    _Call.training = False


def begins_to_train() -> None:
    """What can be refused has been: steps follow."""
    _Call.training = True


def trains() -> bool:
    """Whether the call in hand has begun to train."""
    return _Call.training


def call() -> int:
    """The number of the call in hand, from 0."""
    return _Call.number


def works_on(run: Path) -> None:
    """The run of this call is known."""
    _Call.run = run


def run_in_hand() -> Path | None:
    """The folder of the run that this process works on; None where it is not known yet."""
    return _Call.run


def attempt() -> int:
    """How many times the workers of this launch have been started before, as far as this worker was told."""
    counts = (os.environ.get(name, "") for name in (ATTEMPT, "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return max((int(count) for count in counts if count.isdecimal()), default=0)


def warning() -> str | None:
    """What a user of torchrun should know before a worker dies: nothing in a worker can change it any more."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return (
        f"torchrun may restart workers (--max-restarts {restarts}), and they can hang on what the dead ones left in its store; "
        "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun is started"
    )


def with_fewer() -> bool:
    """Whether the launch goes on with fewer workers than it began with."""
    return FEWER in os.environ


def names() -> list[str]:
    """The names of the launch that started this process; none where a user did so by hand."""
    found = [f"carrywave {os.environ[LAUNCH]}"] if LAUNCH in os.environ else []
    if "TORCHELASTIC_RUN_ID" in os.environ:
        given = os.environ["TORCHELASTIC_RUN_ID"]
        # torchrun's default is the same for all: then the agent is meant, which outlives its workers.
        found.append(f"torchrun {given}" if given not in ("", "none") else f"agent {socket.gethostname()} {os.getppid()}")
    if "SLURM_JOB_ID" in os.environ:
        found.append(f"slurm {os.environ['SLURM_JOB_ID']}")
    return found


def note(run: Path) -> None:
    """Leave the note in a folder that was just made, before anything else is written there."""
    if known := names():
        (run / NOTE).write_text(json.dumps({"launch": known, "call": _Call.number}) + "\n", encoding="utf-8")


def find(run: Path | None, task: str) -> Path | None:
    """The folder that an earlier attempt of this launch made for this call: `run`, or where none was named one of runs/TASK-NUMBER."""
    if run is not None:
        return run if _is_ours(run, names()) else None
    # A job may hold several launches: its name alone does not tell their runs apart.
    own = [name for name in names() if not name.startswith("slurm ")]
    folders = sorted(Path("runs").glob(f"{task}-*"))
    return next((folder for folder in folders if _is_ours(folder, own)), None)


def _is_ours(run: Path, known: list[str]) -> bool:
    try:
        told = json.loads((run / NOTE).read_bytes())
        return told["call"] == _Call.number and any(name in told["launch"] for name in known)
    except (OSError, ValueError, TypeError, KeyError):
        return False


def last_step(run: Path | None) -> int | None:
    """The step of the last snapshot of a run; None where it has none."""
    if run is not None:
        with suppress(OSError, UnicodeDecodeError):
            # Read by the process that starts the workers, which loads neither torch nor the snapshot.
            named = re.match(r"step-(\d+)", (run / "snapshots" / "last").read_text(encoding="utf-8"))
            return None if named is None else int(named[1])
    return None
