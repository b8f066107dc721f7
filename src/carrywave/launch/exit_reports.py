"""Reduces the failures of all workers to one exit code and one cause.

A worker that fails leaves a file for the process that started it. One that merely lost contact with a peer adds no information; one that
was killed leaves no file, but its exit code tells. Torch-free.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from carrywave import errors
from carrywave.errors import ResourceError, UserError
from carrywave.parallel.liveness.failure_file import Cause, folder

RUN = "run"  # the file beside the failures that holds the path of the run
FAULT, MISTAKE, STOPPED, INTERRUPTED = 1, 2, 75, 130  # exit codes: internal error, user error, orderly stop, Ctrl-C
RESOURCE = 74  # EX_IOERR: the machine lacks disk space, descriptors, memory or a port; the same command may succeed later


@dataclass(frozen=True)
class Ended:
    """How the workers ended as a group: one exit code, and a one-line message if there is something to report."""

    code: int
    message: str = ""
    error: str = ""
    trace: str = ""
    rank: int | None = field(default=None, compare=False)  # of the worker that failed first, if one did
    died: bool = field(default=False, compare=False)  # of a cause that may be transient: neither a user error nor an orderly exit
    logs: Path | None = field(default=None, compare=False)  # the folder with everything the workers printed
    lost: bool = field(default=False, compare=False)  # contact with a peer was lost, and nothing else is known here
    peer: int | None = field(default=None, compare=False)  # the rank of that peer, if known

    def check(self) -> None:
        """Raise the failure, as the worker's own error class if it was a user error; do nothing after success or an orderly stop."""
        if self.code in (MISTAKE, RESOURCE) and self.message:
            kind = getattr(errors, self.error, UserError)
            raise kind(self.message)
        if self.code == INTERRUPTED:
            raise KeyboardInterrupt(self.message or "interrupted")
        if self.code not in (0, STOPPED):
            more = "" if self.logs is None else f"; full logs: {self.logs}"
            said = self.message or f"the workers exited with code {self.code} and did not report why"
            raise RuntimeError(f"{said}{more}\n{self.trace}".rstrip())


@dataclass(frozen=True)
class WorkerEnds:
    """How each of the workers of one host, or of several, ended; those that were terminated because of others are left out."""

    codes: Mapping[int, int]  # exit codes by rank
    causes: Mapping[int, Cause]  # what they left
    asked: int | None = None  # the signal that was forwarded to them
    killed: frozenset[int] = frozenset()  # those that their launcher terminated
    silent: Mapping[int, str] = field(default_factory=dict)  # what to report of those that lost their heartbeat or hung

    def ended(self, size: int) -> Ended:
        """Reduce the ends of all workers to one."""
        for rank, what in self.silent.items():
            return Ended(FAULT, f"worker {rank} of {size} {what}", rank=rank, died=True)
        accounted = set(self.causes) | self.killed
        unexplained = {rank: -code for rank, code in self.codes.items() if code < 0 and rank not in accounted and -code != self.asked}
        # A process whose communication fails aborts itself, so SIGABRT may follow from it; other signals are crashes or come from outside.
        for rank, number in unexplained.items():
            if number != signal.SIGABRT:
                return _died(rank, number, size)
        reported = sorted((cause for cause in self.causes.values() if cause.kind != "lost"), key=lambda cause: cause.seconds)
        if reported:
            return _of_cause(reported[0], reported, size)
        for rank, number in unexplained.items():
            return _died(rank, number, size)
        for rank, code in self.codes.items():
            if code > 0 and code not in (STOPPED, INTERRUPTED) and rank not in self.causes:
                if code == FAULT and self.asked == signal.SIGINT:
                    return Ended(INTERRUPTED, "interrupted")  # how Python ends if it is interrupted while it starts
                what = f"worker {rank} of {size} exited with code {code}; see its output for the reason"
                return Ended(code, what, rank=rank, died=code not in (MISTAKE, RESOURCE))
        if self.asked is not None and -self.asked in self.codes.values() and not accounted - set(self.causes):
            return Ended(128 + self.asked)  # the signal killed one worker before its first step, and the others merely lost contact with it
        if self.causes:
            # A report that names the peer says more than one that does not.
            first = min(self.causes.values(), key=lambda cause: (cause.peer is None, cause.seconds))
            return Ended(FAULT, first.message, rank=first.rank, died=True, lost=True, peer=first.peer)
        if self.asked is not None and any(code < 0 for code in self.codes.values()):
            # Before the first step there is nothing to save; if we killed workers, there was a second signal.
            return Ended(128 + self.asked, "stopped immediately; progress since the last snapshot is lost" if accounted else "")
        return Ended(next((code for code in (INTERRUPTED, STOPPED) if code in self.codes.values()), 0))


def together(parts: Iterable[WorkerEnds]) -> WorkerEnds:
    """The ends of the workers of several hosts as those of one."""
    parts = list(parts)
    return WorkerEnds(
        {rank: code for part in parts for rank, code in part.codes.items()},
        {rank: cause for part in parts for rank, cause in part.causes.items()},
        next((part.asked for part in parts if part.asked is not None), None),
        frozenset(rank for part in parts for rank in part.killed),
        {rank: what for part in parts for rank, what in part.silent.items()},
    )


def code_of(error: UserError) -> int:
    """The exit code for an error that is told in one line."""
    return RESOURCE if isinstance(error, ResourceError) else MISTAKE


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


def _of_cause(first: Cause, reported: Sequence[Cause], size: int) -> Ended:
    alike = first.shared or (len({cause.message for cause in reported}) == 1 and len(reported) == size)
    message = first.message if alike or size == 1 or first.code == INTERRUPTED else f"worker {first.rank}: {first.message}"
    return Ended(first.code, message, first.error, first.trace, rank=first.rank, died=first.kind == "fault")


def _died(rank: int, number: int, size: int) -> Ended:
    remedy = "; if memory ran out, use fewer workers or a smaller batch" if number == signal.SIGKILL else ""
    what = f"worker {rank} of {size} was killed (signal {number}, {signal.Signals(number).name}){remedy}"
    return Ended(FAULT, what, rank=rank, died=True)
