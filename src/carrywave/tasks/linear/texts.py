"""Fits the linear part of texts: a logistic regression, or a ridge for numbers, on words, pairs of words and pieces of words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from carrywave.data.sequences import Sequences
from carrywave.tasks.linear.ngrams import NGrams
from carrywave.tasks.linear.part import NETWORK_SHARE, LinearPart, LinearRows

PENALTY = 0.4  # times half the squares of the weights, beside the sum of the losses
MOST_ROUNDS = 60


def fit(
    kind: str,
    answers: int,
    train: Sequences,
    held: Sequences | None,
    count: int,
    vocabulary: Sequence[str],
    class_weights: Tensor | None = None,
) -> LinearPart | None:
    """Fit to the training texts and those held out of them; None if fewer than two have a target.

    What it answers for one that was held out is found by a fit to the others.
    """
    known = LinearRows.of(kind, train, held, class_weights)
    inside = np.flatnonzero(known.rows < len(train))
    outside = np.flatnonzero(known.rows >= len(train))
    if len(inside) < 2:
        return None
    parts = []
    for chosen in (inside, *((np.arange(len(known.rows)),) if len(outside) else ())):
        rows = known.some(chosen)
        features = NGrams.fit(rows.data, rows.rows, vocabulary, count)
        weights_FV, bias_V = solved(features, rows, kind, rows.targets(kind, answers).float())
        empty = torch.zeros(0, dtype=torch.int64), torch.zeros(0, answers)
        parts.append(LinearPart(features, weights_FV, bias_V, kind, 1.0, *empty, NETWORK_SHARE, NETWORK_SHARE))
    others, part = parts[0], parts[-1]
    starts_N, answers_NV, score = torch.zeros(0, dtype=torch.int64), torch.zeros(0, answers), ""
    if held is not None and len(outside):
        answers_NV = torch.from_numpy(others(held))
        starts_N = torch.tensor(held.starts.tolist(), dtype=torch.int64)
        if kind == "classes":
            right = (answers_NV.argmax(1).numpy() == np.asarray(held.labels))[np.asarray(held.labels) >= 0]
            score = f", right for {right.mean():.1%} of {len(right):,} held-out texts"
    seen = f"{part.features.count:,} words, pairs and pieces of words{score}"
    return LinearPart(
        *(part.features, part.weights_FV, part.bias_V, kind, 1.0, starts_N, answers_NV, NETWORK_SHARE, NETWORK_SHARE), seen=seen
    )


def solved(features: NGrams, rows: LinearRows, kind: str, targets_NV: Tensor) -> tuple[Tensor, Tensor]:
    """The weights [F, V] and the bias [V] with the least penalised loss."""
    entries = features.entries(rows.data, rows.rows)
    turned = entries.turned(features.count)
    importance_N1 = torch.from_numpy(rows.importance_N).float()[:, None]
    weights_FV, bias_V = torch.zeros(features.count, targets_NV.shape[1]), torch.zeros(targets_NV.shape[1])
    wanted_NV = targets_NV if kind == "numbers" else (targets_NV + 1.0) / 2.0
    search = torch.optim.LBFGS([weights_FV, bias_V], max_iter=MOST_ROUNDS, history_size=10, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        # The gradients are written out: torch's sum over the texts of a feature is many times as slow as one over the features of a text.
        scores_NV = entries.times(weights_FV) + bias_V
        if kind == "classes":
            losses_NV, found_NV = -wanted_NV * scores_NV.log_softmax(1), scores_NV.softmax(1)
        elif kind == "labels":
            losses_NV, found_NV = torch.nn.functional.softplus(scores_NV) - wanted_NV * scores_NV, scores_NV.sigmoid()
        else:
            losses_NV, found_NV = (scores_NV - wanted_NV).square() / 2.0, scores_NV
        slopes_NV = (found_NV - wanted_NV) * importance_N1
        weights_FV.grad, bias_V.grad = turned.times(slopes_NV) + PENALTY * weights_FV, slopes_NV.sum(0)
        return (losses_NV * importance_N1).sum() + PENALTY / 2.0 * weights_FV.square().sum()

    with torch.no_grad():
        search.step(loss)  # type: ignore[no-untyped-call]
    return weights_FV, bias_V
