"""Asks the driver how much of a GPU the persistent kernels may fill."""

from __future__ import annotations

from functools import cache

import torch

from carrywave.kernels.cuda import nvrtc
from carrywave.kernels.hopper.layout import SHARED_BYTES, THREADS, Chip

_kept_free = [0]


def keep_free(multiprocessors: int) -> None:
    """Leave at least this many multiprocessors to others from now on: to kernels that wait there for what ours compute."""
    _kept_free[0] = max(_kept_free[0], multiprocessors)


def chip_of(device: int) -> Chip:
    """This GPU, or the part of it that this process may use, without what is kept free."""
    return _chip(device, _kept_free[0])


@cache
def _chip(device: int, kept_free: int) -> Chip:
    count = torch.cuda.get_device_properties(device).multi_processor_count
    # The largest block: whatever leaves room for it leaves room for every other.
    probe = nvrtc.kernel("probe.cu", "probe", (("CLUSTER", 16),), SHARED_BYTES, device)
    return Chip.with_multiprocessors(count, {size: nvrtc.most_clusters(probe, size, THREADS) for size in (2, 4, 8, 16)}, kept_free)
