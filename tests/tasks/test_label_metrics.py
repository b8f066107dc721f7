"""Metrics of several labels against plain counting over sets, and their sums as sums."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from carrywave.tasks.metrics.labels import LabelDecisions

NAN = math.nan
TARGETS = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [NAN, 1, NAN, 0], [NAN, NAN, NAN, NAN], [1, 1, 0, 0]])
CHOSEN = torch.tensor([[1, 0, 1, 0], [0, 0, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1], [0, 1, 1, 0]])


def logits_for(chosen: Tensor) -> Tensor:
    return torch.where(chosen > 0, 0.3, -0.3)


def counted(targets: Tensor, chosen: Tensor) -> dict[str, float]:
    """The definitions, with loops: a label that neither holds nor is predicted anywhere has no F1."""
    hits, wrong, missed = [0] * 4, [0] * 4, [0] * 4
    rows = exact = 0
    for target, guess in zip(targets.tolist(), chosen.tolist(), strict=True):
        known = [place for place, value in enumerate(target) if not math.isnan(value)]
        for place in known:
            hits[place] += target[place] == guess[place] == 1
            wrong[place] += target[place] < guess[place]
            missed[place] += target[place] > guess[place]
        rows += bool(known)
        exact += bool(known) and all(target[place] == guess[place] for place in known)
    scores = [2 * h / (2 * h + w + m) for h, w, m in zip(hits, wrong, missed, strict=True) if h + w + m]
    micro = 2 * sum(hits) / (2 * sum(hits) + sum(wrong) + sum(missed))
    return {"micro_f1": micro, "macro_f1": sum(scores) / len(scores), "exact_match": exact / rows}


def test_f1_and_exact_matches_by_counting() -> None:
    meter = LabelDecisions(4)
    for at in (0, 2):  # in two batches, of which one has a dimension of time
        meter.update(logits_for(CHOSEN[at : at + 2]), TARGETS[at : at + 2])
    meter.update(logits_for(CHOSEN[4:])[None], TARGETS[4:][None])
    found = meter.values()
    assert {name: found[name] for name in ("micro_f1", "macro_f1", "exact_match")} == pytest.approx(counted(TARGETS, CHOSEN), rel=1e-12)
    assert "unweighted_loss" not in found


def test_the_naive_loss_is_that_of_the_label_frequencies() -> None:
    meter = LabelDecisions(4)
    meter.update(logits_for(CHOSEN), TARGETS)
    real = TARGETS.isfinite()
    share = TARGETS.nan_to_num().sum(0) / real.sum(0)
    odds = torch.logit(share.double(), eps=1e-12).expand(5, 4)
    losses = binary_cross_entropy_with_logits(odds, TARGETS.nan_to_num().double(), reduction="none")
    assert meter.values()["naive_loss"] == pytest.approx(losses[real].sum().item() / 4, rel=1e-6)  # of a share of 0 or 1, nearly


def test_the_loss_without_weights_is_the_sum_over_labels_by_step() -> None:
    meter, out = LabelDecisions(4, weighted=True), torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    meter.update(out, TARGETS)
    losses = binary_cross_entropy_with_logits(out.double(), TARGETS.nan_to_num().double(), reduction="none")
    assert meter.values()["unweighted_loss"] == pytest.approx(losses[TARGETS.isfinite()].sum().item() / 4, rel=1e-12)
