"""Cuts a worker's part of a batch, and the state of its lanes, into canonical shards, and fixes what else affects the bits of a result.

Each shard is computed separately from its own memory, so that what a kernel sees does not depend on how many shards this worker has.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from carrywave.data.batch import Batch
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.startup.launcher_env import threads_dealt
from carrywave.plan.canonical_shards import REPLICAS, bounds, shards_of


def local_shards(mesh: Mesh) -> range | None:
    """The shards of this worker; None if this number of replicas cannot share them evenly."""
    return shards_of(mesh.replica, mesh.plan.replicas) if mesh.plan.replicas in REPLICAS else None


class Cut:
    """The shards of one worker's part of a batch."""

    def __init__(self, mesh: Mesh, batch: Batch, *, pooled: bool) -> None:
        self.batch, self.pooled = batch, pooled
        real, cells = batch.cells
        self.lanes = cells // batch.steps  # over all workers
        # Whether any step is padding selects the code path, so this must hold for the whole batch, not just this worker's part.
        self.full = real == cells
        self.first = mesh.share().bounds(self.lanes)[0]

    def lane_range(self, shard: int) -> tuple[int, int]:
        """The half-open range of a shard's lanes, relative to this worker's first lane."""
        low, high = bounds(self.lanes, shard)
        return low - self.first, high - self.first

    def part(self, shard: int) -> Batch | None:
        """The lanes of a shard as a batch; None if it has none."""
        low, high = self.lane_range(shard)
        if low == high:
            return None
        part = self.batch.take(low, high, pooled=self.pooled)
        copies = {field.name: _aligned_copy(value) for field in fields(part) if isinstance(value := getattr(part, field.name), Tensor)}
        return replace(part, **copies, real=part.steps * (high - low) if self.full else -1)  # type: ignore[arg-type]

    def state(self, shard: int, state: Sequence[Tensor]) -> list[Tensor]:
        """The state of a shard's lanes, out of the state of all this worker's lanes."""
        low, high = self.lane_range(shard)
        return [_aligned_copy(tensor[:, low:high]) for tensor in state]


def parts_of(mesh: Mesh, batch: Batch, shards: Sequence[int] | None, *, pooled: bool) -> Iterator[tuple[int, Batch]]:
    """This worker's part of a batch, by shard; as a single part, number 0, if `shards` is None."""
    if shards is None:
        yield 0, batch
        return
    cut = Cut(mesh, batch, pooled=pooled)
    for shard in shards:
        if (part := cut.part(shard)) is not None:
            yield shard, part


def _aligned_copy(tensor: Tensor) -> Tensor:
    """A contiguous copy at an aligned address."""
    return tensor.clone(memory_format=torch.contiguous_format)


def settle(device: torch.device) -> None:
    """Fix process-wide settings that affect the bits of a matrix product. Call before anything is computed.

    On the CPU this is the number of threads: one, unless the user (not a launcher) set OMP_NUM_THREADS. On CUDA it is the cuBLAS workspace,
    unless the user configured it, and cuDNN's choice of algorithms.
    """
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:2")
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
    elif "OMP_NUM_THREADS" not in os.environ or threads_dealt():
        torch.set_num_threads(1)
