"""A linear chain over labels, as torch's operations define it: the log-likelihood of what is known of its labels, and its best path.

A path of labels k_1 … k_n scores start[k_1] + end[k_n] + the emissions of its labels + the transitions from each to the next. A score of
-inf rules a label or a transition out. The loss of a sequence is log Z - log Z', where Z is the sum of e^score over all paths, and Z' that
over the paths through the known labels: one path if all are known, and all of them, which makes a loss of 0, if none is.

Sums are taken as in a hidden Markov model, of probabilities that are scaled at every step. They are float64, which holds e^±700 beside the
likeliest label of a step: nothing that a network could learn underflows.

Shapes: T time, B lane, V labels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

UNKNOWN = -100  # in the place of a label that is not known, and after the end of a sequence


class Chain(NamedTuple):
    """Scores of the first label [V], of each label [from, to] after another, and of the last label [V]."""

    start_V: Tensor
    transitions_VV: Tensor
    end_V: Tensor


def losses(emissions_TBV: Tensor, tags_TB: Tensor, lengths_B: Tensor, chain: Chain) -> Tensor:
    """The negative log-likelihood of each lane, in float64; 0 for a lane without steps."""
    steps, _, labels = emissions_TBV.shape
    wide = Chain(*(each.double() for each in chain))
    step_T1 = torch.arange(steps, device=emissions_TBV.device)[:, None]
    real_TB = step_T1 < lengths_B
    scores_TBV = emissions_TBV.double()
    scores_TBV = scores_TBV + torch.where((step_T1 == 0)[..., None], wide.start_V, 0.0)
    scores_TBV = scores_TBV + torch.where((step_T1 == lengths_B - 1)[..., None], wide.end_V, 0.0)
    scores_TBV = torch.where(real_TB[..., None], scores_TBV, 0.0)
    known_TB1 = (real_TB & (tags_TB != UNKNOWN))[..., None]
    other_TBV = known_TB1 & (tags_TB[..., None] != torch.arange(labels, device=tags_TB.device))
    held_TBV = torch.where(other_TBV, -torch.inf, scores_TBV)
    free_B, held_B = log_sums(torch.cat([scores_TBV, held_TBV], dim=1), lengths_B.repeat(2), wide.transitions_VV).chunk(2)
    return free_B - held_B


def log_sums(scores_TBV: Tensor, lengths_B: Tensor, transitions_VV: Tensor) -> Tensor:
    """log Z of each lane, from the scores of its labels at each step and the transitions between them."""
    lowest = torch.finfo(scores_TBV.dtype).min
    most_TB1 = scores_TBV.detach().amax(-1, keepdim=True).clamp(min=lowest)
    highest = transitions_VV.detach().amax().clamp(min=lowest)
    shares_TBV, steps_VV = (scores_TBV - most_TB1).exp(), (transitions_VV - highest).exp()
    logs_TB = []
    now_BV = shares_TBV[0]
    for t, share_BV in enumerate(shares_TBV):
        real_B1 = (t < lengths_B)[:, None]
        next_BV = (now_BV @ steps_VV) * share_BV if t else share_BV
        size_B1 = torch.where(real_B1, next_BV.sum(-1, keepdim=True), 1.0)  # 1 before the logarithm, whose slope at 0 would be infinite
        now_BV = torch.where(real_B1, next_BV / size_B1, now_BV)
        logs_TB.append(size_B1.log()[:, 0])
    real_TB = torch.arange(len(scores_TBV), device=lengths_B.device)[:, None] < lengths_B
    total_B = torch.stack(logs_TB).sum(0) + torch.where(real_TB, most_TB1[..., 0], 0.0).sum(0)
    # The last term is 0: transitions have a gradient also where no lane has two steps, as they have where another worker's lanes do.
    total: Tensor = total_B + highest * (lengths_B - 1).clamp(min=0) + 0.0 * steps_VV.sum()
    return total


def best_paths(emissions_TBV: Tensor, lengths_B: Tensor, chain: Chain) -> Tensor:
    """The path of the highest score in each lane [T, B], by Viterbi's algorithm; `UNKNOWN` after its end. Of equals, lower labels win."""
    steps, _, labels = emissions_TBV.shape
    best_BV, label_V = chain.start_V + emissions_TBV[0], torch.arange(labels, device=emissions_TBV.device)
    before = []
    for t in range(1, steps):
        real_B1 = (t < lengths_B)[:, None]
        best = (best_BV[:, :, None] + chain.transitions_VV).max(dim=1)
        before.append(torch.where(real_B1, best.indices, label_V))
        # Less the best so far, so that the scores of long sequences keep their last digits.
        best_BV = torch.where(real_B1, best.values - best_BV.amax(-1, keepdim=True) + emissions_TBV[t], best_BV)
    path_TB = [(best_BV + chain.end_V).argmax(-1)]
    for before_BV in reversed(before):
        path_TB.append(before_BV.gather(1, path_TB[-1][:, None])[:, 0])
    real_TB = torch.arange(steps, device=lengths_B.device)[:, None] < lengths_B
    return torch.where(real_TB, torch.stack(path_TB[::-1]), UNKNOWN)
