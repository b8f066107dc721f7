"""The CTC loss (Graves et al. 2006): how unlikely a label sequence is, over all ways to lay it along the steps.

Our own instead of torch's: torch's reads lengths and targets on the host, so that a CUDA graph cannot hold it, and its gradient on a GPU is
summed in no fixed order. Here nothing depends on the host, every lane is computed by itself, and the number of operations depends on the
number of steps alone.

A label may last for several steps, and a blank may lie before, between and after labels; between two equal labels it must. Forwards (alpha)
and backwards (beta) are one recursion: beta is alpha of the reversed steps and labels, so both run side by side, as lanes of one loop.

Shapes: T time, B lane, V classes, L labels, S = 2 L + 1 places: a blank, a label, a blank, …, a blank.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def negative_log_likelihood(logs_TBV: Tensor, labels_BL: Tensor, blank: int) -> Tensor:
    """[B], from log-probabilities of all classes at each step; labels below 0 are padding, and follow the real ones.

    Infinite where labels do not fit into the steps. Steps after the end of a lane must give the blank a probability of 1.
    """
    found_B: Tensor = _Alignments.apply(logs_TBV, labels_BL, blank)  # type: ignore[no-untyped-call]
    return found_B


def steps_needed(labels_BL: Tensor) -> Tensor:
    """[B]: the fewest steps that labels fit into: one for each, and one for a blank between two that are equal."""
    repeats_BL = (labels_BL[:, 1:] == labels_BL[:, :-1]) & (labels_BL[:, 1:] >= 0)
    return (labels_BL >= 0).sum(-1) + repeats_BL.sum(-1)


class _Alignments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logs_TBV: Tensor, labels_BL: Tensor, blank: int) -> Tensor:
        count_B = (labels_BL >= 0).sum(-1)
        places_BS = _places(labels_BL, blank)
        emitted_TBS = logs_TBV.gather(2, places_BS.clamp(min=0).expand(len(logs_TBV), *places_BS.shape))
        number_S = torch.arange(places_BS.shape[1], device=labels_BL.device)
        starts_BS = (number_S < 2).expand_as(places_BS)
        ends_BS = (number_S == 2 * count_B[:, None]) | (number_S == 2 * count_B[:, None] - 1)
        both_ways = logs_TBV.requires_grad
        if both_ways:
            emitted_TBS = torch.cat([emitted_TBS, emitted_TBS.flip(0, 2)], dim=1)
            starts_BS = torch.cat([starts_BS, ends_BS.flip(1)])
            places_BS = torch.cat([places_BS, places_BS.flip(1)])
        alpha_TBS = _alpha(emitted_TBS, places_BS, starts_BS)
        lanes = len(labels_BL)
        total_B = torch.where(ends_BS, alpha_TBS[-1, :lanes], -math.inf).logsumexp(-1)
        if both_ways:
            # Both count what is emitted at their place, which is once too often.
            logs_TBS = alpha_TBS[:, :lanes] + (alpha_TBS[:, lanes:] - emitted_TBS[:, lanes:]).flip(0, 2) - total_B[:, None]
            # A place that cannot be reached may be one whose label is impossible at this step, too: -inf less -inf.
            shares_TBS = torch.nan_to_num(logs_TBS.exp(), nan=0.0, posinf=math.inf)
            classes_BLV = (labels_BL[..., None] == torch.arange(logs_TBV.shape[2], device=labels_BL.device)).to(logs_TBV.dtype)
            with torch.autocast(logs_TBV.device.type, enabled=False):
                # A product, not a scatter: on a GPU, that one would sum in any order.
                gradient_TBV = torch.einsum("tbl,blv->tbv", shares_TBS[..., 1::2], classes_BLV)
            gradient_TBV[..., blank] += shares_TBS[..., ::2].sum(-1)
            ctx.save_for_backward(torch.where(total_B[:, None].isfinite(), -gradient_TBV, math.nan))
        return -total_B

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_B: Tensor) -> tuple[Tensor, None, None]:
        (per_loss_TBV,) = ctx.saved_tensors
        return per_loss_TBV * gradient_B[:, None], None, None


def _places(labels_BL: Tensor, blank: int) -> Tensor:
    """[B, S]: the class at each place, below 0 where there is none."""
    lanes, count = labels_BL.shape
    places_BS = labels_BL.new_full((lanes, 2 * count + 1), blank)
    places_BS[:, 1::2] = labels_BL
    return places_BS


def _alpha(emitted_TBS: Tensor, places_BS: Tensor, starts_BS: Tensor) -> Tensor:
    """[T, B, S]: the logarithm of the probability of everything up to and with each step that ends at each place."""
    steps, lanes, places = emitted_TBS.shape
    # Two places that nothing reaches, before the first: every place then has two before it.
    alpha_TBR = emitted_TBS.new_full((steps, lanes, places + 2), -math.inf)
    alpha_TBR[0, :, 2:] = torch.where(starts_BS, emitted_TBS[0], -math.inf)
    jumps_BS = torch.zeros_like(starts_BS)  # from label to label, over the blank between them
    jumps_BS[:, 3::2] = places_BS[:, 3::2] != places_BS[:, 1:-2:2]
    barrier_BS = torch.zeros_like(emitted_TBS[0]).masked_fill(~jumps_BS, -math.inf)
    for step in range(1, steps):
        before_BR = alpha_TBR[step - 1]
        near_BS = torch.logaddexp(before_BR[:, 2:], before_BR[:, 1:-1])
        reached_BS = torch.logaddexp(near_BS, before_BR[:, :-2] + barrier_BS)
        torch.add(reached_BS, emitted_TBS[step], out=alpha_TBR[step, :, 2:])
    return alpha_TBR[:, :, 2:]
