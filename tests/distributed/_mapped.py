"""Shared memory between processes without a GPU: a file that all of them map, with flags for signals. It stands in for symmetric memory.

A flag that is raised twice waits, as on a GPU, so a schedule that relies on more than one place for a signal hangs here too.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from carrywave.parallel.memory.symmetric import signals_of

LIMIT_SECONDS = 60.0
_made: dict[tuple[str, tuple[int, ...]], int] = {}
_lock = threading.Lock()


def _fence() -> None:
    """Make what was written before visible before what is written after: releasing a lock and taking it again orders both."""
    for _ in range(2):
        with _lock:
            pass


class MappedMemory:
    """The processes of a group find the file by their ranks, and by how many of these they have made together."""

    meeting = Path()  # a file that is different for each world

    def __init__(self, group: dist.ProcessGroup, size: int, device: torch.device) -> None:
        ranks = tuple(dist.get_process_group_ranks(group))
        self.rank, self.workers, self.size = ranks.index(dist.get_rank()), len(ranks), size
        key = str(self.meeting), ranks
        _made[key] = _made.get(key, -1) + 1
        path = f"{self.meeting}-memory-{'-'.join(map(str, ranks))}-{_made[key]}"
        signals = self.workers * self.workers * signals_of(self.workers)
        whole = torch.from_file(path, shared=True, size=self.workers * size + 4 * signals, dtype=torch.uint8)
        # `.data`: autograd must not take a write to another's buffer for one to its own.
        self._buffers = [part.data for part in whole[: self.workers * size].view(self.workers, size)]
        self._flags = whole[self.workers * size :].view(torch.int32).view(self.workers, self.workers, -1)  # to, from, number
        dist.barrier(group)

    def of(self, rank: int) -> Tensor:
        return self._buffers[rank]

    def signal(self, rank: int, number: int) -> None:
        self._turn(self._flags[rank, self.rank], number, 0, 1)

    def wait(self, rank: int, number: int) -> None:
        self._turn(self._flags[self.rank, rank], number, 1, 0)

    def barrier(self, number: int) -> None:
        others = [rank for rank in range(self.workers) if rank != self.rank]
        for rank in others:
            self.signal(rank, number)
        for rank in others:
            self.wait(rank, number)

    def _turn(self, flags: Tensor, number: int, before: int, after: int) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while int(flags[number]) != before:
            if time.monotonic() > deadline:
                raise RuntimeError(f"waited {LIMIT_SECONDS:g} s for signal {number} to be {before}")
            time.sleep(0)
        _fence()
        flags[number] = after
        _fence()
