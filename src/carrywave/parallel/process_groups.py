"""Caches process groups, so that each is created once per set of workers and use, however many trainers need it.

Creating a group is collective: every worker requests the same groups in the same order, so the caches are the same on all of them. Messages
match by order alone: if work with them failed, some may still be in flight, so nothing is sent any more, and all workers have to start
anew.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol
from weakref import WeakSet

import torch.distributed as dist

from carrywave.errors import WorkerError


class Holder(Protocol):
    """Holds work that goes through groups."""

    def forget(self) -> None:
        """Let go of it."""


class _Made:
    """The groups of the current world."""

    world: Callable[[], dist.ProcessGroup | None] = lambda: None
    groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}  # noqa: RUF012
    holders: WeakSet[Holder] = WeakSet()  # noqa: RUF012
    timeout: timedelta | None = None  # message timeout; None: torch's default
    broken = False  # a step of this worker has ended halfway


def limit(seconds: float) -> None:
    """Set the message timeout of groups created from here on; by default a new group has torch's timeout, not that of its world."""
    _Made.timeout, _Made.broken = timedelta(seconds=seconds), False


def seconds() -> float:
    """The message timeout."""
    return (_Made.timeout or dist.default_pg_timeout).total_seconds()


def hold(holder: Holder) -> None:
    """Note what must let go before the groups are destroyed: NCCL waits until no CUDA graph holds its work any more."""
    _Made.holders.add(holder)


def leave() -> None:
    """Have everything released that holds on to the groups, and forget them, because their world is being left."""
    for holder in list(_Made.holders):
        holder.forget()
    _Made.groups, _Made.timeout = {}, None


def spoil() -> None:
    """Record that work failed and messages may be in flight in any group."""
    _Made.broken = dist.is_initialized()


def check_unspoilt() -> None:
    """Refuse further exchanges after work that ended halfway on this worker: the others are still in it, or wait for its messages."""
    if _Made.broken and dist.is_initialized():
        raise WorkerError("an earlier step of this worker ended halfway, so that the workers no longer agree; start all of them again")


def group(
    ranks: Sequence[int], use: str, backend: str | None = None, options: Callable[[timedelta | None], object] = lambda timeout: None
) -> dist.ProcessGroup:
    """The group of these workers for this use, with the world's backend unless given. `options`: makes those of the backend, for a timeout.
    Collective: every rank must call it, including those outside the group.
    """
    world = dist.group.WORLD
    if _Made.world() is not world:
        # The groups of a world that was left are gone.
        _Made.world, _Made.groups = weakref.ref(world), {}
    key = use, tuple(ranks)
    if key not in _Made.groups:
        _Made.groups[key] = dist.new_group(list(ranks), timeout=_Made.timeout, backend=backend, pg_options=options(_Made.timeout))
    return _Made.groups[key]
