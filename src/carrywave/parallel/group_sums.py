"""Sums over workers, through a process group of torch.distributed."""

from __future__ import annotations

from typing import Protocol

import torch.distributed as dist
from torch import Tensor


class Summing(Protocol):
    """All-reduces over one group of workers; the result has the same bits on each of them."""

    @property
    def in_stream(self) -> bool:
        """True if the host takes no part: the sum is work of the current CUDA stream, in its order, and can be captured."""

    def all_reduce(self, tensor: Tensor) -> dist.Work | None:
        """Replace a contiguous tensor by its sum over the workers, once the returned work has been waited for."""


class GroupSum:
    """All-reduces of gloo or NCCL."""

    in_stream = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def all_reduce(self, tensor: Tensor) -> dist.Work | None:
        work: dist.Work | None = dist.all_reduce(tensor, group=self.group, async_op=True)
        return work
