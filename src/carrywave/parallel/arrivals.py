"""Where workers wait for each other a limited time: the store, not a collective.

A collective that others never enter would keep this process from ending until it times out by itself.
"""

from __future__ import annotations

import time
from collections import Counter

import torch.distributed as dist

from carrywave.parallel.world import World

_counts: Counter[str] = Counter()  # how often this worker has arrived, by meeting


def all_arrive(world: World, what: str, seconds: float) -> bool:
    """Wait until every worker has called this for the same thing; False if some have not within this time."""
    ranks = range(world.size) if world.group is None else dist.get_process_group_ranks(world.group)
    meeting = f"carrywave/arrive/{'-'.join(map(str, ranks))}/{what}"
    _counts[meeting] += 1
    store, key = dist.distributed_c10d._get_default_store(), f"{meeting}/{_counts[meeting]}"
    deadline = time.monotonic() + seconds
    pause_seconds = 0.001
    here = store.add(key, 1)
    while here < world.size and time.monotonic() < deadline:
        time.sleep(pause_seconds)
        pause_seconds = min(2 * pause_seconds, 0.1)
        here = store.add(key, 0)
    return bool(here >= world.size)
