"""Pooling by sequence where several lie one after the other in a lane, each of which begins with a reset.

A chunk has K places for the sequences of a lane: in the first is the one that was under way before the chunk, and every reset begins the
next. What was seen of each is a row as in `pooling`, so that the results are those of a lane for each sequence, however time is cut. The
shapes depend on K alone, not on where the sequences begin, and every sum has a fixed order.

Shapes: T time, B lane, W width of the last layer, R width of the row, K places.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from carrywave.kernels.lengths import real_steps


class Places(NamedTuple):
    """Where the steps of a chunk belong."""

    place_TB: Tensor  # int64, of each step
    member_KTB: Tensor  # bool, the real steps of each place
    last_KB: Tensor  # int64, the last step of each place, -1 for one without steps
    count_KB: Tensor  # int64, its real steps in this chunk
    current_B: Tensor  # int64, the place that each lane has come to


def places_of(resets_TB: Tensor, lengths_B: Tensor, count: int) -> Places:
    """The places of a chunk's steps, of which there are `count`."""
    steps = resets_TB.shape[0]
    real_TB = real_steps(lengths_B, steps)[..., 0]
    place_TB = (resets_TB & real_TB).cumsum(0)
    each_K11 = torch.arange(count, device=resets_TB.device)[:, None, None]
    member_KTB = (place_TB == each_K11) & real_TB
    time_T1 = torch.arange(steps, device=resets_TB.device)[:, None]
    return Places(place_TB, member_KTB, torch.where(member_KTB, time_T1, -1).amax(1), member_KTB.sum(1), place_TB[-1])


def add(pool: str, y_TBW: Tensor, at: Places, seen_BR: Tensor, count_B: Tensor, *, two_ways: bool, query_W: Tensor | None) -> Tensor:
    """[K, B, R]: the row of every place after a chunk; `seen_BR` and `count_B` are those of the sequence that was under way before it."""
    width, places = y_TBW.shape[-1], len(at.count_KB)
    y_TBW = torch.where(at.member_KTB.any(0)[..., None], y_TBW, 0.0)  # whatever padding holds
    seen_KBR = torch.cat((seen_BR[None], seen_BR.new_zeros(places - 1, *seen_BR.shape)))
    begun_KB1 = torch.cat((count_B[None] > 0, torch.zeros_like(at.count_KB[1:], dtype=torch.bool)))[..., None]
    match pool:
        case "mean":
            return seen_KBR + _sums(y_TBW, at)
        case "max":
            return _greatest(y_TBW, at, seen_KBR, begun_KB1)
        case "mean_max":
            total_KBW = seen_KBR[..., :width] + _sums(y_TBW, at)
            return torch.cat((total_KBW, _greatest(y_TBW, at, seen_KBR[..., width:], begun_KB1)), dim=-1)
        case "attention":
            assert query_W is not None
            return _attended(y_TBW, at, seen_KBR, begun_KB1, query_W.to(y_TBW.dtype))
    some_KB1 = (at.count_KB > 0)[..., None]
    last_KBW = torch.where(some_KB1, _taken(y_TBW, at.last_KB), seen_KBR)
    if two_ways:
        half = width // 2
        first_KBW = _taken(y_TBW, at.last_KB - at.count_KB + 1)
        begins_KB1 = some_KB1 & ~begun_KB1
        last_KBW = torch.cat((last_KBW[..., :half], torch.where(begins_KB1, first_KBW[..., half:], seen_KBR[..., half:])), dim=-1)
    return last_KBW


def at_ends(target_TB: Tensor, at: Places, missing: float) -> Tensor:
    """[K, B, …]: the target at the last step of each place; `missing` where there is none."""
    index_KB = at.last_KB.clamp(min=0)
    index = index_KB.reshape(*index_KB.shape, *[1] * (target_TB.dim() - 2)).expand(*index_KB.shape, *target_TB.shape[2:])
    some = (at.last_KB >= 0).reshape(*index_KB.shape, *[1] * (target_TB.dim() - 2))
    return torch.where(some, target_TB.gather(0, index), missing)


def _taken(y_TBW: Tensor, step_KB: Tensor) -> Tensor:
    """[K, B, W]: the output at a step of each place. No two places take the same one, so gradients are never added up in any order."""
    return y_TBW.gather(0, step_KB.clamp(min=0)[..., None].expand(*step_KB.shape, y_TBW.shape[-1]))


def _sums(y_TBW: Tensor, at: Places) -> Tensor:
    return torch.einsum("ktb,tbw->kbw", at.member_KTB.to(y_TBW.dtype), y_TBW)


def _greatest(y_TBW: Tensor, at: Places, seen_KBW: Tensor, begun_KB1: Tensor) -> Tensor:
    # As in `pooling`, of equal values the first has the gradient; so its step is looked up, and the output taken there.
    steps = y_TBW.shape[0]
    with torch.no_grad():
        real_TB1 = at.member_KTB.any(0)[..., None]
        place_TBW = at.place_TB[..., None].expand_as(y_TBW)
        low_KBW = torch.full_like(seen_KBW, -torch.inf)
        best_KBW = low_KBW.scatter_reduce(0, place_TBW, torch.where(real_TB1, y_TBW, -torch.inf), "amax")
        equal_TBW = real_TB1 & (y_TBW == best_KBW.gather(0, place_TBW))
        time_TBW = torch.arange(steps, device=y_TBW.device)[:, None, None].expand_as(y_TBW)
        none_KBW = torch.full_like(seen_KBW, steps, dtype=torch.int64)
        first_KBW = none_KBW.scatter_reduce(0, place_TBW, torch.where(equal_TBW, time_TBW, steps), "amin")
    here_KBW = torch.where(first_KBW < steps, y_TBW.gather(0, first_KBW.clamp(max=steps - 1)), best_KBW)  # no step equals NaN
    some_KB1 = (at.count_KB > 0)[..., None]
    return torch.where(some_KB1 & (~begun_KB1 | (here_KBW > seen_KBW)), here_KBW, seen_KBW)


def _attended(y_TBW: Tensor, at: Places, seen_KBR: Tensor, begun_KB1: Tensor, query_W: Tensor) -> Tensor:
    score_TB = (y_TBW * query_W).sum(-1)
    # The result does not depend on the highest score, so no gradient goes through it.
    before_KB1 = torch.where(begun_KB1, seen_KBR[..., -1:].detach(), -torch.inf)
    here_KB1 = torch.where(at.member_KTB, score_TB.detach(), -torch.inf).amax(1)[..., None]
    highest_KB1 = torch.maximum(before_KB1, here_KB1)
    highest_KB1 = torch.where(highest_KB1 > -torch.inf, highest_KB1, 0.0)  # of a place without steps
    scale_KB1 = torch.where(begun_KB1, (before_KB1 - highest_KB1).exp(), 0.0)
    real_TB = at.member_KTB.any(0)
    above_TB = torch.where(real_TB, score_TB - highest_KB1[..., 0].gather(0, at.place_TB), 0.0)
    weight_TB1 = torch.where(real_TB, above_TB.exp(), 0.0)[..., None]
    weighted_KBW = seen_KBR[..., :-2] * scale_KB1 + _sums(weight_TB1 * y_TBW, at)
    return torch.cat((weighted_KBW, seen_KBR[..., -2:-1] * scale_KB1 + _sums(weight_TB1, at), highest_KB1), dim=-1)
