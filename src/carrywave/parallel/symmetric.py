"""Memory that the workers of one host share between their GPUs, and signals in it: torch's symmetric memory, behind one class.

Every worker of a group allocates a buffer of the same size and can write to those of the others, over NVLink or PCIe, or within one GPU. A
signal is a flag between two workers: raising it waits until it is down, awaiting it takes it down. Copies, raises and waits are ordinary
work of the current CUDA stream, in its order: the host does not take part, and they can be captured in a CUDA graph.

torch's interface for this is young, so nothing else in the package touches it.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from carrywave.parallel import process_groups

_PAD_BYTES = 2048  # torch's default, of which every signal takes 4 bytes for each worker of the group


class SharedMemory(Protocol):
    """One buffer on each worker of a group; `rank` is this worker's number in the group."""

    rank: int
    workers: int
    size: int  # of each buffer, in bytes

    def of(self, rank: int) -> Tensor:
        """A worker's buffer, as bytes."""

    def signal(self, rank: int, number: int) -> None:
        """Raise a signal for a worker, after all earlier work of the stream."""

    def wait(self, rank: int, number: int) -> None:
        """Let the stream wait for a worker's signal, and take it down."""

    def barrier(self, number: int) -> None:
        """Let the stream wait until those of all workers have reached this barrier."""


class SymmetricMemory:
    """Buffers on GPUs. Creating one is collective: every worker of the group must do so, in the same order."""

    def __init__(self, group: dist.ProcessGroup, size: int, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self.size = size
        self._own = symmetric.empty(size, dtype=torch.uint8, device=device)
        self._handle: Any = symmetric.rendezvous(self._own, group)
        self.rank: int = self._handle.rank
        self.workers: int = self._handle.world_size
        self._timeout_ms = int(process_groups.seconds() * 1000)
        self._buffers = [self._own if rank == self.rank else self._other(rank) for rank in range(self.workers)]

    def of(self, rank: int) -> Tensor:
        return self._buffers[rank]

    def signal(self, rank: int, number: int) -> None:
        self._handle.put_signal(rank, number, timeout_ms=self._timeout_ms)

    def wait(self, rank: int, number: int) -> None:
        self._handle.wait_signal(rank, number, timeout_ms=self._timeout_ms)

    def barrier(self, number: int) -> None:
        self._handle.barrier(number, timeout_ms=self._timeout_ms)

    def _other(self, rank: int) -> Tensor:
        found: Tensor = self._handle.get_buffer(rank, (self.size,), torch.uint8)
        return found


def symmetric_memory(group: dist.ProcessGroup, size: int, device: torch.device) -> SharedMemory:
    """Shared memory of a group of workers. Collective: every worker of the group must call it."""
    return SymmetricMemory(group, size, device)


def signals_of(workers: int) -> int:
    """How many signals there are between any two workers of a group of this size."""
    return _PAD_BYTES // 4 // workers
