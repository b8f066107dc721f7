"""Reduces the failures of all workers to one exit code and one cause.

A worker that fails leaves a file for the process that started it. One that merely lost contact with a peer adds no information; one that
was killed leaves no file, but its exit code tells. Torch-free.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from carrywave import errors
from carrywave.errors import ResourceError, UserError
from carrywave.parallel.liveness.failure_file import Cause, FailureKind, folder, leave

__all__ = [
    "FAULT",
    "INTERRUPTED",
    "MISTAKE",
    "RESOURCE",
    "STOPPED",
    "Cause",
    "Ended",
    "FailureKind",
    "WorkerEnds",
    "code_of",
    "ended",
    "folder",
    "leave",
    "read",
    "report_run",
    "run_of",
    "together",
]

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
        """Reduce the ends to one."""
        return ended(self.codes, self.causes, size=size, asked=self.asked, killed=self.killed, silent=self.silent)

    def to_json(self) -> dict[str, Any]:
        """A form that JSON can hold."""
        lists = {"codes": list(self.codes.items()), "killed": sorted(self.killed), "silent": list(self.silent.items())}
        return {**lists, "causes": [asdict(cause) for cause in self.causes.values()], "asked": self.asked}

    @staticmethod
    def of_json(known: Mapping[str, Any]) -> WorkerEnds:
        """The ends that `to_json` describes."""
        causes = {cause["rank"]: Cause(**cause) for cause in known["causes"]}
        return WorkerEnds(dict(known["codes"]), causes, known["asked"], frozenset(known["killed"]), dict(known["silent"]))


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


def ended(
    codes: Mapping[int, int],
    causes: Mapping[int, Cause],
    *,
    size: int,
    asked: int | None,
    killed: Iterable[int],
    silent: Mapping[int, str] | None = None,
) -> Ended:
    """Reduce the ends of all workers to one.

    `codes` are the exit codes of this host's workers by rank, `causes` the failures they left, `asked` the signal forwarded to them,
    `killed` the ranks that the launcher terminated, and `silent` what to report of those that lost their heartbeat or hung.
    """
    for rank, what in (silent or {}).items():
        return Ended(FAULT, f"worker {rank} of {size} {what}", rank=rank, died=True)
    told_of = set(causes) | set(killed)
    wordless = {rank: -code for rank, code in codes.items() if code < 0 and rank not in told_of and -code != asked}
    # A process whose communication fails aborts itself, so SIGABRT may be a consequence; other signals come from outside or are crashes.
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
            what = f"worker {rank} of {size} exited with code {code}; see its output for the reason"
            return Ended(code, what, rank=rank, died=code not in (MISTAKE, RESOURCE))
    if asked is not None and -asked in codes.values() and not told_of - set(causes):
        return Ended(128 + asked)  # the signal killed one worker before its first step, and the others merely lost contact with it
    if causes:
        # A report that names the peer says more than one that does not.
        first = min(causes.values(), key=lambda cause: (cause.peer is None, cause.seconds))
        return Ended(FAULT, first.message, rank=first.rank, died=True, lost=True, peer=first.peer)
    if asked is not None and any(code < 0 for code in codes.values()):
        # Before the first step there is nothing to save; if we killed workers, there was a second signal.
        return Ended(128 + asked, "stopped immediately; progress since the last snapshot is lost" if told_of else "")
    return Ended(next((code for code in (INTERRUPTED, STOPPED) if code in codes.values()), 0))


def _of_cause(first: Cause, told: Sequence[Cause], size: int) -> Ended:
    alike = first.shared or (len({cause.message for cause in told}) == 1 and len(told) == size)
    message = first.message if alike or size == 1 or first.code == INTERRUPTED else f"worker {first.rank}: {first.message}"
    return Ended(first.code, message, first.error, first.trace, rank=first.rank, died=first.kind == "fault")


def _died(rank: int, number: int, size: int) -> Ended:
    remedy = "; if memory ran out, use fewer workers or a smaller batch" if number == signal.SIGKILL else ""
    what = f"worker {rank} of {size} was killed (signal {number}, {signal.Signals(number).name}){remedy}"
    return Ended(FAULT, what, rank=rank, died=True)
