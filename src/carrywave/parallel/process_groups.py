"""Process groups, made once for the same workers and the same use, however many trainers need them.

To make one is a step of all workers together: every one asks for the same groups in the same order, and what is kept is the same on each.
Messages match by their order alone. So where work broke off and messages may be under way, the groups are not used again: the workers
agree on that whenever one of them begins with a new mesh.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist


class _Made:
    """Groups of the workers that there are now."""

    world: Callable[[], dist.ProcessGroup | None] = lambda: None
    groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}  # noqa: RUF012
    spoils = 0  # how often work broke off in this process
    agreed = 0  # and in all of them, at the last agreement
    timeout: timedelta | None = None  # of a message; None: torch's own


def limit(seconds: float) -> None:
    """How long a message may take in groups that are made from here on: a new one would have torch's own limit, not that of its world."""
    _Made.timeout = timedelta(seconds=seconds)


def forget() -> None:
    """The world is left, and its groups with it."""
    _Made.groups, _Made.timeout = {}, None


def spoil() -> None:
    """Work broke off: messages may be under way in any group."""
    _Made.spoils += 1


def agree(exchange: Callable[[str], list[str]]) -> None:
    """Before groups are asked for: forget those that any worker cannot trust. All workers must ask."""
    total = sum(int(text) for text in exchange(str(_Made.spoils)))
    if total != _Made.agreed:
        _Made.groups, _Made.agreed = {}, total


def drop(group: dist.ProcessGroup) -> None:
    """Take a group down on this worker alone: whoever waits for it in the group finds the connection closed."""
    for key in [key for key, known in _Made.groups.items() if known is group]:
        del _Made.groups[key]
    with suppress(RuntimeError, ValueError):
        dist.destroy_process_group(group)


def group(ranks: Sequence[int], use: str) -> dist.ProcessGroup:
    """The group of these workers for this use. Every worker must ask, also those outside it."""
    world = dist.group.WORLD
    if _Made.world() is not world:
        # Those of a world that was left went with it.
        _Made.world, _Made.groups = weakref.ref(world), {}
    key = use, tuple(ranks)
    if key not in _Made.groups:
        _Made.groups[key] = dist.new_group(list(ranks), timeout=_Made.timeout)
    return _Made.groups[key]
