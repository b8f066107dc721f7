"""Pooling over the real steps of a lane, for sequences that may arrive in several time chunks.

What was seen of a lane is one row of numbers, beside the count of its steps; a chunk is added to it, and the result is read once, at the
end. However a sequence is cut, result and gradient are those of the whole.

| pool | the row | the result |
|---|---|---|
| last | the output at the last real step | the same |
| mean | the sum of the outputs | divided by their number |
| max | the greatest so far of each unit | the same |
| mean_max | both | both |
| attention | outputs times their weights, the sum of the weights, and the highest score | the first divided by the second |

The weight of a step in attention is exp(score - highest score so far), where the score is the output times a learned query; when a higher
score comes, what was seen is scaled down to it. So the result is a softmax over all steps that never overflows.

Shapes: T time, B lane, W width of the last layer, R width of the row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from carrywave.errors import UserError
from carrywave.kernels.lengths import last_real, real_steps

POOLS = ("last", "mean", "max", "attention", "mean_max")


def check_pool(pool: str) -> str:
    """Return a way of pooling if it is known, otherwise raise."""
    if pool not in POOLS:
        raise UserError(f"pool={pool} is unknown; use {', '.join(POOLS[:-1])} or {POOLS[-1]}")
    return pool


def row_width(pool: str, width: int) -> int:
    """R: the numbers that are kept of a lane."""
    return {"mean_max": 2 * width, "attention": width + 2}.get(pool, width)


def result_width(pool: str, width: int) -> int:
    """The numbers that come out for a lane."""
    return 2 * width if pool == "mean_max" else width


def add(pool: str, y_TBW: Tensor, lengths_B: Tensor, seen_BR: Tensor, count_B: Tensor, *, two_ways: bool, query_W: Tensor | None) -> Tensor:
    """The row of every lane after a chunk. `two_ways`: the second half of the outputs was read backwards, and ends at the first step."""
    width = y_TBW.shape[-1]
    real_TB1 = real_steps(lengths_B, y_TBW.shape[0])
    match pool:
        case "mean":
            return seen_BR + torch.where(real_TB1, y_TBW, 0.0).sum(0)
        case "max":
            return _greatest(y_TBW, real_TB1, lengths_B, seen_BR, count_B)
        case "mean_max":
            total_BW = seen_BR[:, :width] + torch.where(real_TB1, y_TBW, 0.0).sum(0)
            return torch.cat((total_BW, _greatest(y_TBW, real_TB1, lengths_B, seen_BR[:, width:], count_B)), dim=-1)
        case "attention":
            assert query_W is not None
            return _attended(y_TBW, real_TB1, lengths_B, seen_BR, count_B, query_W.to(y_TBW.dtype))
    last_BW = last_real(y_TBW, lengths_B, seen_BR)
    if two_ways:
        half = width // 2
        begins_B1 = ((count_B == 0) & (lengths_B > 0))[:, None]
        last_BW = torch.cat((last_BW[:, :half], torch.where(begins_B1, y_TBW[0, :, half:], seen_BR[:, half:])), dim=-1)
    return last_BW


def result(pool: str, seen_BR: Tensor, count_B: Tensor) -> Tensor:
    """What was pooled of every lane; zeros for a lane without real steps."""
    steps_B1 = count_B.clamp(min=1)[:, None]
    match pool:
        case "mean":
            return seen_BR / steps_B1
        case "mean_max":
            width = seen_BR.shape[1] // 2
            return torch.cat((seen_BR[:, :width] / steps_B1, seen_BR[:, width:]), dim=-1)
        case "attention":
            # The highest score has the weight 1, so the sum is at least 1 where there is a step.
            return seen_BR[:, :-2] / torch.where(count_B[:, None] > 0, seen_BR[:, -2:-1], 1.0)
    return seen_BR


def _greatest(y_TBW: Tensor, real_TB1: Tensor, lengths_B: Tensor, seen_BW: Tensor, count_B: Tensor) -> Tensor:
    # Of equal values the first has the gradient, within a chunk and between chunks: outputs in half precision are often equal.
    here_BW = torch.where(real_TB1, y_TBW, -torch.inf).max(0).values
    first_B1, some_B1 = (count_B == 0)[:, None], (lengths_B > 0)[:, None]
    return torch.where(some_B1 & (first_B1 | (here_BW > seen_BW)), here_BW, seen_BW)


def _attended(y_TBW: Tensor, real_TB1: Tensor, lengths_B: Tensor, seen_BR: Tensor, count_B: Tensor, query_W: Tensor) -> Tensor:
    y_TBW = torch.where(real_TB1, y_TBW, 0.0)  # first of all: 0 times what padding may hold would be a gradient of the query
    score_TB1 = (y_TBW * query_W).sum(-1, keepdim=True)
    masked_TB1 = torch.where(real_TB1, score_TB1, -torch.inf)
    # The result does not depend on the highest score, so no gradient goes through it.
    before_B1 = seen_BR[:, -1:].detach()
    here_B1 = masked_TB1.detach().amax(0)
    first_B1, some_B1 = (count_B == 0)[:, None], (lengths_B > 0)[:, None]
    highest_B1 = torch.where(some_B1, torch.where(first_B1, here_B1, torch.maximum(before_B1, here_B1)), before_B1)
    scale_B1 = torch.where(first_B1, 0.0, (before_B1 - highest_B1).exp())
    weight_TB1 = torch.where(real_TB1, (torch.where(real_TB1, score_TB1, highest_B1) - highest_B1).exp(), 0.0)
    weighted_BW = seen_BR[:, :-2] * scale_B1 + (weight_TB1 * y_TBW).sum(0)
    return torch.cat((weighted_BW, seen_BR[:, -2:-1] * scale_B1 + weight_TB1.sum(0), highest_B1), dim=-1)
