"""Turns a lost connection into one sentence that names the worker, instead of a library's own error text.

torch reports a failed connection as an address and port. Whose it was is found from the workers: whoever ends a step halfway says why in
the rendezvous store, and whoever only lost contact says so too, so that it is not mistaken for the cause; a process on this host that is
gone can be seen.

Where the device carries messages and sums, a neighbour's end shows as a CUDA error, if at all. It is one of lost contact if another worker
of this host is gone, or if a signal was awaited for as long as a message may take; any other CUDA error is this worker's own.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch.distributed as dist

from carrywave.errors import ContactLost
from carrywave.parallel import process_groups
from carrywave.parallel.liveness import device_faults
from carrywave.parallel.startup.process_identity import is_gone
from carrywave.parallel.startup.rendezvous import reason

P = ParamSpec("P")
R = TypeVar("R")

LOOK_SECONDS = 2.0  # to find out who is gone: an exiting process closes its connections slightly before it ends
# Fragments of what torch, gloo and NCCL report when another process is gone or does not answer.
LOSSES = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "timed out waiting",
    "timed out after",
    "timeout waiting for key",
    "wait timeout",
    "socket timeout",
    "failed to recv",
    "application timeout caused pair closure",
    "software caused connection abort",
    "nccl communicator was aborted",
    "remote process exited",
    "watchdog caught collective operation timeout",
)
# How to tell their errors from those of a user's own connections: the source location, and the one message that has none.
THEIRS = re.compile(r"gloo/|\bNCCL\b|ProcessGroup|c10d|^Timeout waiting for key: ")
_JUDGED = "_carrywave_lost"  # attribute of a CUDA error: the `ContactLost` that it stands for, or None; looking again would take as long


class _Reported:
    """What each worker reported about itself at the rendezvous, by rank."""

    workers: Sequence[Mapping[str, Any]] = ()


class _Culprit(NamedTuple):
    """Who ended first, as far as can be seen, and with what error if it told."""

    rank: int | None = None
    why: str = ""


def remember(workers: Sequence[Mapping[str, Any]]) -> None:
    """Keep what the workers reported about themselves, for error messages."""
    _Reported.workers = list(workers)


def reported(rank: int) -> Mapping[str, Any] | None:
    """What a worker reported about itself; None if that is not known."""
    return _Reported.workers[rank] if rank < len(_Reported.workers) else None


def sounds_lost(text: str) -> bool:
    """True if a text only says that another worker is gone."""
    return any(part in text.lower() for part in LOSSES)


def lost(error: BaseException) -> bool:
    """True if an error only says that another worker is gone, so that the cause is reported elsewhere.

    Errors of a user's own connections do not count.
    """
    if isinstance(error, ContactLost | dist.DistNetworkError):
        return True
    if isinstance(error, OSError) or not isinstance(error, RuntimeError):
        return False
    if device_faults.in_use() and device_faults.is_fault(error):
        return _behind(error) is not None
    text = str(error)
    return sounds_lost(text) and (isinstance(error, dist.DistError) or THEIRS.search(text) is not None)


def kept(work: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that a failure from lost contact raises `ContactLost`, after which nothing more is sent."""

    @functools.wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        device_faults.begin()
        try:
            return work(*args, **kwargs)
        except Exception as error:
            failed(error)
            raise

    return run


def failed(error: BaseException) -> None:
    """Work in which others take part has failed: raise `ContactLost` if that is why, after which nothing more is sent."""
    if isinstance(error, Exception) and lost(error):
        process_groups.spoil()
        raise of(error) from None


def of(error: BaseException) -> ContactLost:
    """The `ContactLost` for an error for which `lost` is true."""
    if isinstance(error, ContactLost):
        return error
    if (behind := getattr(error, _JUDGED, None)) is not None:
        assert isinstance(behind, ContactLost)
        return behind
    found = _look(certain=False)
    if found.why:
        return _contact_lost(found.rank, "", f"its step failed with {found.why}")
    address = re.search(r"\[([0-9a-fA-F.:]+)\]:\d+", str(error))
    at = f" at {address[1]}" if found.rank is None and address is not None else ""
    waited = re.search(r"(\d+) ?ms", str(error))
    how = "the connection closed" if waited is None else f"it did not answer for {int(waited[1]) / 1000:g} s"
    return _contact_lost(found.rank, at, how)


def announce_failure(error: BaseException) -> None:
    """Record why this worker ends a step halfway, for the workers that will lose contact with it, and send nothing more."""
    if dist.is_initialized() and not (isinstance(error, Exception) and lost(error)):
        process_groups.spoil()
        _tell(f"{type(error).__name__}: {reason(error)}")


def use_device() -> None:
    """Call this once the device carries messages or sums: from then on, CUDA errors are looked into, also one that nobody catches."""
    if device_faults.in_use():
        return
    device_faults.use()
    before = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Report an error that ends a user's own program, and end it: its memory is not to be torn down."""
        before(kind, error, trace)
        if device_faults.is_fault(error) and lost(error):
            print(f"carrywave: rank {os.environ.get('RANK', '?')}: {of(error)}", file=sys.stderr)
        device_faults.leave_if_in_use(1)

    sys.excepthook = report


def _behind(error: BaseException) -> ContactLost | None:
    """The lost contact that a CUDA error stands for, if it does."""
    if not hasattr(error, _JUDGED):
        setattr(error, _JUDGED, _judged(error))
    contact_lost: ContactLost | None = getattr(error, _JUDGED)
    return contact_lost


def _judged(error: BaseException) -> ContactLost | None:
    found = _look(certain=True)
    if found.rank is not None:
        return _contact_lost(found.rank, "", reason(error))
    limit_seconds = process_groups.seconds()
    if device_faults.is_timeout(error, limit_seconds):
        return ContactLost(
            f"a message between devices did not come within {limit_seconds:g} s, until {time.strftime('%H:%M:%S')}, though no worker of "
            "this host has ended; restart all workers, and if one may take that long, set CARRYWAVE_TIMEOUT_SECONDS"
        )
    return None


def _contact_lost(rank: int | None, at: str, how: str) -> ContactLost:
    worker = None if rank is None else reported(rank)
    on = "" if worker is None else f" on {worker['host']}"
    where = "another worker" if rank is None else f"rank {rank}{on}"
    now = time.strftime("%H:%M:%S")
    return ContactLost(f"contact with {where}{at} was lost at {now} ({how}); see that worker's output, then restart all workers", rank)


def _tell(why: str) -> None:
    """Say in the rendezvous store that this worker has ended a step halfway, and why; nothing if it only lost contact."""
    with suppress(RuntimeError, ValueError):
        dist.distributed_c10d._get_default_store().set(_key(dist.get_rank()), why)


def _key(rank: int) -> str:
    return f"carrywave/ended/{rank}"


def _look(*, certain: bool) -> _Culprit:
    """Who ended first. `certain`: only one whose process is known to have ended, as a worker whose own device failed is a cause, and has
    not lost contact.
    """
    found = [_Culprit()]
    if dist.is_initialized():
        # In a thread, because the store blocks if the link is down.
        thread = threading.Thread(target=_look_around, args=(found, certain), name="carrywave-contact", daemon=True)
        thread.start()
        thread.join(LOOK_SECONDS + 1)
    return found[-1]


def _look_around(found: list[_Culprit], certain: bool) -> None:
    own = dist.get_rank()
    others = [rank for rank in range(dist.get_world_size()) if rank != own]
    if not certain:
        _tell("")
    deadline = time.monotonic() + LOOK_SECONDS
    while time.monotonic() < deadline:
        told: dict[int, str] = {}
        with suppress(RuntimeError, ValueError):  # the store is gone
            store = dist.distributed_c10d._get_default_store()
            told = {rank: store.get(_key(rank)).decode() for rank in others if store.check([_key(rank)])}
        failed = [_Culprit(rank, why) for rank, why in told.items() if why]
        gone = [_Culprit(rank) for rank in others if (worker := reported(rank)) is not None and is_gone(worker)]
        left = [_Culprit(rank) for rank in others if rank not in told]
        suspects = gone if certain else failed or (gone if len(gone) == 1 else left)
        if suspects and (failed or certain or len(suspects) == 1):
            found.append(suspects[0])
            if certain:
                _tell("")
            return
        time.sleep(0.05)
