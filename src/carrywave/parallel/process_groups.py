"""Caches process groups, so that each is created once per set of workers and use, however many trainers need it.

Creating a group is collective: every worker requests the same groups in the same order, so the caches are the same on all of them. Messages
match by order alone. If work failed and messages may still be in flight, the groups must not be reused; the workers agree on that whenever
one of them sets up a new mesh.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Protocol
from weakref import WeakKeyDictionary, WeakMethod, WeakSet

import torch.distributed as dist


class Holder(Protocol):
    """Holds work that goes through groups."""

    def forget(self) -> None:
        """Let go of it."""


class _Made:
    """The groups of the current world."""

    world: Callable[[], dist.ProcessGroup | None] = lambda: None
    groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}  # noqa: RUF012
    forgotten: list[dist.ProcessGroup] = []  # noqa: RUF012  # after a failure; destroyed once nobody uses them
    users: WeakKeyDictionary[dist.ProcessGroup, list[WeakMethod[Callable[[], None]]]] = WeakKeyDictionary()  # noqa: RUF012
    holders: WeakSet[Holder] = WeakSet()  # noqa: RUF012
    spoils = 0  # failures of collective work in this process
    agreed = 0  # total over all processes at the last agreement
    timeout: timedelta | None = None  # message timeout; None: torch's default


def limit(seconds: float) -> None:
    """Set the message timeout of groups created from here on; by default a new group has torch's timeout, not that of its world."""
    _Made.timeout = timedelta(seconds=seconds)


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
    _Made.groups, _Made.forgotten, _Made.timeout = {}, [], None


def spoil() -> None:
    """Record that work failed and messages may be in flight in any group."""
    _Made.spoils += 1


def agree(exchange: Callable[[str], list[str]]) -> None:
    """Forget all groups if work failed on any worker since the last agreement. Collective: every rank calls it before requesting groups."""
    total = sum(int(text) for text in exchange(str(_Made.spoils)))
    if total != _Made.agreed:
        _Made.forgotten += _Made.groups.values()
        _Made.groups, _Made.agreed = {}, total
    _destroy_unused()


def _destroy_unused() -> None:
    """Destroy forgotten groups that nobody uses any more, whose connections and threads would stay for as long as this process. A trainer
    from before the failure may still use its own.
    """
    for group in list(_Made.forgotten):
        # torch has a number for a group of others. NCCL waits until no CUDA graph holds its work: those groups end with their world.
        if not isinstance(group, dist.ProcessGroup) or dist.get_backend(group) != "gloo":
            continue
        users = _Made.users.get(group, [])
        if users and not any(user() for user in users):
            _Made.forgotten.remove(group)
            drop(group)


def agreed() -> int:
    """The failures that all workers knew of when they last set up a mesh: the same number on each."""
    return _Made.agreed


def drop(group: dist.ProcessGroup) -> None:
    """Destroy a group on this worker alone: a peer waiting in it sees the connection close, once nobody here uses it any more."""
    for user in _Made.users.pop(group, []):
        close = user()
        if close is not None:
            close()
    for key in [key for key, made in _Made.groups.items() if made is group]:
        del _Made.groups[key]
    with suppress(RuntimeError, ValueError):
        dist.destroy_process_group(group)


def drop_all() -> None:
    """Destroy every group on this worker alone."""
    for group in list(_Made.groups.values()):
        if isinstance(group, dist.ProcessGroup):  # torch has a number for one of others
            drop(group)


def use(group: dist.ProcessGroup, close: Callable[[], None]) -> None:
    """Have a method called when the group is dropped, which may be on behalf of others that share it; one of others never is."""
    if isinstance(group, dist.ProcessGroup):
        _Made.users.setdefault(group, []).append(WeakMethod(close))


def group(
    ranks: Sequence[int], use: str, backend: str | None = None, options: Callable[[timedelta | None], object] = lambda timeout: None
) -> dist.ProcessGroup:
    """The group of these workers for this use, with the world's backend unless given. `options`: makes those of the backend, for a timeout.
    Collective: every rank must call it, including those outside the group.
    """
    world = dist.group.WORLD
    if _Made.world() is not world:
        # The groups of a world that was left are gone.
        _Made.world, _Made.groups, _Made.forgotten = weakref.ref(world), {}, []
    key = use, tuple(ranks)
    if key not in _Made.groups:
        _Made.groups[key] = dist.new_group(list(ranks), timeout=_Made.timeout, backend=backend, pg_options=options(_Made.timeout))
    return _Made.groups[key]
