"""What happens to the weights when replicas exchange: pure arithmetic on tensors, the same for all elements.

The *outer* weights are those that all replicas agree on. A replica starts from `start_of(outer)` and takes its own steps; the mean of what
these changed, weighted by the number of targets that each replica trained on, is the `difference`, and `step_` moves the outer weights by
it:

| rule | momentum m | outer weights w | replicas start from |
|---|---|---|---|
| average | | w + d | w |
| block momentum η (BMUF, Chen and Huo 2016) | η m + d | w + m | w |
| the same, Nesterov | η m + d | w + m | w + η m |
| DiLoCo (arXiv 2311.08105), Nesterov μ, rate a | μ m + d | w + a (d + μ m) | w |
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from carrywave.spec.train_spec import TrainSpec


@dataclass(frozen=True)
class OuterRule:
    """How outer weights move."""

    momentum: float = 0.0
    lr: float = 1.0
    ahead: bool = False  # replicas start ahead of the outer weights, by their momentum (block momentum, Nesterov)
    nesterov: bool = False  # the step itself looks ahead (DiLoCo)

    @staticmethod
    def of(spec: TrainSpec) -> OuterRule:
        """The rule that a spec asks for."""
        if spec.sync == "diloco":
            return OuterRule(spec.outer_momentum, spec.outer_lr, nesterov=True)
        return OuterRule(spec.block_momentum, ahead=spec.block_nesterov)

    @property
    def keeps_momentum(self) -> bool:
        """True if there is a tensor of momentum for every tensor of weights."""
        return self.momentum > 0

    def start_of(self, outer: Tensor, momentum: Tensor | None) -> Tensor:
        """Where replicas start from; the outer weights themselves unless the rule looks ahead."""
        return outer if momentum is None or not self.ahead else torch.add(outer, momentum, alpha=self.momentum)

    def step_(self, outer: Tensor, momentum: Tensor | None, difference: Tensor) -> None:
        """Move the outer weights by the mean difference of the replicas, in place."""
        if momentum is None:
            outer.add_(difference, alpha=self.lr)
            return
        momentum.mul_(self.momentum).add_(difference)
        if self.nesterov:
            outer.add_(torch.add(difference, momentum, alpha=self.momentum), alpha=self.lr)
        else:
            outer.add_(momentum, alpha=self.lr)


def fragments_due(step: int, every: int, fragments: int, *, last: bool) -> tuple[int, ...]:
    """The fragments to exchange after optimizer step `step`, counted from 1: each in its turn, and all at the end of an epoch or run."""
    if last:
        return tuple(range(fragments))
    period = every // fragments
    return () if step % period else ((step // period - 1) % fragments,)


def bounds(size: int, fragment: int, fragments: int) -> tuple[int, int]:
    """The range of the elements of a tensor that belongs to a fragment. Every tensor is cut alike, so fragments are equally large, and the
    same however layers are split into stages.
    """
    return size * fragment // fragments, size * (fragment + 1) // fragments


def weight_of(local_targets: float, total: float, replicas: int) -> float:
    """What the difference of a replica counts in the mean: its share of the targets; an equal share if there were none at all."""
    return local_targets / total if total else 1.0 / replicas
