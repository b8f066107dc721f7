"""Weights of single targets in every head, against plain torch in float64: sums, counts and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from carrywave.model.heads.adaptive_softmax import AdaptiveSoftmax
from carrywave.model.heads.classes import Sigmoid, Softmax
from carrywave.model.heads.distributions import DistributionForecast
from carrywave.model.heads.forecast import Forecast
from carrywave.model.heads.pooled import PooledNumbers, PooledSigmoid, PooledSoftmax
from carrywave.model.heads.step_numbers import StepNumbers

WIDTH, CLASSES, AHEAD, COLUMNS = 3, 5, 2, 2
QUANTILES = (0.1, 0.5, 0.8)
BY_CLASS = torch.tensor([0.5, 2.0, 1.0, 4.0, 0.0])
Each = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # out, target -> the loss of every target and what it counts, [T, B]


def classes_of(out: Tensor, target: Tensor, by_class: Tensor | None = None, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    weight = None if by_class is None else by_class.double()
    flat = functional.cross_entropy(out.reshape(-1, CLASSES), target.reshape(-1), weight, reduction="none", label_smoothing=smoothing)
    real = target != -100
    return flat.view(target.shape), real.double() if weight is None else torch.where(real, weight[target.clamp(min=0)], 0.0)


def labels_of(out: Tensor, target: Tensor, by_class: Tensor | None = None) -> tuple[Tensor, Tensor]:
    positive = None if by_class is None else by_class.double()
    losses = functional.binary_cross_entropy_with_logits(out, target.nan_to_num(), pos_weight=positive, reduction="none")
    return torch.where(target.isfinite(), losses, 0.0).sum(-1), target.isfinite().any(-1).double()


def whole_of(out: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    whole = target.isfinite().all(-1)
    return torch.where(whole, (out - target.nan_to_num()).square().mean(-1), 0.0), whole.double()


def forecasts_of(out: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(target.isfinite(), (out - target.nan_to_num()).square(), 0.0), target.isfinite().double()


def pinballs_of(out: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    gap, share = target.nan_to_num()[..., None] - out, torch.tensor(QUANTILES, dtype=torch.float64)
    losses = torch.maximum(share * gap, (share - 1) * gap).mean(-1)
    return torch.where(target.isfinite(), losses, 0.0), target.isfinite().double()


def nse_of(out: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    value, share = target.unbind(-1)
    return torch.where(value.isfinite(), (out - value.nan_to_num()).square() * share.nan_to_num(), 0.0), value.isfinite().double()


def surprises_of(out: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    found = torch.distributions.StudentT(out[..., 2], out[..., 0], out[..., 1]).log_prob(target.nan_to_num())
    return torch.where(target.isfinite(), -found, 0.0), target.isfinite().double()


HEADS: dict[str, tuple[Callable[[], Any], Each]] = {
    "softmax": (lambda: Softmax(WIDTH, CLASSES), classes_of),
    "class weights and smoothing": (
        lambda: Softmax(WIDTH, CLASSES, weights=BY_CLASS, label_smoothing=0.1),
        lambda out, target: classes_of(out, target, BY_CLASS, 0.1),
    ),
    "adaptive": (lambda: AdaptiveSoftmax(WIDTH, CLASSES, [2, 4], divide=1.0), classes_of),
    "sigmoid": (lambda: Sigmoid(WIDTH, CLASSES, BY_CLASS), lambda out, target: labels_of(out, target, BY_CLASS)),
    "forecast": (lambda: Forecast(WIDTH, AHEAD, COLUMNS), forecasts_of),
    "quantiles": (lambda: Forecast(WIDTH, AHEAD, COLUMNS, QUANTILES), pinballs_of),
    "step numbers": (lambda: StepNumbers(WIDTH, COLUMNS), forecasts_of),
    "step numbers, nse": (lambda: StepNumbers(WIDTH, COLUMNS, "nse"), nse_of),
    "distribution": (lambda: DistributionForecast(WIDTH, AHEAD, COLUMNS, "student_t"), surprises_of),
    "pooled softmax": (lambda: PooledSoftmax(WIDTH, CLASSES, weights=BY_CLASS), lambda out, target: classes_of(out, target, BY_CLASS)),
    "pooled sigmoid": (lambda: PooledSigmoid(WIDTH, CLASSES), labels_of),
    "numbers": (lambda: PooledNumbers(WIDTH, COLUMNS), whole_of),
}


def targets_of(name: str, generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Random targets of a head, of which some are missing."""
    missing = torch.rand(shape, generator=generator) < 0.2
    if "soft" in name or name in ("adaptive", "class weights and smoothing"):
        return torch.where(missing, -100, torch.randint(CLASSES, shape, generator=generator))
    last = (CLASSES,) if "sigmoid" in name else (COLUMNS,) if "numbers" in name else (AHEAD, COLUMNS)
    last = (COLUMNS, 2) if "nse" in name else last
    found = torch.rand(*shape, *last, generator=generator, dtype=torch.float64)
    found = (found < 0.5).double() if "sigmoid" in name else found
    return torch.where(missing.view(*shape, *[1] * len(last)), torch.nan, found)


@pytest.mark.parametrize("name", HEADS)
@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10_000), steps=st.integers(1, 4), lanes=st.integers(1, 4), by_step=st.booleans())
def test_losses_are_multiplied_by_weights_and_weights_are_counted(name: str, seed: int, steps: int, lanes: int, by_step: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    make, plain = HEADS[name]
    head = make().double()
    pooled = head.pooled
    y = torch.randn(steps, lanes, WIDTH, dtype=torch.float64, requires_grad=True)
    target = targets_of(name, generator, (lanes,) if pooled else (steps, lanes))
    shape = (*target.shape[:2], AHEAD) if by_step and isinstance(head, Forecast) else target.shape[: 1 if pooled else 2]
    weights = torch.rand(shape, generator=generator, dtype=torch.float64) * 3
    weights = torch.where(torch.rand(shape, generator=generator) < 0.3, 0.0, weights)
    read: Any = head.pool(y, torch.full((lanes,), steps), head.start(lanes)) if pooled else y
    total, count = head.loss(read, target, weights=weights)
    losses, counted = plain(head(read), target)
    spread = weights.view(*shape, *[1] * (losses.dim() - weights.dim()))
    expected = (losses * spread).sum()
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(count, (counted * spread).sum(), rtol=1e-12, atol=0)
    found, wanted = (torch.autograd.grad(each, [y, *head.parameters()], retain_graph=True) for each in (total, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(head.score(head(read), target, weights=weights), (total, count), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", HEADS)
def test_weights_of_1_change_no_bit_of_a_gradient_and_weights_of_0_are_missing_targets(name: str) -> None:
    """The loss itself may be summed in another order."""
    generator = torch.Generator().manual_seed(2)
    torch.manual_seed(1)
    head = HEADS[name][0]().double()
    y = torch.randn(6, 4, WIDTH, dtype=torch.float64, requires_grad=True)
    target = targets_of(name, generator, (4,) if head.pooled else (6, 4))
    ones = torch.ones(target.shape[: 1 if head.pooled else 2])

    def gradients(target: Tensor, weights: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        read = head.pool(y, torch.full((4,), 6), head.start(4)) if head.pooled else y
        total, count = head.loss(read, target, weights=weights)
        return count, (total, *torch.autograd.grad(total, [y, *head.parameters()]))

    one_count, one = gradients(target, None)
    other_count, other = gradients(target, ones)
    assert torch.equal(one_count, other_count.to(one_count.dtype))
    torch.testing.assert_close(one[0], other[0], rtol=1e-14, atol=0)
    assert all(torch.equal(a, b) for a, b in zip(one[1:], other[1:], strict=True))

    some = ones.clone()
    some[1] = 0.0
    hidden = target.clone()
    hidden[1] = torch.nan if target.is_floating_point() else -100
    masked_count, masked = gradients(hidden, None)
    zero_count, zero = gradients(target, some)
    assert torch.equal(masked_count, zero_count.to(masked_count.dtype))
    torch.testing.assert_close(zero, masked, rtol=1e-13, atol=0)
    none_count, (total, *none) = gradients(target, torch.zeros_like(ones))
    assert none_count == 0
    assert total == 0
    assert not any(each.any() for each in none)
