"""Fits the linear part of signals: a ridge on random convolutions, whose scores of its own rows leave each out in its turn."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from carrywave.data.sequences import Sequences
from carrywave.data.shuffle import permutation
from carrywave.tasks.linear import leave_one_out
from carrywave.tasks.linear.part import NETWORK_SHARE, LinearPart, LinearRows
from carrywave.tasks.linear.random_convolutions import RandomConvolutions

MOST_ROWS, MOST_STEPS = 4096, 1 << 22  # that it is fitted on
SITE = 41  # of the keyed choice of rows


def fit(
    kind: str,
    answers: int,
    train: Sequences,
    held: Sequences | None,
    count: int,
    seed: int,
    device: torch.device,
    class_weights: Tensor | None = None,
) -> LinearPart | None:
    """Fit to the training sequences and those held out of them, at most `MOST_ROWS`; None if fewer than two have a target.

    What it answers for one that was held out is found from all others.
    """
    known = LinearRows.of(kind, train, held, class_weights)
    if len(known.rows) < 2:
        return None
    both, rows = known.data, known.rows
    limit = max(2, min(MOST_ROWS, int(MOST_STEPS / both.lengths[rows].mean())))
    chosen = np.sort(permutation(len(rows), seed=seed, epoch=0, site=SITE)[:limit])
    known = known.some(chosen)
    features = RandomConvolutions.fit(train, count, seed, device)
    features_NF = torch.empty(len(known.rows), features.count, device=device)
    for places_N, block_NF in features(both, known.rows):
        features_NF[places_N.to(device)] = block_NF
    targets_NV = known.targets(kind, answers).to(device)
    ridge = leave_one_out.fit(features_NF, targets_NV, torch.from_numpy(known.importance_N).to(device))
    warmth: float | None = 1.0
    if kind == "classes":
        warmth = leave_one_out.warmth_of(ridge.others_NV, targets_NV.argmax(1))
    # Where no class has two sequences, the answers cannot be judged, and a network has nothing to learn a class from.
    share = 0.0 if warmth is None else NETWORK_SHARE
    outside = np.flatnonzero(known.rows >= len(train))
    starts_N = torch.tensor(both.starts[known.rows[outside]].tolist(), dtype=torch.int64)
    seen = f"{len(known.rows):,} sequences, each left out in its turn"
    part = LinearPart(
        *(features, ridge.weights_FV, ridge.bias_V, kind, warmth or 1.0, starts_N, torch.zeros(0, answers), share, share),
        seen=f"{features.count:,} random convolutions and a ridge, {_found(kind, ridge.others_NV, targets_NV)} {seen}",
    )
    return replace(part, held_answers_NV=part.answers(ridge.others_NV[torch.from_numpy(outside).to(device)].float()).cpu())


def _found(kind: str, others_NV: Tensor, targets_NV: Tensor) -> str:
    if kind == "classes":
        return f"right for {float((others_NV.argmax(1) == targets_NV.argmax(1)).double().mean()):.1%} of"
    spread = (targets_NV - targets_NV.mean(0)).square().mean().clamp(min=1e-12)
    return f"R² {1.0 - float((others_NV - targets_NV).square().mean() / spread):.3f} over"
