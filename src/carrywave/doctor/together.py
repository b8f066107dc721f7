"""What workers find out together once they have met: who is alike, which link or device is slow."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import distributed as dist

from carrywave.doctor.report import Finding, several, size
from carrywave.model.lstm import LSTM
from carrywave.parallel.world import World

REFUSED = ("carrywave", "torch", "CUDA", "NCCL")  # training with different ones is refused, or fails within NCCL
SLOW_LINK, SLOW, VERY_SLOW = 2.0, 1.25, 2.0  # times as long as the others take
SMALL_BYTES, LARGE_BYTES, MESSAGES, ROUNDS = 4096, 1 << 20, 20, 9

Worker = Mapping[str, Any]  # rank, host, home (what tells hosts apart), device, versions, settings


def check_alike(workers: Sequence[Worker]) -> list[Finding]:
    """Whether all workers have the same versions and settings; names the ranks that do not."""
    findings = []
    for kind in ("versions", "settings"):
        for name in dict.fromkeys(name for worker in workers for name in worker[kind]):
            values = [worker[kind].get(name, "none") for worker in workers]
            usual = Counter(values).most_common(1)[0][0]
            each = zip(workers, values, strict=True)
            if odd := [f"{value} on rank {worker['rank']} ({worker['host']})" for worker, value in each if value != usual]:
                level: Any = "wrong" if name in REFUSED or name == "CARRYWAVE_TRANSPORT" else "warning"
                remedy = f"install the same {name} on all hosts" if kind == "versions" else "set it to the same value on all workers"
                findings.append(Finding(level, kind, f"{name} is {several(odd)}, but {usual} elsewhere", remedy))
    same = ", ".join(f"{name} {value}" for name, value in workers[0]["versions"].items())
    return findings or [Finding("fine", "versions", same + f", the same on {len(workers)} workers" * (len(workers) > 1))]


def step_ms(world: World) -> float:
    """Milliseconds of a small LSTM step on this worker's device, all workers at once, as in training."""
    on_gpu = world.device.type == "cuda"
    units, lanes, steps = (1024, 64, 64) if on_gpu else (128, 16, 32)
    layer, x_TBI = LSTM(units, units, device=world.device), torch.randn(steps, lanes, units, device=world.device)
    times = []
    for _ in range(ROUNDS):
        if world.size > 1:
            dist.barrier()
        begin = time.perf_counter()
        with torch.autocast(world.device.type, torch.bfloat16, enabled=on_gpu):
            layer(x_TBI)[0].sum().backward()
        if on_gpu:
            torch.cuda.synchronize(world.device)
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[2:])


def check_speeds(steps: Sequence[float], names: Sequence[str]) -> Iterator[Finding]:
    """Who is slow: each worker beside the median of the others."""
    yield Finding("fine", "speed", f"LSTM step {min(steps):.3g} to {max(steps):.3g} ms")
    for rank, step in enumerate(steps if len(steps) > 1 else ()):
        factor = step / statistics.median([*steps[:rank], *steps[rank + 1 :]])
        if factor >= SLOW:
            fact = f"{names[rank]} takes {factor:.2g} times as long as the other workers for an LSTM step; all of them wait for it"
            remedy = "look for other programs, heat, a lower clock or fewer cores there, or leave it out"
            yield Finding("wrong" if factor >= VERY_SLOW else "warning", "slow worker", fact, remedy)


def pairs(homes: Sequence[str]) -> list[tuple[int, int]]:
    """The links to time, by rank: between the first two workers of a host, and between the first workers of neighbouring hosts in a ring,
    so that a slow host shows on both of its sides.
    """
    groups: dict[str, list[int]] = {}
    for rank, home in enumerate(homes):
        groups.setdefault(home, []).append(rank)
    firsts = [group[0] for group in groups.values()]
    ring = [*itertools.pairwise(firsts), *([(firsts[0], firsts[-1])] if len(firsts) > 2 else [])]
    return [(group[0], group[1]) for group in groups.values() if len(group) > 1] + ring


def links(world: World, homes: Sequence[str]) -> list[dict[str, Any]]:
    """Latency and rate of the links whose first end is this worker, over what carries its tensors between hosts."""
    found = []
    device = world.device if world.backend == "nccl" else torch.device("cpu")
    for first, second in pairs(homes):
        dist.barrier()
        if world.rank not in (first, second):
            continue
        seconds = []
        for num_bytes in (SMALL_BYTES, LARGE_BYTES):
            message, times = torch.zeros(num_bytes, dtype=torch.uint8, device=device), []
            for _ in range(MESSAGES):
                begin = time.perf_counter()
                for sends in (True, False) if world.rank == first else (False, True):
                    peer = second if world.rank == first else first
                    dist.send(message, peer) if sends else dist.recv(message, peer)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                times.append((time.perf_counter() - begin) / 2)
            seconds.append(statistics.median(times[2:]))
        if world.rank == first:
            # On a busy machine the large one may take less than the small one: the bytes themselves take a twentieth of it at least.
            rate = (LARGE_BYTES - SMALL_BYTES) / max(1e-9, seconds[1] - seconds[0], seconds[1] / 20)
            kind = "within a host" if homes[first] == homes[second] else "between hosts"
            row = {"first": first, "second": second, "kind": kind, "transport": world.backend}
            found.append({**row, "latency_seconds": seconds[0], "bytes_per_second": rate})
    dist.barrier()
    return found


def check_links(found: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Iterator[Finding]:
    """What links of each kind are like, and which of them is slow."""
    for kind in dict.fromkeys(link["kind"] for link in found):
        alike = [link for link in found if link["kind"] == kind]
        rates = [link["bytes_per_second"] for link in alike]
        latency = statistics.median(link["latency_seconds"] for link in alike)
        yield Finding("fine", f"link {kind}", f"{1e6 * latency:.3g} µs, {size(statistics.median(rates))}/s by {alike[0]['transport']}")
        for place, link in enumerate(alike if len(alike) > 1 else ()):
            usual = statistics.median(rates[:place] + rates[place + 1 :])
            if usual / rates[place] >= SLOW_LINK:
                fact = f"the link between {names[link['first']]} and {names[link['second']]} carries {size(rates[place])}/s, others "
                remedy = "check its cable, switch port and interface; everyone waits for the slowest"
                yield Finding("warning", f"link {kind}", f"{fact}{size(usual)}/s", remedy)
