"""Records the failure of one worker in a file for the process that started it. Torch-free."""

from __future__ import annotations

import json
import os
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from carrywave.parallel.startup.launcher_env import worker_file

CAUSES = "causes"  # the folder of these files, within that of an attempt

FailureKind = Literal["user", "fault", "lost", "silent"]  # silent: of a peer


@dataclass(frozen=True)
class Cause:
    """The failure of one worker."""

    rank: int
    kind: FailureKind
    code: int
    message: str
    error: str = ""  # class name of the error
    trace: str = ""
    shared: bool = False  # all workers raise it; the message names a rank if one is to be named
    seconds: float = 0.0  # time of the failure, Unix time
    peer: int | None = None  # rank that contact was lost with, if known


def folder() -> Path | None:
    """Where this worker should record its failure; None if nobody would read it."""
    given = worker_file().folder
    return given / CAUSES if given is not None and (given / CAUSES).is_dir() else None


def leave(
    where: Path,
    kind: FailureKind,
    code: int,
    message: str,
    error: BaseException | None = None,
    *,
    with_trace: bool = False,
    peer: int | None = None,
) -> None:
    """Record the failure of this worker for the process that started it."""
    cause = Cause(
        rank=int(os.environ.get("RANK", "0")),
        kind=kind,
        code=code,
        message=message,
        error="" if error is None else type(error).__name__,
        trace="".join(traceback.format_exception(error)) if with_trace and error is not None else "",
        shared=getattr(error, "reported_by", None) is not None,
        seconds=time.time(),
        peer=peer,
    )
    part = where / f"{cause.rank}.part"
    part.write_text(json.dumps(asdict(cause)), encoding="utf-8")
    part.replace(where / f"{cause.rank}.json")
