"""The adaptive softmax beside torch's AdaptiveLogSoftmaxWithLoss, in a model, and in a spec."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from carrywave.errors import UserError
from carrywave.model.heads.adaptive_softmax import AdaptiveSoftmax
from carrywave.model.heads.scoring import IGNORED
from carrywave.plan.units import Units
from carrywave.spec.facts import DataFacts
from carrywave.spec.load import parse

WIDTH, CLASSES, CUTOFFS, STEPS, LANES = 32, 30, [4, 11], 6, 5


def heads() -> tuple[AdaptiveSoftmax, nn.AdaptiveLogSoftmaxWithLoss]:
    torch.manual_seed(3)
    theirs = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, CLASSES, CUTOFFS).double()
    ours = AdaptiveSoftmax(WIDTH, CLASSES, CUTOFFS).double()
    ours.load_state_dict(theirs.state_dict())  # the same names
    return ours, theirs


@pytest.mark.parametrize("most", [CLASSES, CUTOFFS[0]], ids=["all clusters", "no cluster"])
def test_loss_and_gradients_are_those_of_torch(most: int) -> None:
    ours, theirs = heads()
    y = torch.randn(STEPS, LANES, WIDTH, dtype=torch.float64)
    target = torch.randint(most, (STEPS, LANES))
    target[0, 1] = target[3, 2] = IGNORED
    own, wanted = y.clone().requires_grad_(), y.clone().requires_grad_()
    total, count = ours.loss(own, target)
    total.backward()
    real = target != IGNORED
    (-theirs(wanted[real], target[real]).output.sum()).backward()
    assert count == STEPS * LANES - 2
    torch.testing.assert_close(total, -theirs(y[real], target[real]).output.sum())
    torch.testing.assert_close(own.grad, wanted.grad)
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert mine.grad is not None  # zero where torch has none
        torch.testing.assert_close(mine.grad, torch.zeros_like(mine) if other.grad is None else other.grad, msg=name)


@pytest.mark.parametrize("cutoffs", [[], [0, 5], [7, 5], [5, CLASSES]])
def test_cutoffs_that_divide_nothing_are_refused(cutoffs: list[int]) -> None:
    with pytest.raises(UserError, match=r"do not divide 30 classes; list increasing numbers from 1 to 29"):
        AdaptiveSoftmax(WIDTH, CLASSES, cutoffs)


def test_the_planner_counts_its_parameters() -> None:
    spec = parse({"model": {"hidden": WIDTH, "softmax": "adaptive"}})
    head = Units.of(spec, DataFacts(vocabulary=CLASSES)).units[-1]
    own = AdaptiveSoftmax(WIDTH, CLASSES, spec.model.cutoffs_of(CLASSES))
    assert head.parameters == sum(each.numel() for each in own.parameters())
