"""Times messages and sums in device memory, as a recorded step has them: captured in a CUDA graph, without the host.

A message is a copy and a signal on the sender's stream and a wait on the receiver's, so its cost is the devices' own time. Both ends are
timed by the device's clock within the graph, where all messages of a block have been sent before the first is waited for; and messages go
there and back, which shows how long one is on its way.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from carrywave.kernels.cuda import clock
from carrywave.measure.recorded import replay_seconds
from carrywave.measure.timing import LARGE_BYTES, SMALL_BYTES, captured
from carrywave.parallel import process_groups
from carrywave.parallel.memory.symmetric import SharedMemory, symmetric_memory, write
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.worker_pool import Row
from carrywave.plan.cost.sample_requests import REDUCED_BYTES
from carrywave.plan.cost.transports import DEVICE_MEMORY

Stamps = tuple[Tensor, Tensor, Tensor, Tensor]  # before and after the sends, before and after the waits

MESSAGES = 32  # in a block
REPLAYS = 20
_BARRIER = MESSAGES  # the signals below are those of messages
LEAST_LATENCY, LEAST_OWN = 1e-7, 1e-7


class Ends(NamedTuple):
    """Seconds that the two ends of a message spend on it, the wait when it has arrived, and half of the way there and back."""

    send: float
    wait: float
    half: float


def rows_of(mesh: Mesh) -> Iterator[Row]:
    """Sums over all workers, and messages between the first two. Collective: every rank must call it."""
    yield from time_sums(mesh, REPLAYS)
    memory = _pair(mesh)
    if memory is not None:
        ends = {size: _ends(memory, size, mesh.device) for size in (SMALL_BYTES, LARGE_BYTES)}
        yield from link_rows(ends[SMALL_BYTES], ends[LARGE_BYTES], reports=mesh.world.rank == 0)
    dist.barrier()  # the others start the next measurement when these two are done


def time_sums(mesh: Mesh, replays: int) -> Iterator[Row]:
    """Time sums of several sizes over all workers, as many times on each."""
    for num_bytes in REDUCED_BYTES:
        numbers = torch.zeros(num_bytes // 4, device=mesh.device)

        def add(numbers: Tensor = numbers) -> Tensor:
            return mesh.sum_(numbers)

        seconds = replay_seconds(add, dist.barrier, replays)
        yield {"reduction": {"workers": mesh.world.size, "num_bytes": num_bytes, "seconds": seconds}}


def link_rows(small: Ends, large: Ends, *, reports: bool) -> Iterator[Row]:
    """What two sizes of messages tell: the copy's rate, the time of each end besides the copy, and the time from signal to arrival."""
    rate = (LARGE_BYTES - SMALL_BYTES) / max(1e-9, large.send - small.send)
    if reports:
        latency = max(LEAST_LATENCY, small.half - small.send)
        yield {"link": {"latency_seconds": latency, "bytes_per_second": rate, "transport": DEVICE_MEMORY}}
    copied = SMALL_BYTES / rate
    yield {"overheads": {"recorded_message_seconds": max(LEAST_OWN, (small.send - copied + small.wait) / 2)}}


def _pair(mesh: Mesh) -> SharedMemory | None:
    """Memory that the first two workers share; None on the others. Collective."""
    group = process_groups.group([0, 1], "measured messages")
    return symmetric_memory(group, LARGE_BYTES, mesh.device) if mesh.world.rank < 2 else None


def exchange(memory: SharedMemory, message: Tensor, stamps: Stamps, stamp: Callable[[Tensor], None] = clock.stamp) -> None:
    """A block of messages both ways: all are sent, then all are waited for."""
    peer = 1 - memory.rank
    place = memory.of(peer)[: message.nbytes].view(message.dtype)
    stamp(stamps[0])
    for number in range(MESSAGES):
        write(place, message)
        memory.signal(peer, number)
    stamp(stamps[1])
    memory.barrier(_BARRIER)
    stamp(stamps[2])
    for number in range(MESSAGES):
        memory.wait(peer, number)
    stamp(stamps[3])


def there_and_back(memory: SharedMemory, message: Tensor) -> None:
    """A block of messages, each sent when the one before it has come back."""
    peer = 1 - memory.rank
    place = memory.of(peer)[: message.nbytes].view(message.dtype)
    for number in range(MESSAGES):
        if memory.rank == 1:
            memory.wait(peer, number)
        write(place, message)
        memory.signal(peer, number)
        if memory.rank == 0:
            memory.wait(peer, number)


def _ends(memory: SharedMemory, num_bytes: int, device: torch.device) -> Ends:
    message = torch.zeros(num_bytes // 4, device=device)
    times_4 = torch.zeros(4, dtype=torch.int64, device=device)
    stamps = (times_4[0], times_4[1], times_4[2], times_4[3])
    found: list[list[int]] = []
    graph, _ = captured(lambda: exchange(memory, message, stamps))
    graph.replay()
    for _ in range(REPLAYS):
        graph.replay()
        found.append(times_4.tolist())
    send = statistics.median(after - before for before, after, _, _ in found) / 1e9 / MESSAGES
    wait = statistics.median(after - before for _, _, before, after in found) / 1e9 / MESSAGES
    half = replay_seconds(lambda: there_and_back(memory, message), times=REPLAYS) / MESSAGES / 2
    return Ends(send, wait, half)
