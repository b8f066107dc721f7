"""A ridge whose penalty and whose scores of its own rows come from the leave-one-out error, in closed form.

It is fitted through the products of rows, since there are far more features than rows. Shapes: N row, F feature, V answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PENALTIES = torch.logspace(-3, 6, 19, dtype=torch.float64)
LEAST_SPREAD = 1e-6  # of a feature; one that hardly changes says nothing
WARMTHS = torch.logspace(-1, 1, 21, dtype=torch.float64)


@dataclass(frozen=True)
class LeaveOneOut:
    """Scores are `features @ weights + bias`; `others_NV` are those of each fitted row by all other rows."""

    weights_FV: Tensor
    bias_V: Tensor
    others_NV: Tensor


def fit(features_NF: Tensor, targets_NV: Tensor, importance_N: Tensor) -> LeaveOneOut:
    """Fit to rows that count by their importance, with the penalty whose leave-one-out error is least."""
    share_N1 = (importance_N / importance_N.sum()).double()[:, None]
    mean_F = (features_NF * share_N1.to(features_NF.dtype)).sum(0)
    spread_F = ((features_NF - mean_F).square() * share_N1.to(features_NF.dtype)).sum(0).sqrt()
    scale_F = torch.where(spread_F > LEAST_SPREAD, 1.0 / spread_F.clamp(min=LEAST_SPREAD), 0.0)
    mean_V = (targets_NV * share_N1).sum(0)
    root_N1 = (share_N1 * len(features_NF)).sqrt()
    rows_NF = ((features_NF - mean_F) * scale_F).mul_(root_N1.to(features_NF.dtype))
    wanted_NV = (targets_NV - mean_V) * root_N1
    values_N, vectors_NN = torch.linalg.eigh((rows_NF @ rows_NF.t()).double())
    values_N = values_N.clamp(min=0.0)
    turned_NV = vectors_NN.t() @ wanted_NV
    best: tuple[float, Tensor, Tensor] | None = None
    for penalty in PENALTIES.tolist():
        dual_NV = vectors_NN @ (turned_NV / (values_N + penalty)[:, None])
        hat_N = share_N1[:, 0] + (vectors_NN.square() @ (values_N / (values_N + penalty)))
        missed_NV = penalty * dual_NV / (1.0 - hat_N).clamp(min=1e-9)[:, None]  # of each row, by the others
        error = float(missed_NV.square().mean())
        if best is None or error < best[0]:
            best = error, dual_NV, targets_NV - missed_NV / root_N1.clamp(min=1e-9)
    assert best is not None
    _, dual_NV, others_NV = best
    weights_FV = (rows_NF.t() @ dual_NV.to(rows_NF.dtype)) * scale_F[:, None]
    return LeaveOneOut(weights_FV, (mean_V - mean_F.double() @ weights_FV.double()).to(weights_FV.dtype), others_NV)


def warmth_of(scores_NV: Tensor, labels_N: Tensor) -> float | None:
    """The factor of scores whose softmax is the likeliest to have given the labels; scores are those of rows by the others.

    None if no class has two rows: who is alone cannot be known from the others.
    """
    known = torch.bincount(labels_N, minlength=scores_NV.shape[1])[labels_N] > 1
    if not bool(known.any()):
        return None
    losses = [torch.nn.functional.cross_entropy(warmth * scores_NV[known], labels_N[known]) for warmth in WARMTHS.to(scores_NV.device)]
    return float(WARMTHS[int(torch.stack(losses).argmin())])
