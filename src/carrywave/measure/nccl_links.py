"""Times messages and sums over NCCL as a recorded step has them: captured in a CUDA graph, without the host.

Messages go there and back, one after another, in the batches and on the communicator that the stages of a pipeline would use. They are
carried by kernels of their own beside the stage's, so that a stage's stream spends no time on them but that of waiting.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch import distributed as dist

from carrywave.measure.device_memory import LARGE_BYTES, MESSAGES, REPLAYS, SMALL_BYTES, time_sums
from carrywave.measure.recorded import replay_seconds
from carrywave.parallel import process_groups
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.startup import nccl
from carrywave.parallel.worker_pool import Row


def rows_of(mesh: Mesh, pair: tuple[int, int] = (0, 1)) -> Iterator[Row]:
    """Sums over all workers, and messages between two of them. Collective: every rank must call it."""
    yield from time_sums(mesh, REPLAYS)
    yield from time_messages(mesh, pair)


def time_messages(mesh: Mesh, pair: tuple[int, int]) -> Iterator[Row]:
    """Messages between two workers: half of the way there and back. Collective: every rank must call it; the first of the two reports."""
    group = process_groups.group(list(pair), "messages", "nccl", nccl.message_options)
    if mesh.world.rank in pair:
        first = mesh.world.rank == pair[0]
        peer = pair[1] if first else pair[0]
        seconds = {}
        for num_bytes in (SMALL_BYTES, LARGE_BYTES):
            message = torch.zeros(num_bytes // 4, device=mesh.device)

            def block(message: Tensor = message) -> None:
                there_and_back(message, peer, group, first=first)

            seconds[num_bytes] = replay_seconds(block, times=REPLAYS) / MESSAGES / 2
        if first:
            rate = (LARGE_BYTES - SMALL_BYTES) / max(1e-9, seconds[LARGE_BYTES] - seconds[SMALL_BYTES], seconds[LARGE_BYTES] / 20)
            yield {"link": {"latency_seconds": seconds[SMALL_BYTES], "bytes_per_second": rate, "transport": mesh.sums}}
    dist.barrier()  # the others start the next measurement when these two are done


def there_and_back(message: Tensor, peer: int, group: dist.ProcessGroup, *, first: bool) -> None:
    """A block of messages, each sent when the one before it has come back."""
    kinds = (dist.isend, dist.irecv) if first else (dist.irecv, dist.isend)
    for _ in range(MESSAGES):
        for kind in kinds:
            for work in dist.batch_isend_irecv([dist.P2POp(kind, message, peer, group)]):
                work.wait()
