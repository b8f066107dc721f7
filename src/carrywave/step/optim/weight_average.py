"""An average of the weights, which training leaves alone and evaluation uses: `train.ema`, and NT-ASGD once it averages.

For each parameter w that an optimizer holds, its state has the average `ax` and the number `count` of weights in it. After a step,

    ax += (w - ax) * weight

with weight 1 / count for a plain mean, and (1 - decay) / (1 - decay ** count) for an exponential one. The latter is a weighted mean of the
weights after each step, those of one step earlier counting `decay` times as much; nothing is left of the initial weights, so a short run
can be averaged too.

As part of the optimizer's state, an average is saved and loaded with it. Nothing is read on the host, so that a step
can be captured with its average.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from carrywave.step.stats import by_dtype

AVERAGE, COUNT = "ax", "count"


def begin(optimizer: Optimizer, parameters: Iterable[nn.Parameter], counts: Tensor | int) -> None:
    """Start averages at the current weights, which count as this many steps: 0 if the first step is to replace them."""
    for parameter in parameters:
        count = torch.as_tensor(counts, dtype=torch.int64, device=parameter.device).clone()
        optimizer.state[parameter] |= {AVERAGE: parameter.detach().clone(), COUNT: count}


def averaged(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters that have an average: all that the optimizer holds, or none."""
    return [p for group in optimizer.param_groups for p in group["params"] if AVERAGE in optimizer.state.get(p, {})]


@torch.no_grad()
def move(optimizer: Optimizer, decay: float | None = None, skip: Tensor | None = None) -> None:
    """Take the weights after a step into their averages, including those without a gradient. `decay`: of an exponential average. `skip`: a
    float32 scalar on the device, 1 if the step was skipped, which leaves averages and counts as they are.
    """
    parameters = averaged(optimizer)
    if not parameters:
        return
    counts = [optimizer.state[parameter][COUNT] for parameter in parameters]
    if skip is None:
        torch._foreach_add_(counts, 1)
    else:
        torch._foreach_add_(counts, [(1 - skip).to(torch.int64)] * len(counts))
    count = counts[0].to(torch.float64)  # the same for all
    weight = count.reciprocal() if decay is None else (decay - 1) / torch.expm1(count * math.log(decay))
    if skip is not None:
        weight = torch.where(skip > 0, 0.0, weight)
    for part in by_dtype(parameters):
        averages: list[Tensor] = [optimizer.state[parameter][AVERAGE] for parameter in part]
        gaps = torch._foreach_sub(list(part), averages)
        torch._foreach_add_(averages, list(torch._foreach_mul(gaps, weight.to(part[0].dtype))))


@contextmanager
def swapped(optimizer: Optimizer) -> Iterator[None]:
    """Replace the parameters by their averages inside this context, if there are any; the raw weights are restored bit for bit."""
    parameters = averaged(optimizer)
    with torch.no_grad():
        raw = [parameter.clone() for parameter in parameters]
        for parameter in parameters:
            parameter.copy_(optimizer.state[parameter][AVERAGE])
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, kept in zip(parameters, raw, strict=True):
                parameter.copy_(kept)
