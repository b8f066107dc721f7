"""Times messages and sums over NCCL as a recorded step has them: captured in a CUDA graph, without the host.

Messages go there and back, one after another, in the batches and on the communicator that the stages of a pipeline would use. They are
carried by kernels of their own beside the stage's, so that a stage's stream spends no time on them but that of waiting.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch import distributed as dist

from carrywave.measure.device_memory import MESSAGES, REPLAYS, time_sums
from carrywave.measure.recorded import replay_seconds
from carrywave.measure.timing import LARGE_BYTES, SMALL_BYTES, rate_between
from carrywave.parallel import process_groups
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.startup import nccl
from carrywave.parallel.worker_pool import Row


def rows_of(mesh: Mesh) -> Iterator[Row]:
    """Sums over all workers, and messages between the first two: half of the way there and back. Collective: every rank must call it."""
    yield from time_sums(mesh, REPLAYS)
    group = process_groups.group([0, 1], "messages", "nccl", nccl.message_options)
    rank = mesh.world.rank
    if rank < 2:
        seconds = {}
        for num_bytes in (SMALL_BYTES, LARGE_BYTES):
            message = torch.zeros(num_bytes // 4, device=mesh.device)

            def block(message: Tensor = message) -> None:
                there_and_back(message, 1 - rank, group, first=rank == 0)

            seconds[num_bytes] = replay_seconds(block, times=REPLAYS) / MESSAGES / 2
        if rank == 0:
            rate = rate_between(seconds[SMALL_BYTES], seconds[LARGE_BYTES])
            yield {"link": {"latency_seconds": seconds[SMALL_BYTES], "bytes_per_second": rate, "transport": mesh.sums}}
    dist.barrier()  # the others start the next measurement when these two are done


def there_and_back(message: Tensor, peer: int, group: dist.ProcessGroup, *, first: bool) -> None:
    """A block of messages, each sent when the one before it has come back."""
    kinds = (dist.isend, dist.irecv) if first else (dist.irecv, dist.isend)
    for _ in range(MESSAGES):
        for kind in kinds:
            for work in dist.batch_isend_irecv([dist.P2POp(kind, message, peer, group)]):
                work.wait()
