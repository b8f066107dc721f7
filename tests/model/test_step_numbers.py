"""The head of regression at every step against the same in plain torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from carrywave.model.heads.step_numbers import StepNumbers

sizes = st.integers(1, 5)


def plain(head: StepNumbers, y_TBW: Tensor, target: Tensor, weights: Tensor | None) -> tuple[Tensor, float]:
    """Target by target, in a loop."""
    total, count = torch.zeros((), dtype=y_TBW.dtype), 0.0
    for step in range(y_TBW.shape[0]):
        for lane in range(y_TBW.shape[1]):
            out_C = head.weight @ y_TBW[step, lane] + head.bias
            for place in range(head.outputs):
                wanted = target[step, lane, place]
                share = float(wanted[1]) if head.kind == "nse" else 1.0
                value = wanted[0] if head.kind == "nse" else wanted
                if not torch.isnan(value):
                    own = 1.0 if weights is None else float(weights[step, lane])
                    gap = out_C[place] - value
                    total = total + own * share * (gap.abs() if head.kind == "mae" else gap * gap)
                    count += own
    return total, count


@settings(max_examples=40, deadline=None)
@given(sizes, sizes, sizes, st.integers(1, 3), st.sampled_from(["mse", "mae", "nse"]), st.booleans(), st.floats(0, 1), st.integers(0, 99))
def test_loss_and_gradients_are_those_of_a_loop(
    steps: int, lanes: int, width: int, outputs: int, loss: str, weighted: bool, holes: float, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    head = StepNumbers(width, outputs, loss).double()
    with torch.no_grad():
        head.bias.copy_(torch.randn(outputs, generator=draw))
    y = torch.randn(steps, lanes, width, generator=draw, dtype=torch.float64, requires_grad=True)
    target = torch.randn(steps, lanes, outputs, generator=draw, dtype=torch.float64)
    target[torch.rand(target.shape, generator=draw) < holes] = torch.nan
    if loss == "nse":
        target = torch.stack([target, torch.rand(target.shape, generator=draw, dtype=torch.float64)], dim=-1)
    weights = torch.rand(steps, lanes, generator=draw, dtype=torch.float64) if weighted else None
    found, count = head.loss(y, target, weights=weights)
    wanted, many = plain(head, y, target, weights)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert float(count) == pytest.approx(many, rel=1e-12)
    inputs = (y, head.weight, head.bias)
    for ours, theirs in zip(
        torch.autograd.grad(found, inputs), torch.autograd.grad(wanted, inputs, allow_unused=True) if many else [None] * 3, strict=True
    ):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, torch.zeros_like(ours) if theirs is None else theirs, rtol=1e-10, atol=1e-12)
