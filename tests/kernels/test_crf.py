"""Chains over labels: the definition against a list of all paths, and the CUDA kernels, compiled for the CPU, against the definition."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from carrywave.kernels.crf import dispatch
from carrywave.kernels.crf.definition import UNKNOWN, Chain
from carrywave.kernels.cuda import nvrtc

sys.path.insert(0, str(Path(__file__).parent))
from _chains import Problem, listed_loss, paths, problem, problems, score


def by_definition(given: Problem) -> Tensor:
    return dispatch.summed(given.emissions_TBV, given.tags_TB, given.lengths_B, given.chain, given.weights_B)


def slopes(total: Tensor, given: Problem) -> list[Tensor]:
    return list(torch.autograd.grad(total, given.leaves, materialize_grads=True))


@given(problems())
@settings(max_examples=30, deadline=None)
def test_the_loss_and_its_slopes_are_those_of_all_paths(given: Problem) -> None:
    ours, listed = by_definition(given), listed_loss(given)
    torch.testing.assert_close(ours, listed, rtol=1e-11, atol=1e-11)
    if not listed.requires_grad:
        return
    for one, other in zip(slopes(ours, given), slopes(listed, given), strict=True):
        # The list has NaN where infinities were subtracted, which the sums never have.
        torch.testing.assert_close(one, other.nan_to_num(0.0), rtol=1e-9, atol=1e-11)


@given(problems())
@settings(max_examples=30, deadline=None)
def test_the_best_path_has_the_highest_score(given: Problem) -> None:
    found = dispatch.best_paths(given.emissions_TBV, given.lengths_B, given.chain)
    for lane, length in enumerate(given.lengths_B.tolist()):
        assert (found[length:, lane] == UNKNOWN).all()
        if length:
            best = max(float(score(given, lane, path).detach()) for path in paths(given, lane))
            own = tuple(found[:length, lane].tolist())
            assert float(score(given, lane, own).detach()) == pytest.approx(best, abs=1e-12)


def test_second_derivatives_are_those_of_the_definition() -> None:
    few = problem(3, 3, 2, 3, ruled_out=0.0)
    lengths, tags = torch.tensor([3, 2]), few.tags_TB.clamp(min=0)

    def loss(*leaves: Tensor) -> Tensor:
        return dispatch.summed(leaves[0], tags, lengths, Chain(*leaves[1:]))

    assert torch.autograd.gradcheck(loss, few.leaves)
    assert torch.autograd.gradgradcheck(loss, few.leaves)


def test_labels_that_cannot_follow_each_other_have_an_infinite_loss_which_says_so() -> None:
    chain = Chain(torch.zeros(2), torch.tensor([[0.0, -torch.inf], [0.0, 0.0]]), torch.zeros(2))
    assert dispatch.summed(torch.zeros(2, 1, 2), torch.tensor([[0], [1]]), torch.tensor([2]), chain) == torch.inf


def test_without_kernels_the_definition_runs_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnCuda(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(dispatch._cuda_kernel, "failures", [])
    monkeypatch.setattr(nvrtc, "available", lambda: "no compiler")
    given = problem(2, 4, 3, 4)
    emissions, tags = given.emissions_TBV.detach().as_subclass(OnCuda), given.tags_TB.as_subclass(OnCuda)
    with pytest.warns(UserWarning, match="kernel for conditional random fields is not used, so steps run slower: no compiler"):
        total = dispatch.summed(emissions, tags, given.lengths_B, given.chain)
    assert float(total.detach()) == float(dispatch.summed(given.emissions_TBV, given.tags_TB, given.lengths_B, given.chain).detach())
    paths = dispatch.best_paths(emissions, given.lengths_B, given.chain)
    assert torch.equal(torch.Tensor(paths), torch.Tensor(dispatch.best_paths(given.emissions_TBV, given.lengths_B, given.chain)))
