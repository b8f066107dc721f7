"""Cutting what a worker holds of a batch, and the state of its lanes, into canonical shards; and what else must be fixed for equal bits.

A shard is computed by itself, from memory of its own: what a kernel sees does not depend on how many shards this worker has.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from carrywave.data.batch import Batch
from carrywave.parallel.mesh import Mesh
from carrywave.plan.canonical_shards import REPLICAS, bounds, shards_of


def own_shards(mesh: Mesh) -> range | None:
    """The shards of this worker; None where so many replicas cannot share them evenly."""
    return shards_of(mesh.replica, mesh.plan.replicas) if mesh.plan.replicas in REPLICAS else None


class Cut:
    """The shards of one worker's part of a batch."""

    def __init__(self, mesh: Mesh, batch: Batch, *, pooled: bool) -> None:
        self.batch, self.pooled = batch, pooled
        real, cells = batch.cells
        self.lanes = cells // batch.steps  # of all workers
        # Whether all steps are real decides which code runs: the whole batch is asked, not what this worker holds of it.
        self.full = real == cells
        self.first = mesh.share().bounds(self.lanes)[0]

    def span(self, shard: int) -> tuple[int, int]:
        """The first lane of a shard among those of this worker, and the one after its last."""
        low, high = bounds(self.lanes, shard)
        return low - self.first, high - self.first

    def part(self, shard: int) -> Batch | None:
        """The lanes of a shard; None where it has none."""
        low, high = self.span(shard)
        if low == high:
            return None
        part = self.batch.take(low, high, pooled=self.pooled)
        copies = {field.name: _own(value) for field in fields(part) if isinstance(value := getattr(part, field.name), Tensor)}
        return replace(part, **copies, real=part.steps * (high - low) if self.full else -1)  # type: ignore[arg-type]

    def state(self, shard: int, state: Sequence[Tensor]) -> list[Tensor]:
        """The state of a shard's lanes, from that of all lanes of this worker."""
        low, high = self.span(shard)
        return [_own(tensor[:, low:high]) for tensor in state]


def _own(tensor: Tensor) -> Tensor:
    """A copy that begins where memory is aligned, and has no gaps."""
    return tensor.clone(memory_format=torch.contiguous_format)


def settle(device: torch.device) -> None:
    """Fix for this process what changes the bits of a product besides its operands. Before anything is computed.

    On the CPU the number of threads: one, unless OMP_NUM_THREADS is the user's own, not a launcher's. On CUDA the memory that cuBLAS
    works in, unless the user has set it.
    """
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:2")
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
    elif "OMP_NUM_THREADS" not in os.environ or "CARRYWAVE_THREADS_DEALT" in os.environ:
        torch.set_num_threads(1)
