"""Sums over replicas for an exchange, in full precision or with half of the bytes, and how many bytes that were.

In bf16, each worker is sent its part of the sum by all others, adds them up in full precision in the order of their ranks, and sends the
sum to all: every number is rounded twice, however many replicas there are, and all workers end with the same bits.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from carrywave.parallel.liveness import lost_contact


class Wire:
    """The connection of a worker to the same stages of all replicas. `group` None: it is alone."""

    def __init__(self, group: dist.ProcessGroup | None, dtype: str, device: torch.device, backend: str) -> None:
        self.group, self.half = group, dtype == "bf16"
        # gloo reads host memory; NCCL the device's.
        self.staged = backend == "gloo" and device.type == "cuda"
        self.size = 1 if group is None else dist.get_world_size(group)
        self.sent_bytes = 0  # by this worker, since the start

    @lost_contact.kept
    def sum(self, flat: Tensor) -> Tensor:
        """The sum over all workers of a flat tensor, which may be overwritten. Collective."""
        if self.group is None:
            return flat.to(torch.bfloat16).to(flat.dtype) if self.half else flat
        source = flat.cpu() if self.staged else flat
        total = self._halves(source) if self.half else self._whole(source)
        return total.to(flat.device)

    def _whole(self, flat: Tensor) -> Tensor:
        dist.all_reduce(flat, group=self.group)
        # A ring sends every part twice around, less what a worker keeps.
        self.sent_bytes += 2 * (self.size - 1) * flat.nbytes // self.size
        return flat

    def _halves(self, flat: Tensor) -> Tensor:
        part = -(-flat.numel() // self.size)
        padded = torch.zeros(self.size * part, dtype=torch.bfloat16, device=flat.device)
        padded[: flat.numel()] = flat
        given = torch.empty_like(padded)
        dist.all_to_all_single(given, padded, group=self.group)
        total = given[:part].to(flat.dtype)
        for rank in range(1, self.size):
            total += given[rank * part : (rank + 1) * part]
        sums = [torch.empty(part, dtype=torch.bfloat16, device=flat.device) for _ in range(self.size)]
        dist.all_gather(sums, total.to(torch.bfloat16), group=self.group)
        self.sent_bytes += 2 * (self.size - 1) * part * padded.element_size()
        return torch.cat(sums)[: flat.numel()].to(flat.dtype)
