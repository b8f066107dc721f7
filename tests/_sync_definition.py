"""`train.sync: local` and `diloco`, written down as plainly as possible: this defines the answer.

One process simulates all replicas, which take turns. The formulas are those of the papers, on whole weights: no buffers, no messages, no
differences in place of weights. The tests compare real processes with it, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

Weights = list[Tensor]
Inner = Callable[[Weights, int, int], int]  # (weights of a replica, its number, step): take one step in place, return its targets


@torch.no_grad()
def simulate(
    start: Weights,
    inner: Inner,
    due: Callable[[int], bool],
    *,
    replicas: int,
    steps: int,
    mode: Literal["local", "diloco"],
    momentum: float = 0.0,
    lr: float = 1.0,
) -> Weights:
    """The weights that the replicas agree on after `steps` steps each. `due(step)`: after which steps, counted from 1,
    weights are exchanged.
    """
    outer = [weight.clone() for weight in start]
    velocity = [torch.zeros_like(weight) for weight in start]
    begun = [weight.clone() for weight in start]  # where the replicas started from
    own = [[weight.clone() for weight in start] for _ in range(replicas)]
    targets = [[0] * replicas for _ in start]  # of each replica since the last exchange of each weight
    for step in range(1, steps + 1):
        for replica in range(replicas):
            with torch.enable_grad():
                count = inner(own[replica], replica, step)
            for place in range(len(start)):
                targets[place][replica] += count
        for place in range(len(start)):
            if not due(step):
                continue
            mean = _mean([weights[place] for weights in own], targets[place])
            w, v = outer[place], velocity[place]
            if mode == "local":
                # BMUF: G(t) is what the block changed, Δ(t) = η Δ(t-1) + G(t), W(t) = W(t-1) + Δ(t); with η = 0, W(t) is the mean.
                v = momentum * v + (mean - begun[place])
                w = w + v
            else:
                # DiLoCo: the outer gradient is what would undo the replicas' steps; SGD with Nesterov momentum as in torch.optim.
                gradient = w - mean
                v = momentum * v + gradient
                w = w - lr * (gradient + momentum * v)
            outer[place], velocity[place], begun[place] = w, v, w
            for weights in own:
                weights[place].copy_(begun[place])
            targets[place] = [0] * replicas
    return outer


def _mean(of_replicas: Sequence[Tensor], targets: Sequence[int]) -> Tensor:
    """The mean of one weight over the replicas, each weighted by the targets that it trained on."""
    total = sum(targets)
    parts = [weight * (count / total) for weight, count in zip(of_replicas, targets, strict=True)]
    return torch.stack(parts).sum(0)
