"""Reduces the failures of all workers to one exit code and one cause.

A worker that fails leaves a file for the process that started it. One that merely lost contact with a peer adds no information; one that
was killed leaves no file, but its exit code tells. Torch-free.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from carrywave import errors
from carrywave.errors import ResourceError, UserError
from carrywave.parallel.liveness.failure_file import Cause, folder
from carrywave.parallel.startup.launcher_env import worker_file

RUN = "run"  # the file beside the failures that holds the path of the run
FAULT, MISTAKE, STOPPED, INTERRUPTED = 1, 2, 75, 130  # exit codes: internal error, user error, orderly stop, Ctrl-C
RESOURCE = 74  # EX_IOERR: the machine lacks disk space, descriptors, memory or a port; the same command may succeed later
FINAL = (MISTAKE, RESOURCE, STOPPED, INTERRUPTED)  # after which starting the workers again would not help


@dataclass(frozen=True)
class Ended:
    """How the workers ended as a group: one exit code, and a one-line message if there is something to report."""

    code: int
    message: str = ""
    error: str = ""  # class name of the error
    trace: str = ""
    rank: int | None = field(default=None, compare=False)  # of the worker that failed first, if one did
    died: bool = field(default=False, compare=False)  # of a cause that may be transient: neither a user error nor an orderly exit
    logs: Path | None = field(default=None, compare=False)  # the folder with everything the workers printed

    def check(self) -> None:
        """Raise the failure, as the worker's own error class if it was a user error; do nothing after success or an orderly stop."""
        if self.code in (MISTAKE, RESOURCE) and self.message:
            raise getattr(errors, self.error, UserError)(self.message)
        if self.code == INTERRUPTED:
            raise KeyboardInterrupt(self.message or "interrupted")
        if self.code not in (0, STOPPED):
            more = "" if self.logs is None else f"; full logs: {self.logs}"
            said = self.message or f"the workers exited with code {self.code} and did not report why"
            raise RuntimeError(f"{said}{more}\n{self.trace}".rstrip())


def ended(codes: Mapping[int, int], causes: Mapping[int, Cause], size: int, asked: int | None = None) -> Ended:
    """Reduce the ends of the workers of this host to one: their exit codes by rank, but for those that were terminated because of others,
    and what they left. `size`: workers in all; `asked`: the signal that was forwarded to them.
    """
    by_time = sorted(causes.values(), key=lambda cause: cause.seconds)
    if silent := [cause for cause in by_time if cause.kind == "silent"]:
        return Ended(FAULT, silent[0].message, rank=silent[0].peer, died=True)
    unexplained = {rank: -code for rank, code in codes.items() if code < 0 and rank not in causes and -code != asked}
    # A process whose communication fails aborts itself, so SIGABRT may follow from it; other signals are crashes or come from outside.
    for rank, number in unexplained.items():
        if number != signal.SIGABRT:
            return _died(rank, number, size)
    reported = [cause for cause in by_time if cause.kind != "lost"]
    if reported:
        first = reported[0]
        alike = first.shared or (len({cause.message for cause in reported}) == 1 and len(reported) == size)
        message = first.message if alike or size == 1 or first.code == INTERRUPTED else f"worker {first.rank}: {first.message}"
        return Ended(first.code, message, first.error, first.trace, rank=first.rank, died=first.kind == "fault")
    for rank, number in unexplained.items():
        return _died(rank, number, size)
    for rank, code in codes.items():
        if code > 0 and code not in (STOPPED, INTERRUPTED) and rank not in causes:
            if code == FAULT and asked == signal.SIGINT:
                return Ended(INTERRUPTED, "interrupted")  # how Python ends if it is interrupted while it starts
            what = f"worker {rank} of {size} exited with code {code}; see its output for the reason"
            return Ended(code, what, rank=rank, died=code not in (MISTAKE, RESOURCE))
    if asked is not None and any(code < 0 for code in codes.values()):
        return Ended(128 + asked)  # before the first step there was nothing to save, and the others merely lost contact
    if by_time:
        first = min(by_time, key=lambda cause: (cause.peer is None, cause.seconds))  # one that names the peer says more
        return Ended(FAULT, first.message, rank=first.peer, died=True)
    return Ended(next((code for code in (INTERRUPTED, STOPPED) if code in codes.values()), 0))


def code_of(error: UserError) -> int:
    """The exit code for an error that is told in one line."""
    return RESOURCE if isinstance(error, ResourceError) else MISTAKE


def told_apart(code: int) -> int:
    """What a worker exits with. torch's agent takes anything but 0 for a failure that another start may mend, so under it a code that is
    final is left in a file.
    """
    told = worker_file()
    if not told.agent or told.folder is None or code not in FINAL:
        return code
    (told.folder / f"{os.environ.get('RANK', '0')}.code").write_text(str(code), encoding="ascii")
    return 0


def codes_told(where: Path) -> dict[int, int]:
    """The codes that workers of torch's agent left, by rank."""
    return {int(path.stem): int(path.read_text(encoding="ascii")) for path in where.glob("*.code")}


def report_run(path: Path) -> None:
    """Report the run's folder to the process that started this worker."""
    where = folder()
    if where is not None:
        (where / RUN).write_text(str(path.absolute()), encoding="utf-8")


def run_of(where: Path) -> Path | None:
    """The run's folder as a worker reported it; None if none did."""
    file = where / RUN
    return Path(file.read_text(encoding="utf-8")) if file.is_file() else None


def read(where: Path) -> dict[int, Cause]:
    """The failures that workers left, by rank."""
    found = (Cause(**json.loads(path.read_text(encoding="utf-8"))) for path in where.glob("*.json"))
    return {cause.rank: cause for cause in found}


def _died(rank: int, number: int, size: int) -> Ended:
    remedy = "; if memory ran out, use fewer workers or a smaller batch" if number == signal.SIGKILL else ""
    what = f"worker {rank} of {size} was killed (signal {number}, {signal.Signals(number).name}){remedy}"
    return Ended(FAULT, what, rank=rank, died=True)
