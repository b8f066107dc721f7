"""What workers measure together once they communicate: their devices, clocks and links, and that they compute what one device does. Every
worker calls it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import distributed as dist

from carrywave.doctor import self_test
from carrywave.doctor.device_speed import time_device
from carrywave.doctor.links import MeasuredLink, Pair, pairs
from carrywave.parallel.liveness import lost_contact
from carrywave.parallel.worker_pool import Row
from carrywave.parallel.world import World
from carrywave.plan.profile import BY_BACKEND
from carrywave.train.start import timing
from carrywave.train.start.timing import LARGE_BYTES, SMALL_BYTES

PHASES = ("connecting", "device speed", "waiting for the others", "clocks", "links", "self-test", "done")
CLOCK_ROUNDS = 8


@lost_contact.kept
def measure(world: World, homes: Sequence[str], at: Callable[[str], None]) -> Row:
    """Measure all; `homes` is the host of each rank, `at` is called with what comes next.

    What several workers measured together, only one of them returns.
    """
    firsts = [homes.index(home) for home in dict.fromkeys(homes)]
    at("device speed")
    row: Row = {"speed": time_device(world.device, _together(world, at)), "links": [], "clocks": {}, "self_test": []}
    if world.size > 1:
        at("clocks")
        row["clocks"] = _clocks(world, firsts)
        at("links")
        row["links"] = _links(world, pairs(homes))
        at("self-test")
        row["self_test"] = self_test.run(world)
    at("done")
    return row


def _together(world: World, at: Callable[[str], None]) -> Callable[[], None]:
    """A barrier that records who waits in it, so that those who are missing can be named."""

    def wait() -> None:
        if world.size > 1:
            at("waiting for the others")
            dist.barrier()
            at("device speed")

    return wait


def _links(world: World, rounds: Sequence[Sequence[Pair]]) -> list[MeasuredLink]:
    """The links whose first end is this worker."""
    links: list[MeasuredLink] = []
    if world.device.type == "cuda" and world.backend == "gloo":  # the host takes no part in messages; sums tell the link
        rows = [row["within"] for row in timing.links(world) if "within" in row]
        return [
            MeasuredLink(*Pair(0, 1, "within a host"), row["latency_seconds"], row["bytes_per_second"], row["transport"]) for row in rows
        ]
    for each in rounds:
        dist.barrier()
        for pair in each:
            small, large = (timing.time_messages(world, size, (pair.first, pair.second)) for size in (SMALL_BYTES, LARGE_BYTES))
            if world.rank == pair.first:
                row = timing.link(small, large, SMALL_BYTES, LARGE_BYTES, BY_BACKEND[world.backend])
                links.append(MeasuredLink(*pair, row["latency_seconds"], row["bytes_per_second"], row["transport"]))
    dist.barrier()
    return links


def _clocks(world: World, firsts: Sequence[int]) -> dict[str, tuple[float, float]]:
    """On rank 0, how far the clock of each other host is ahead, in seconds, and how uncertain that is, by the rank of its first worker."""
    clocks: dict[str, tuple[float, float]] = {}
    for rank in firsts:
        if rank == 0 or world.rank not in (0, rank):
            continue
        remote_time = torch.zeros(1, dtype=torch.float64)
        if world.rank == rank:
            for _ in range(CLOCK_ROUNDS):
                dist.recv(remote_time, 0)
                dist.send(torch.tensor([time.time()], dtype=torch.float64), 0)
            continue
        best = (0.0, float("inf"))
        for _ in range(CLOCK_ROUNDS):
            begin = time.time()
            dist.send(remote_time, rank)
            dist.recv(remote_time, rank)
            end = time.time()
            doubt = max(1e-6, (end - begin) / 2)
            if doubt < best[1]:
                best = float(remote_time) - (begin + end) / 2, doubt
        clocks[str(rank)] = best
    return clocks
