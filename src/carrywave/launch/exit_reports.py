"""Why workers ended: each leaves its failure as a file for the process that started them, which then says one cause and not N.

A worker that only lost contact with another tells nothing new; one that was killed cannot tell, and its exit code does. Torch-free.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from carrywave import errors
from carrywave.errors import UserError
from carrywave.parallel.liveness.failure_file import FOLDER, Cause, Kind, folder, leave

__all__ = [
    "FAULT",
    "FOLDER",
    "INTERRUPTED",
    "MISTAKE",
    "STOPPED",
    "Cause",
    "Ended",
    "Kind",
    "ended",
    "folder",
    "leave",
    "read",
    "run_of",
    "tell_run",
]

RUN = "run"  # the file beside them that names the folder of the run
FAULT, MISTAKE, STOPPED, INTERRUPTED = 1, 2, 75, 130  # exit codes


@dataclass(frozen=True)
class Ended:
    """How the workers ended, as one: an exit code, and one line where there is something to say."""

    code: int
    message: str = ""
    error: str = ""
    trace: str = ""
    rank: int | None = field(default=None, compare=False)  # of the worker that failed first, where one did
    died: bool = field(default=False, compare=False)  # of something that may not come again: no mistake, and no end in good order
    logs: Path | None = field(default=None, compare=False)  # the folder with all that the workers said
    lost: bool = field(default=False, compare=False)  # contact with others was, and nothing else is known here
    peer: int | None = field(default=None, compare=False)  # with whom, where that is known

    def check(self) -> None:
        """The failure as the error it was in the worker; nothing where all is well."""
        if self.code == MISTAKE and self.message:
            kind = getattr(errors, self.error, UserError)
            raise kind(self.message)
        if self.code == INTERRUPTED:
            raise KeyboardInterrupt(self.message or "interrupted")
        if self.code not in (0, STOPPED):
            more = "" if self.logs is None else f"; full logs: {self.logs}"
            raise RuntimeError(f"{self.message}{more}\n{self.trace}".rstrip())


def tell_run(path: Path) -> None:
    """Let the process that started this worker know which folder the run has."""
    where = folder()
    if where is not None:
        (where / RUN).write_text(str(path.absolute()), encoding="utf-8")


def run_of(where: Path) -> Path | None:
    """The folder of the run, as a worker told it."""
    file = where / RUN
    return Path(file.read_text(encoding="utf-8")) if file.is_file() else None


def read(where: Path) -> dict[int, Cause]:
    """The failures by rank."""
    found = (Cause(**json.loads(path.read_text(encoding="utf-8"))) for path in where.glob("*.json"))
    return {cause.rank: cause for cause in found}


def ended(
    codes: Mapping[int, int],
    causes: Mapping[int, Cause],
    *,
    size: int,
    asked: int | None,
    killed: Iterable[int],
    silent: Mapping[int, str] | None = None,
) -> Ended:
    """One end for all, from the exit codes of the workers here by rank, what they left, the signal that was passed on to them, whom we
    ended ourselves, and of whom because they gave no sign of life."""
    for rank, what in (silent or {}).items():
        return Ended(FAULT, f"worker {rank} of {size} {what}", rank=rank, died=True)
    told_of = set(causes) | set(killed)
    wordless = {rank: -code for rank, code in codes.items() if code < 0 and rank not in told_of and -code != asked}
    # A process aborts itself when its messages fail, so an abort may be a consequence; other signals come from outside, or are a crash.
    for rank, number in wordless.items():
        if number != signal.SIGABRT:
            return _died(rank, number, size)
    told = sorted((cause for cause in causes.values() if cause.kind != "lost"), key=lambda cause: cause.seconds)
    if told:
        return _of_cause(told[0], told, size)
    for rank, number in wordless.items():
        return _died(rank, number, size)
    for rank, code in codes.items():
        if code > 0 and code not in (STOPPED, INTERRUPTED) and rank not in causes:
            what = f"worker {rank} of {size} ended with exit code {code}; what it printed says why"
            return Ended(code, what, rank=rank, died=code != MISTAKE)
    if asked is not None and -asked in codes.values() and not told_of - set(causes):
        return Ended(128 + asked)  # one was ended by the signal before its first step, and the others only miss it
    if causes:
        # Who names the other says more than who does not.
        first = min(causes.values(), key=lambda cause: (cause.peer is None, cause.seconds))
        return Ended(FAULT, first.message, rank=first.rank, died=True, lost=True, peer=first.peer)
    if asked is not None and any(code < 0 for code in codes.values()):
        # Before the first step there is nothing to write; ended by us means that there was a second signal.
        return Ended(128 + asked, "ended at once; what was done since the last snapshot is lost" if told_of else "")
    return Ended(next((code for code in (INTERRUPTED, STOPPED) if code in codes.values()), 0))


def _of_cause(first: Cause, told: Sequence[Cause], size: int) -> Ended:
    alike = first.shared or (len({cause.message for cause in told}) == 1 and len(told) == size)
    message = first.message if alike or size == 1 or first.code == INTERRUPTED else f"worker {first.rank}: {first.message}"
    return Ended(first.code, message, first.error, first.trace, rank=first.rank, died=first.kind == "fault")


def _died(rank: int, number: int, size: int) -> Ended:
    remedy = "; if memory ran out, use fewer workers or a smaller batch" if number == signal.SIGKILL else ""
    what = f"worker {rank} of {size} was killed (signal {number}, {signal.Signals(number).name}){remedy}"
    return Ended(FAULT, what, rank=rank, died=True)
