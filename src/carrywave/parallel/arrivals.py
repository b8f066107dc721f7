"""Where workers wait for each other a limited time: the store, not a collective.

A collective that others never enter would time out, or keep this process from ending until it does.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

if TYPE_CHECKING:
    from carrywave.parallel.world import World

_counts: Counter[str] = Counter()  # how often this worker has arrived, by meeting


def arrive(store: Store, key: str, size: int, seconds: float) -> bool:
    """Wait until so many workers have arrived at a key that is used once; False if some have not within this time. They poll the store, so
    no message is in flight.
    """
    deadline = time.monotonic() + seconds
    pause_seconds = 0.001
    if store.add(key, 1) == size:
        store.set(f"all/{key}", "")
    while not (came := store.check([f"all/{key}"])) and time.monotonic() < deadline:
        time.sleep(pause_seconds)
        pause_seconds = min(2 * pause_seconds, 0.1)
    return bool(came)


def all_arrive(world: World, what: str, seconds: float) -> bool:
    """Wait until every worker has called this for the same thing; False if some have not within this time."""
    ranks = range(world.size) if world.group is None else dist.get_process_group_ranks(world.group)
    meeting = f"carrywave/arrive/{'-'.join(map(str, ranks))}/{what}"
    _counts[meeting] += 1
    return arrive(dist.distributed_c10d._get_default_store(), f"{meeting}/{_counts[meeting]}", world.size, seconds)
