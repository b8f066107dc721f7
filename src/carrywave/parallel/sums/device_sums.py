"""Sums over the workers of one host, in device memory: all-reduces that the host takes no part in, so that they can be captured.

The tensor is cut into one piece for each worker. Everyone writes its numbers into the owners' buffers; each owner adds up its piece in the
order of the ranks, and writes the result into everyone's. So all workers get the same bits, whatever the timing. Barriers on the stream
keep a buffer from being overwritten before it has been read.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from carrywave.parallel.memory.symmetric import GrowingMemory, SharedMemory, padded, write
from carrywave.parallel.sums.group_sums import added_up

LEAST_BYTES = 1 << 16  # of the memory
SMALL = 1 << 13  # numbers that are not worth a second round
_ARRIVED, _READ = 0, 1  # barriers: numbers have arrived; they have been read

Make = Callable[[int], SharedMemory]  # shared memory of the group, of a given size


class DeviceSum:
    """All-reduces over one group. `make` creates its memory; every worker must sum tensors of the same sizes in the same order."""

    on_device = True
    overlaps = False  # it is work of the current stream

    def __init__(self, workers: int, make: Make) -> None:
        self.workers, self.memory = workers, GrowingMemory(make, LEAST_BYTES)

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace a contiguous tensor by its sum over the workers."""
        flat = tensor.view(-1)
        if flat.numel() > SMALL:
            self._by_pieces(flat)
        elif flat.numel():
            self._whole(flat)

    def _whole(self, flat: Tensor) -> None:
        """Everyone sends all of its numbers to everyone, and adds up what it has received."""
        room = padded(flat.nbytes)
        memory = self._memory(self.workers * room)
        index = memory.rank
        for rank in range(self.workers):
            write(_region(memory, rank, index * room, flat), flat)
        memory.barrier(_ARRIVED)
        self._total(memory, room, flat, out=flat)
        memory.barrier(_READ)

    def _by_pieces(self, flat: Tensor) -> None:
        """Everyone adds up one piece, and sends the result to everyone."""
        pieces: tuple[Tensor, ...] = torch.split(flat, -(-flat.numel() // self.workers))
        room = padded(pieces[0].nbytes)
        memory = self._memory(self.workers * room)
        index, results = memory.rank, memory.size // 2
        for rank, piece in enumerate(pieces):
            write(_region(memory, rank, index * room, piece), piece)
        memory.barrier(_ARRIVED)
        if index < len(pieces):
            total = self._total(memory, room, pieces[index])
            for rank in range(self.workers):
                write(_region(memory, rank, results + index * room, total), total)
        memory.barrier(_READ)
        for rank, piece in enumerate(pieces):
            write(piece, _region(memory, index, results + rank * room, piece))

    def _total(self, memory: SharedMemory, room: int, like: Tensor, out: Tensor | None = None) -> Tensor:
        """The sum of what the workers have sent to this one, in the order of the ranks."""
        return added_up((_region(memory, memory.rank, rank * room, like) for rank in range(self.workers)), out)

    def _memory(self, half: int) -> SharedMemory:
        """Memory with halves of at least this size: one for numbers, one for results, so that no worker overwrites results that another
        still reads, however large the next tensor is.
        """
        return self.memory.of(2 * half)


def _region(memory: SharedMemory, rank: int, begin: int, like: Tensor) -> Tensor:
    return memory.of(rank)[begin : begin + like.nbytes].view(like.dtype)
