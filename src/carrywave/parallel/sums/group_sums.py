"""Sums over workers through a process group of torch.distributed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Working(Protocol):
    """Work that has begun."""

    def wait(self) -> object:
        """Return when it is done."""


class Summing(Protocol):
    """Sums over one group of workers; the result has the same bits on each of them."""

    @property
    def on_device(self) -> bool:
        """True if the host takes no part: a sum begins after the work of the current CUDA stream so far, and can be captured."""

    @property
    def overlaps(self) -> bool:
        """True if a sum runs beside the work that follows it, until it is waited for."""

    def all_reduce(self, tensor: Tensor) -> Working | None:
        """Replace a contiguous tensor by its sum over the workers, once the returned work has been waited for."""


def added_up(parts: Iterable[Tensor], out: Tensor | None = None) -> Tensor:
    """The sum of two or more tensors, in their order: all workers that add up the same get the same bits."""
    first, second, *others = parts
    total = torch.add(first, second, out=out)
    for other in others:
        total += other
    return total


class GroupSum:
    """Collectives of gloo or NCCL."""

    overlaps = True

    def __init__(self, group: dist.ProcessGroup, *, on_device: bool = False) -> None:
        self.group, self.on_device = group, on_device

    def zeros(self, count: int, /, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor where it is summed fastest. Collective: every rank of the group must call it, with the same count."""
        return torch.zeros(count, dtype=dtype, device=device)

    def all_reduce(self, tensor: Tensor) -> Working:
        """As `Summing`'s."""
        work: Working = dist.all_reduce(tensor, group=self.group, async_op=True)
        return work
