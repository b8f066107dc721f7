"""Turns a lost connection into one sentence that names the worker, instead of a library's own error text.

torch reports a failed connection as an address and port. Whose it was is found from the workers: a process on this host that is gone can be
detected, and a worker that lost contact itself says so in the rendezvous store, so that it is not mistaken for the cause.

Where the device carries messages and sums, a neighbour's end shows as a CUDA error, if at all. It is one of lost contact if another worker
of this host is gone, or if a signal was awaited for as long as a message may take; any other CUDA error is this worker's own.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

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


class _Reported:
    """What each worker reported about itself at the rendezvous, by rank."""

    workers: Sequence[Mapping[str, Any]] = ()


_BROKEN = "carrywave/broken"  # in the rendezvous store: why workers ended a step halfway, in order
_JUDGED = "_carrywave_lost"  # attribute of a CUDA error: the `ContactLost` that it stands for, or None; looking again would take as long


def remember(workers: Sequence[Mapping[str, Any]]) -> None:
    """Keep what the workers reported about themselves, for error messages."""
    _Reported.workers = list(workers)


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
    """Decorate a function so that a failure from lost contact raises `ContactLost`.

    After any failure, messages that nobody receives may be in flight, so process groups are then recreated.
    """

    @functools.wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        device_faults.begin()
        try:
            return work(*args, **kwargs)
        except BaseException as error:
            process_groups.spoil()
            if isinstance(error, Exception) and lost(error):
                raise of(error) from None
            raise

    return run


def of(error: BaseException) -> ContactLost:
    """The `ContactLost` for an error for which `lost` is true."""
    if isinstance(error, ContactLost):
        return error
    if (behind := getattr(error, _JUDGED, None)) is not None:
        assert isinstance(behind, ContactLost)
        return behind
    if (broken := _first_broken()) is not None and broken[0] != dist.get_rank():
        return _contact_lost(broken[0], "", f"its step failed with {broken[1]}")
    rank = _who()
    address = re.search(r"\[([0-9a-fA-F.:]+)\]:\d+", str(error))
    at = f" at {address[1]}" if rank is None and address is not None else ""
    waited = re.search(r"(\d+) ?ms", str(error))
    return _contact_lost(rank, at, f"it did not answer for {int(waited[1]) / 1000:g} s" if waited is not None else "the connection closed")


def announce_failure(error: BaseException) -> None:
    """Record in the rendezvous store why this worker ends a step halfway, for the workers that will lose contact with it."""
    if not dist.is_initialized() or (isinstance(error, Exception) and lost(error)):
        return
    with suppress(RuntimeError, ValueError):
        store = dist.distributed_c10d._get_default_store()
        number = store.add(f"{_BROKEN}/{process_groups.agreed()}", 1)
        store.set(_key(number), json.dumps([dist.get_rank(), f"{type(error).__name__}: {reason(error)}"]))


def _key(number: int) -> str:
    return f"{_BROKEN}/{process_groups.agreed()}/{number}"


def _first_broken() -> tuple[int, str] | None:
    """The first worker that has ended a step halfway since all set up the connections that were lost, and why."""
    broken: list[tuple[int, str]] = []

    def look() -> None:
        with suppress(RuntimeError, ValueError):
            store = dist.distributed_c10d._get_default_store()
            if store.check([_key(1)]):
                rank, why = json.loads(store.get(_key(1)))
                broken.append((rank, why))

    if dist.is_initialized():
        # In a thread, because the store blocks too if the link is down.
        thread = threading.Thread(target=look, name="carrywave-broken", daemon=True)
        thread.start()
        thread.join(LOOK_SECONDS)
    return broken[0] if broken else None


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
    gone = _gone_ranks(certain=True)
    if gone:
        return _contact_lost(gone[0] if len(gone) == 1 else None, "", reason(error))
    limit_seconds = process_groups.seconds()
    if device_faults.is_timeout(error, limit_seconds):
        return ContactLost(
            f"a message between devices did not come within {limit_seconds:g} s, until {time.strftime('%H:%M:%S')}, though no worker of "
            "this host has ended; restart all workers, and if one may take that long, set CARRYWAVE_TIMEOUT_SECONDS"
        )
    return None


def _contact_lost(rank: int | None, at: str, how: str) -> ContactLost:
    where = "another worker" if rank is None else f"rank {rank}{_on(rank)}"
    now = time.strftime("%H:%M:%S")
    return ContactLost(f"contact with {where}{at} was lost at {now} ({how}); see that worker's output, then restart all workers", rank)


def _on(rank: int) -> str:
    return f" on {_Reported.workers[rank]['host']}" if rank < len(_Reported.workers) else ""


def _who() -> int | None:
    """The rank that is gone; None if it cannot be determined."""
    if not dist.is_initialized():
        return None
    if dist.get_world_size() == 2:
        return 1 - dist.get_rank()
    gone = _gone_ranks(certain=False)
    return gone[0] if len(gone) == 1 else None


def _gone_ranks(*, certain: bool) -> list[int]:
    """The ranks that are gone. `certain`: only those whose process is known to have ended; otherwise also one that is left over."""
    gone: list[int] = []
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        # In a thread, because the store blocks too if the link is down.
        thread = threading.Thread(target=_look, args=(rank, size, gone, certain), name="carrywave-contact", daemon=True)
        thread.start()
        thread.join(LOOK_SECONDS + 1)
    return gone


def _look(rank: int, size: int, gone_ranks: list[int], certain: bool) -> None:
    store: Store | None = None
    mark = f"carrywave/lost/{rank}"
    with suppress(RuntimeError, ValueError):
        store = dist.distributed_c10d._get_default_store()
        if not certain:
            store.set(mark, "")
    others = [other for other in range(size) if other != rank]
    deadline = time.monotonic() + LOOK_SECONDS
    while time.monotonic() < deadline:
        if store is not None:
            try:
                others = [other for other in others if not store.check([f"carrywave/lost/{other}"])]
            except RuntimeError:
                store = None
        gone = [other for other in others if other < len(_Reported.workers) and is_gone(_Reported.workers[other])]
        if gone and certain:
            gone_ranks[:] = gone
            # Only now: a worker whose own device failed is a cause, not one that lost contact.
            with suppress(RuntimeError):
                if store is not None:
                    store.set(mark, "")
            return
        if len(gone or others) == 1 and not certain:
            gone_ranks[:] = gone or others
            return
        time.sleep(0.05)
