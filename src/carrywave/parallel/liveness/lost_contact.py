"""Turns a lost connection into one sentence that names the worker, instead of a library's own error text.

torch reports a failed connection as an address and port. Whose it was is found from the workers: a process on this host that is gone can be
detected, and a worker that lost contact itself says so in the rendezvous store, so that it is not mistaken for the cause.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from carrywave.errors import ContactLost
from carrywave.parallel import process_groups
from carrywave.parallel.startup.rendezvous import is_gone

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


class _Known:
    """What each worker reported about itself at the rendezvous, by rank."""

    there: Sequence[Mapping[str, Any]] = ()


def remember(there: Sequence[Mapping[str, Any]]) -> None:
    """Keep what the workers reported about themselves, for error messages."""
    _Known.there = list(there)


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
    text = str(error)
    return sounds_lost(text) and (isinstance(error, dist.DistError) or THEIRS.search(text) is not None)


def kept(work: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that a failure from lost contact raises `ContactLost`.

    After any failure, messages that nobody receives may be in flight, so process groups are then recreated.
    """

    @functools.wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
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
    now = time.strftime("%H:%M:%S")
    rank = _who()
    where = "another worker" if rank is None else f"rank {rank}{_on(rank)}"
    address = re.search(r"\[([0-9a-fA-F.:]+)\]:\d+", str(error))
    at = f" at {address[1]}" if rank is None and address is not None else ""
    waited = re.search(r"(\d+) ?ms", str(error))
    how = f"it did not answer for {int(waited[1]) / 1000:g} s" if waited is not None else "the connection closed"
    return ContactLost(f"contact with {where}{at} was lost at {now} ({how}); its own message says why: restart all workers", rank)


def _on(rank: int) -> str:
    return f" on {_Known.there[rank]['host']}" if rank < len(_Known.there) else ""


def _who() -> int | None:
    """The rank that is gone; None if it cannot be determined."""
    if not dist.is_initialized():
        return None
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 2:
        return 1 - rank
    found: list[int] = []
    # In a thread, because the store blocks too if the link is down.
    thread = threading.Thread(target=_look, args=(rank, size, found), name="carrywave-contact", daemon=True)
    thread.start()
    thread.join(LOOK_SECONDS + 1)
    return found[0] if len(found) == 1 else None


def _look(rank: int, size: int, found: list[int]) -> None:
    store: Store | None = None
    with suppress(RuntimeError, ValueError):
        store = dist.distributed_c10d._get_default_store()
        store.set(f"carrywave/lost/{rank}", "")
    others = [other for other in range(size) if other != rank]
    deadline = time.monotonic() + LOOK_SECONDS
    while time.monotonic() < deadline:
        if store is not None:
            try:
                others = [other for other in others if not store.check([f"carrywave/lost/{other}"])]
            except RuntimeError:
                store = None
        gone = [other for other in others if other < len(_Known.there) and is_gone(_Known.there[other])]
        if len(gone or others) == 1:
            found[:] = gone or others
            return
        time.sleep(0.05)
