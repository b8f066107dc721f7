"""Summed cross entropy: what torch gives, in float32 at least; and without the own kernel, torch's, with one warning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from carrywave.kernels import cross_entropy
from carrywave.kernels.cuda import nvrtc


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_it_is_torchs_in_float32_at_least(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(6, 9).to(dtype), torch.tensor([0, 3, -100, 8, 1, -100])
    wide = logits.to(torch.promote_types(dtype, torch.float32))
    for weights in (None, torch.rand(9)):
        total = cross_entropy.summed(logits, target, -100, weights)
        as_given = None if weights is None else weights.to(wide.dtype)
        assert total.dtype == wide.dtype
        assert torch.equal(total, functional.cross_entropy(wide, target, weight=as_given, ignore_index=-100, reduction="sum"))


def test_a_kernel_that_fails_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fails(*_: object) -> None:
        tried.append(1)
        raise nvrtc.KernelError("no room")

    class OnCuda(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(cross_entropy._cuda_kernel, "failures", [])
    monkeypatch.setattr(nvrtc, "available", lambda: "")
    monkeypatch.setattr(cross_entropy._Losses, "apply", fails)
    logits = torch.randn(2, 3).bfloat16().as_subclass(OnCuda)
    with pytest.warns(UserWarning, match="not used, so steps run slower: no room"):
        first = cross_entropy.summed(logits, torch.tensor([0, 2]), -100)
    assert torch.equal(first, cross_entropy.summed(logits, torch.tensor([0, 2]), -100))
    assert len(tried) == 1


def launched(name: str, like: Tensor) -> Callable[..., None]:
    """What a kernel computes, from what it is launched with."""

    def forward(_: Any, __: Any, logits: Tensor, target: Tensor, losses: Tensor, logarithms: Tensor, *more: int) -> None:
        logarithms.copy_(logits.float().logsumexp(1))
        losses.copy_(functional.cross_entropy(logits.float(), target, ignore_index=more[-1], reduction="none"))

    def backward(_: Any, __: Any, logits: Tensor, target: Tensor, logarithms: Tensor, scale: Tensor, grads: Tensor, *more: int) -> None:
        *_, pitch, ignored = more
        factor = torch.where(target == ignored, 0.0, scale.as_strided((len(target),), (pitch,)))
        chosen = functional.one_hot(target.clamp(min=0), logits.shape[1])
        grads.copy_(((logits.float() - logarithms[:, None]).exp() - chosen) * factor[:, None])

    return forward if name == "score_forward" else backward


@pytest.mark.parametrize("weights", [None, torch.tensor([0.5, 2.0, 0.0, 1.0])])
def test_rows_are_scaled_by_their_weights(weights: Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "_kernel", launched)
    logits, target = torch.randn(4, 3, requires_grad=True), torch.tensor([0, -100, 1, 2])
    found = cross_entropy._total(cross_entropy._Losses.apply(logits, target, -100), weights)
    expected = cross_entropy.summed(logits, target, -100, weights_N=weights)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(3.0 * each, logits) for each in (found, expected)))
