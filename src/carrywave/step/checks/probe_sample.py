"""What a user's module is probed with: a few lanes and steps of a batch, and the pieces that they are cut into.

Shapes: T time, B lane, W width of the head's input.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from carrywave.data.batch import Batch

STEPS, CHUNK, LANES = 12, 5, 5  # gives chunks of 5, 5 and 2 steps; 2 lanes and 3
Axis = Literal["time", "lanes"]


class Piece(NamedTuple):
    """Steps [first, end) of lanes [low, high)."""

    first: int
    end: int
    low: int
    high: int


@dataclass(frozen=True)
class ProbeSample:
    """A few lanes and steps of a batch, and random input for the head."""

    x: Tensor  # [T, B, …]
    y: Tensor  # [T, B, W]
    targets: Tensor | None  # [T, B, …], or [B, …] where the head pools
    lengths: Tensor  # [B]
    lanes: Tensor  # [B]
    key: Tensor

    def to(self, dtype: torch.dtype) -> ProbeSample:
        """The sample with its floating-point tensors in this dtype."""

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        return replace(self, x=cast(self.x), y=cast(self.y), targets=None if self.targets is None else cast(self.targets))

    @property
    def all(self) -> Piece:
        """The whole sample as one piece."""
        return Piece(0, self.x.shape[0], 0, self.x.shape[1])

    def pieces(self, axis: Axis) -> list[Piece]:
        """The sample cut along an axis."""
        steps, lanes = self.x.shape[:2]
        if axis == "time":
            size = min(CHUNK, -(-steps // 2))
            return [Piece(first, min(first + size, steps), 0, lanes) for first in range(0, steps, size)]
        half = lanes // 2
        return [Piece(0, steps, low, high) for low, high in ((0, half), (half, lanes)) if low < high]


def sample_of(batch: Batch, key: Tensor, width: int, *, pooled: bool, whole_time: bool) -> ProbeSample:
    """Take the longest of this worker's lanes; if it has only one, add a time-reversed copy."""
    steps = batch.steps if whole_time else min(batch.steps, STEPS)
    chosen = torch.argsort(batch.lengths, descending=True, stable=True)[:LANES]
    x, targets = batch.inputs[:steps, chosen], batch.targets
    if targets is not None:
        targets = targets[chosen] if pooled else targets[:steps, chosen]
    lengths, lanes = batch.lengths[chosen].clamp(max=steps), batch.lanes[chosen]
    if lanes.shape[0] == 1:
        x = torch.cat((x, x.flip(0)), dim=1)
        targets = None if targets is None else torch.cat((targets, targets if pooled else targets.flip(0)), dim=0 if pooled else 1)
        lengths, lanes = lengths.repeat(2), torch.cat((lanes, lanes + 1))
    # Drawn on the host from a separate generator: the same on every worker, and without disturbing anyone else's random numbers.
    y = torch.rand(steps, lanes.shape[0], width, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return ProbeSample(x, y.to(x.device), targets, lengths, lanes, key.to(x.device))
