"""The environment of workers: what they share, and what says who each of them is. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from carrywave.launch.hardware import cores


def of_workers(
    devices: Sequence[int], shared: Mapping[str, str], *, first: int, size: int
) -> tuple[dict[str, str], dict[int, dict[str, str]]]:
    """The variables that the workers of a host share, and those of each, by rank; ranks of this host start at `first`."""
    here = len(devices)
    common = dict(shared)
    if "OMP_NUM_THREADS" not in os.environ:
        common["OMP_NUM_THREADS"] = str(max(1, cores() // here))
        common["CARRYWAVE_THREADS_DEALT"] = "1"  # so that workers do not take it for the user's choice
    own = {}
    for local_rank, device in enumerate(devices):
        numbers = {"RANK": first + local_rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": here}
        own[first + local_rank] = {key: str(value) for key, value in numbers.items()} | {"CARRYWAVE_PLACE": str(device)}
    return common, own
