"""What workers that share the rows of a vocabulary exchange, through a process group of torch.distributed.

Over NCCL all of it is work of the device. Gloo carries tensors in host memory, so those of a GPU are copied there and back.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from carrywave.parallel.sums.group_sums import GroupSum


class RowExchange:
    """The collectives of one group of workers, of which this one has the number `index`."""

    def __init__(self, group: dist.ProcessGroup, index: int, of: int, backend: str) -> None:
        self._sums, self.index, self.of = GroupSum(group), index, of
        self._on_host = backend == "gloo"

    def __deepcopy__(self, memo: dict[int, object]) -> RowExchange:
        """A copy of a model, such as torch's AveragedModel, has the same connections."""
        return self

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group."""
        return self._sums.group

    def close(self) -> None:
        """Let go of the group, as `GroupSum` does."""
        self._sums.close()

    def gather(self, tensor: Tensor) -> Tensor:
        """[workers, …]: the tensors of all workers, which have one shape."""
        sent = self._for_transfer(tensor.contiguous())
        rows = sent.new_empty((self.of, *sent.shape))
        dist.all_gather(list(rows.unbind()), sent, group=self.group)
        return rows.to(tensor.device)

    def scatter_sum(self, parts: Tensor) -> Tensor:
        """The sum over all workers of the part `parts[index]` of each."""
        sent = self._for_transfer(parts.contiguous())
        if self._on_host:
            # Gloo has a sum for all, but none for each.
            sent = sent.clone() if sent.data_ptr() == parts.data_ptr() else sent
            dist.all_reduce(sent, group=self.group)
            return sent[self.index].to(parts.device)
        total = torch.empty_like(sent[0])
        dist.reduce_scatter(total, list(sent.unbind()), group=self.group)
        return total

    def sum_(self, tensor: Tensor) -> Tensor:
        """The sum over all workers, in place; the tensor must be contiguous."""
        return self._reduced(tensor, dist.ReduceOp.SUM)

    def maximum_(self, tensor: Tensor) -> Tensor:
        """The largest over all workers, element by element and in place; the tensor must be contiguous."""
        return self._reduced(tensor, dist.ReduceOp.MAX)

    def _reduced(self, tensor: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        sent = self._for_transfer(tensor)
        dist.all_reduce(sent, how, group=self.group)
        return tensor if sent is tensor else tensor.copy_(sent)

    def _for_transfer(self, tensor: Tensor) -> Tensor:
        return tensor.cpu() if self._on_host else tensor
