"""Sums over the CPU workers of one host, in memory that they share: nothing is sent but word that all are there.

A tensor that is to be summed lies in its worker's shared buffer. When all workers have filled theirs, each adds up one piece, in the order
of the ranks, and puts the sum where all can read it; when all have, everyone copies the whole sum. So all workers get the same bits. gloo
would send every number through sockets, several times.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from carrywave.parallel.memory.host_memory import shared_by
from carrywave.parallel.sums.group_sums import GroupSum, Working, added_up

LEAST_BYTES = 1 << 20  # of a tensor, below which it takes longer to meet twice than to send the numbers in one message


@dataclass(frozen=True)
class _Shared:
    """Tensors of the same size and dtype, one of each worker, and one for their sum."""

    all: tuple[Tensor, ...]  # by rank in the group
    sums: Tensor
    rank: int

    def begin_of(self, tensor: Tensor) -> int | None:
        """Where in this worker's tensor another one lies; None: not in it."""
        local = self.all[self.rank]
        if tensor.dtype != local.dtype or tensor.untyped_storage().data_ptr() != local.untyped_storage().data_ptr():
            return None
        return (tensor.data_ptr() - local.data_ptr()) // tensor.element_size()


class HostSum(GroupSum):
    """All-reduces of what lies in memory that `zeros` returned; anything else, and what is small, is left to gloo."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        # By the tensors that `zeros` returned, which somebody else holds.
        self._shared: MutableMapping[Tensor, _Shared] = WeakIdKeyDictionary()

    def zeros(self, count: int, /, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor in shared memory or, on every worker, in its own if there is none to be had. Collective, with the same count on each."""
        size, rank = count * dtype.itemsize, self.group.rank()
        buffers = shared_by(self.group, [2 * size, *[size] * (self.group.size() - 1)]) if count else None
        if buffers is None:
            return torch.zeros(count, dtype=dtype, device=device)
        local = buffers[rank][:size].view(dtype)
        self._shared[local] = _Shared(tuple(each[:size].view(dtype) for each in buffers), buffers[0][size:].view(dtype), rank)
        return local

    def all_reduce(self, tensor: Tensor) -> Working:
        """As `Summing`'s."""
        for shared in self._shared.values() if tensor.nbytes >= LEAST_BYTES else ():
            begin = shared.begin_of(tensor)
            if begin is not None:
                return _HostWork(self.group, shared, begin, tensor)
        return super().all_reduce(tensor)


class _HostWork:
    """A sum that has begun: this worker's numbers are there."""

    def __init__(self, group: dist.ProcessGroup, shared: _Shared, begin: int, tensor: Tensor) -> None:
        self.group, self.shared, self.begin, self.tensor = group, shared, begin, tensor
        self._all_there = _meet(group)

    def wait(self) -> None:
        """Add up this worker's piece, and take the sum of all."""
        self._all_there.wait()
        count, workers, rank = self.tensor.numel(), self.group.size(), self.group.rank()
        piece = -(-count // workers)
        low, high = (self.begin + min(count, number * piece) for number in (rank, rank + 1))
        added_up((each[low:high] for each in self.shared.all), out=self.shared.sums[low:high])
        _meet(self.group).wait()
        self.tensor.copy_(self.shared.sums[self.begin : self.begin + count].view_as(self.tensor))


def _meet(group: dist.ProcessGroup) -> dist.Work:
    work: dist.Work = dist.all_reduce(torch.zeros(1), group=group, async_op=True)
    return work
