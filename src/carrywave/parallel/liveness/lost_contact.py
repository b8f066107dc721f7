"""Contact with other workers, and what is said when it is lost: one sentence that names the worker, instead of a library's own text.

Which connection failed is told by torch as an address and a port. Whose it was follows from the workers themselves: a process of this host
that is gone can be seen, and one that lost contact itself says so in the store where all met, so that it is not taken for the cause.
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

LOOK_SECONDS = 2.0  # to find out who has gone: a process that ends closes its connections a little earlier
# Parts of what torch, gloo and NCCL say when another process has gone, or does not answer.
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
# How to know their texts from those of a user's own connections: the place in their source, and the one message without any.
THEIRS = re.compile(r"gloo/|\bNCCL\b|ProcessGroup|c10d|^Timeout waiting for key: ")


class _Known:
    """What each worker said of itself when they met, by rank."""

    there: Sequence[Mapping[str, Any]] = ()


def remember(there: Sequence[Mapping[str, Any]]) -> None:
    """Keep what the workers said of themselves, for messages."""
    _Known.there = list(there)


def sounds_lost(text: str) -> bool:
    """Whether a text only says that another worker has gone."""
    return any(part in text.lower() for part in LOSSES)


def lost(error: BaseException) -> bool:
    """Whether an error only says that another worker has gone: the cause is told elsewhere. A connection of the user's own is no worker."""
    if isinstance(error, ContactLost | dist.DistNetworkError):
        return True
    if isinstance(error, OSError) or not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return sounds_lost(text) and (isinstance(error, dist.DistError) or THEIRS.search(text) is not None)


def kept(work: Callable[P, R]) -> Callable[P, R]:
    """The same function, whose failure for want of contact is a `ContactLost`. After any failure, messages may be under way that
    nobody takes: groups are then made anew."""

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
    """What is to be said of an error for which `lost` holds."""
    if isinstance(error, ContactLost):
        return error
    now = time.strftime("%H:%M:%S")
    rank = _who()
    where = "another worker" if rank is None else f"rank {rank}{_on(rank)}"
    address = re.search(r"\[([0-9a-fA-F.:]+)\]:\d+", str(error))
    at = f" at {address[1]}" if rank is None and address is not None else ""
    waited = re.search(r"(\d+) ?ms", str(error))
    how = f"it did not answer for {int(waited[1]) / 1000:g} s" if waited is not None else "the connection closed"
    return ContactLost(f"contact with {where}{at} was lost at {now} ({how}); its own message says why: start all workers again", rank)


def _on(rank: int) -> str:
    return f" on {_Known.there[rank]['host']}" if rank < len(_Known.there) else ""


def _who() -> int | None:
    """The rank that has gone; None where it cannot be told."""
    if not dist.is_initialized():
        return None
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 2:
        return 1 - rank
    found: list[int] = []
    # In a thread: where the link is down, the store keeps one waiting too.
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
