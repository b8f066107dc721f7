"""What a user's module is tried with: a full batch, or a few of its lanes and steps.

Shapes: T time, B lane, W width of the head's input.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from carrywave.data.batch import IGNORED, Batch
from carrywave.kernels.lengths import real_steps
from carrywave.model.sample_weights import for_each_target
from carrywave.step.checks.own_modules.cuts import Cut, Piece

STEPS, CHUNK, LANES = 12, 5, 5  # of the few: gives chunks of 5, 5 and 2 steps; 2 lanes and 3


@dataclass(frozen=True)
class ProbeSample:
    """Lanes and steps of a batch, and random input for the head."""

    x: Tensor  # [T, B, …]
    y: Tensor  # [T, B, W]
    targets: Tensor | None  # [T, B, …], or [B, …] where the head pools
    lengths: Tensor  # [B]
    lanes: Tensor  # [B]
    key: Tensor
    weights: Tensor | None = None  # of the targets: [T, B, …] or [B]
    scale: float = 1.0  # of the gradients
    shows: bool = True  # False if a head's forward cannot be called with its input alone
    maskable: bool = True  # False if what reads the targets may not stand missing ones: torch's CTC loss crashes on the CPU

    def to(self, dtype: torch.dtype) -> ProbeSample:
        """The sample with its floating-point tensors in this dtype."""

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        targets, weights = (None if each is None else cast(each) for each in (self.targets, self.weights))
        return replace(self, x=cast(self.x), y=cast(self.y), targets=targets, weights=weights)

    def weights_of(self, targets: Tensor, at: Piece, *, by_lane: bool) -> dict[str, Tensor]:
        """The weights of a piece, as a loss is given them beside its targets; none if there are none."""
        if self.weights is None:
            return {}
        own = self.weights[at.low : at.high] if self.weights.dim() == 1 else self.weights[at.first : at.end, at.low : at.high]
        return {"weights": for_each_target(own, targets, pooled=by_lane)}

    @property
    def whole(self) -> Cut:
        """The sample in one piece."""
        return Cut.none(*self.x.shape[:2])

    @property
    def chunks(self) -> Cut:
        """The sample cut along time."""
        steps = self.x.shape[0]
        size = min(CHUNK, -(-steps // 2))
        return replace(self.whole, times=tuple((first, min(first + size, steps)) for first in range(0, steps, size)))

    @property
    def halves(self) -> Cut:
        """The sample cut along lanes."""
        lanes = self.x.shape[1]
        return replace(self.whole, lanes=((0, lanes // 2), (lanes // 2, lanes)))


def all_of(batch: Batch, key: Tensor, width: int, *, pooled: bool, y: Tensor | None = None, seed: int = 0) -> ProbeSample:
    """The whole batch, with `y` for the head, or numbers by this seed. As behind a layer, what the head reads of padding is zero."""
    batch = _by_lane(batch) if pooled else batch
    real_TB1 = real_steps(batch.lengths, batch.steps)
    y = numbers(batch.steps, batch.lanes.shape[0], width, seed).to(batch.lengths.device) if y is None else y
    y = torch.where(real_TB1, y, 0.0)
    return ProbeSample(batch.inputs, y, batch.targets, batch.lengths, batch.lanes, key.to(y.device), batch.weights)


def few_of(batch: Batch, key: Tensor, width: int, *, pooled: bool, whole_time: bool) -> ProbeSample:
    """Some steps of the longest lanes; if there is only one lane, with a copy of it that runs backwards in time."""
    batch = _by_lane(batch) if pooled else batch
    steps = batch.steps if whole_time else min(batch.steps, STEPS)
    chosen = torch.argsort(batch.lengths, descending=True, stable=True)[:LANES]
    x, targets = batch.inputs[:steps, chosen], batch.targets
    if targets is not None:
        targets = targets[chosen] if pooled else targets[:steps, chosen]
    weights = batch.weights
    if weights is not None:
        weights = weights[chosen] if weights.dim() == 1 else weights[:steps, chosen]
    lengths, lanes = batch.lengths[chosen].clamp(max=steps), batch.lanes[chosen]
    if lanes.shape[0] == 1:
        x = torch.cat((x, x.flip(0)), dim=1)
        targets = None if targets is None else torch.cat((targets, targets if pooled else targets.flip(0)), dim=0 if pooled else 1)
        weights = None if weights is None else torch.cat((weights, weights.flip(0)), dim=0 if weights.dim() == 1 else 1)
        lengths, lanes = lengths.repeat(2), torch.cat((lanes, lanes + 1))
    return ProbeSample(x, numbers(steps, lanes.shape[0], width).to(x.device), targets, lengths, lanes, key.to(x.device), weights)


def _by_lane(batch: Batch) -> Batch:
    """The batch of a head that pools with one target for each lane: of several sequences in a lane, that of the last."""
    if batch.resets is None or batch.targets is None:
        return batch
    last_B = (batch.lengths - 1).clamp(min=0)
    at = last_B, torch.arange(len(last_B), device=last_B.device)
    return replace(batch, targets=batch.targets[at], weights=None if batch.weights is None else batch.weights[at], resets=None)


def is_absent(targets: Tensor) -> Tensor:
    """Which targets are missing."""
    return torch.isnan(targets) if targets.is_floating_point() else targets == IGNORED


def numbers(steps: int, lanes: int, width: int, seed: int = 0) -> Tensor:
    """[T, B, W] within ±1, drawn on the host from a generator of their own, so that nobody else's random numbers are disturbed."""
    return torch.rand(steps, lanes, width, generator=torch.Generator().manual_seed(seed)) * 2 - 1
