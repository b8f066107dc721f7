"""Heads against torch's losses: sums and counts, missing targets, chunks of time, and nothing of a NaN target in any gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, linear
from torch.utils._python_dispatch import TorchDispatchMode

from carrywave.errors import UserError
from carrywave.model.encoders import Embedding
from carrywave.model.heads.classes import Sigmoid, Softmax, tie
from carrywave.model.heads.forecast import Forecast
from carrywave.model.heads.pooled import PooledNumbers, PooledSoftmax

DOUBLE = torch.float64


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE, requires_grad=True)


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("weights", [None, torch.tensor([0.5, 2.0, 1.0, 4.0])])
def test_label_smoothing_is_torchs_in_training_and_absent_in_evaluation(weights: Tensor | None, pooled: bool) -> None:
    head: Softmax | PooledSoftmax
    if pooled:
        head = PooledSoftmax(3, 4, weights=weights, label_smoothing=0.1).double()
    else:
        head = Softmax(3, 4, weights=weights, label_smoothing=0.1).double()
    logits, target = numbers(5, 4), torch.tensor([0, -100, 3, 1, 2])
    for training, smoothing in ((True, 0.1), (False, 0.0)):
        total, count = head.train(training).score(logits, target)
        expected = cross_entropy(logits, target, None if weights is None else weights.double(), label_smoothing=smoothing)
        torch.testing.assert_close(total / count, expected, rtol=1e-12, atol=0)
        one, other = (torch.autograd.grad(each, logits)[0] for each in (total / count, expected))
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("weights", [None, torch.tensor([0.5, 2.0, 1.0, 4.0])])
def test_softmax_quotient_is_torch_mean(weights: Tensor | None) -> None:
    head = Softmax(3, 4, weights=weights).double()
    nn.init.uniform_(head.bias)
    y = numbers(5, 2, 3)
    target = torch.tensor([[0, 1], [2, -100], [3, 3], [-100, -100], [1, 0]])
    total, count = head.loss(y, target)
    logits = linear(y, head.weight, head.bias).flatten(0, 1)
    expected = cross_entropy(logits, target.flatten(), weight=None if weights is None else weights.double())
    torch.testing.assert_close(total / count, expected, rtol=1e-12, atol=0)
    (gradient,) = torch.autograd.grad(total, y)
    assert not gradient[target == -100].any()
    assert gradient[target != -100].all()


@pytest.mark.parametrize("weights", [None, torch.tensor([0.5, 2.0, 1.0, 4.0])])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_several_labels_sum_binary_cross_entropies_over_labels_and_count_steps(weights: Tensor | None, smoothing: float) -> None:
    head = Sigmoid(3, 4, weights, label_smoothing=smoothing).double()
    nn.init.uniform_(head.bias)
    y, target = numbers(5, 2, 3), (torch.rand(5, 2, 4) < 0.5).double()
    target[1, 0], target[2, 1, 0] = torch.nan, torch.nan
    total, count = head.loss(y, target)
    assert count == 9
    real, wanted = target.isfinite(), (1 - smoothing) * target.nan_to_num() + smoothing / 2
    positive = None if weights is None else weights.double()
    errors = binary_cross_entropy_with_logits(linear(y, head.weight, head.bias), wanted, pos_weight=positive, reduction="none")
    torch.testing.assert_close(total, errors[real].sum(), rtol=1e-12, atol=0)
    (gradient,) = torch.autograd.grad(total, y)
    assert not gradient[1, 0].any()
    assert gradient[2, 1].all()
    plain, _ = head.eval().loss(y, target)
    wanted = target.nan_to_num()
    errors = binary_cross_entropy_with_logits(linear(y, head.weight, head.bias), wanted, pos_weight=positive, reduction="none")
    torch.testing.assert_close(plain, errors[real].sum(), rtol=1e-12, atol=0)


def test_tie_shares_one_parameter() -> None:
    embedding, head = Embedding(7, 3), Softmax(3, 7)
    tie(head, embedding)
    assert head.weight is embedding.weight
    assert Softmax(3, 7, tied=embedding.weight).weight is embedding.weight
    with pytest.raises(UserError, match="cannot be tied"):
        tie(Softmax(4, 7), embedding)
    with pytest.raises(UserError, match="does not match 7 classes x width 4"):
        Softmax(4, 7, tied=embedding.weight)


@pytest.mark.parametrize("kind", ["mse", "mae"])
def test_regression_is_a_mean_over_numbers_and_a_sum_over_lanes(kind: str) -> None:
    head = PooledNumbers(3, 2, "last", loss=kind).double()
    value = numbers(4, 3)
    target = torch.tensor([[1.0, 2.0], [torch.nan, torch.nan], [3.0, torch.nan], [0.0, 1.0]])
    total, count = head.loss((value, torch.ones(4, dtype=torch.int64)), target)
    whole = [0, 3]
    gap = linear(value, head.weight, head.bias)[whole] - target[whole].double()
    torch.testing.assert_close(total, (gap.square() if kind == "mse" else gap.abs()).mean(1).sum(), rtol=1e-12, atol=0)
    assert count.item() == 2
    (gradient,) = torch.autograd.grad(total, value)
    assert gradient.isfinite().all()
    assert not gradient[[1, 2]].any()


@pytest.mark.parametrize("kind", ["mse", "mae"])
def test_forecast_counts_target_numbers(kind: str) -> None:
    head = Forecast(3, 2, 2, loss=kind).double()
    y = numbers(2, 1, 3)
    target = torch.tensor([[[[1.0, 2.0], [torch.nan, 0.0]]], [[[torch.nan, torch.nan], [torch.nan, torch.nan]]]])
    out = head(y)
    assert out.shape == (2, 1, 2, 2)
    total, count = head.loss(y, target)
    real = target.isfinite()
    gap = out[real] - target[real].double()
    torch.testing.assert_close(total, (gap.square() if kind == "mse" else gap.abs()).sum(), rtol=1e-12, atol=0)
    assert count.item() == 3
    (gradient,) = torch.autograd.grad(total, y)
    assert gradient.isfinite().all()
    assert not gradient[1].any()


def test_quantiles_rise_and_pay_pinball() -> None:
    quantiles = (0.1, 0.5, 0.9)
    head = Forecast(3, 2, 1, quantiles).double()
    y = torch.randn(4, 2, 3, dtype=DOUBLE) * 30
    y.requires_grad_()
    out = head(y)
    assert out.shape == (4, 2, 2, 1, 3)
    assert (out.diff(dim=-1) >= 0).all()
    target = torch.randn(4, 2, 2, 1, dtype=DOUBLE)
    target[0, 0] = torch.nan
    total, count = head.score(out, target)
    expected = 0.0
    for index, share in enumerate(quantiles):
        for got, want in zip(out[..., index].flatten().tolist(), target.flatten().tolist(), strict=True):
            if want == want:
                expected += max(share * (want - got), (share - 1) * (want - got)) / 3
    torch.testing.assert_close(total.item(), expected, rtol=1e-12, atol=0)
    assert count.item() == 14
    (gradient,) = torch.autograd.grad(total, y)
    assert gradient.isfinite().all()
    assert not gradient[0, 0].any()


@pytest.mark.parametrize("kind", ["forecast", "pooled"])
def test_numbers_are_not_rounded_to_bf16(kind: str) -> None:
    y_TBW = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(1))
    forecast, pooled = Forecast(8, 2, 1), PooledNumbers(8, 2)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        acc = pooled.pool(y_TBW, torch.tensor([5, 5, 5]), pooled.start(3))
        found = forecast(y_TBW) if kind == "forecast" else pooled(acc)
    exact = forecast(y_TBW) if kind == "forecast" else pooled(acc)
    assert found.dtype == torch.float32
    assert torch.equal(found, exact)


class _FromHost(TorchDispatchMode):
    """Notes tensors that are made from Python numbers: on a GPU each is a copy from the host, which no CUDA graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += func is torch.ops.aten.lift_fresh.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("head", "target"),
    [
        (Softmax(3, 4, weights=torch.ones(4)), torch.zeros(5, 2, dtype=torch.long)),
        (Forecast(3, 2, 1), torch.zeros(5, 2, 2, 1)),
        (Forecast(3, 2, 1, (0.1, 0.5, 0.9)), torch.zeros(5, 2, 2, 1)),
        (PooledSoftmax(3, 4), torch.zeros(2, dtype=torch.long)),
        (PooledSoftmax(3, 4, "mean_max", torch.ones(4), label_smoothing=0.1), torch.zeros(2, dtype=torch.long)),
        (PooledNumbers(3, 1), torch.zeros(2, 1)),
        (PooledNumbers(3, 1, "attention"), torch.zeros(2, 1)),
    ],
    ids=["softmax", "forecast", "quantiles", "classes", "mean and max", "numbers", "attention"],
)
def test_losses_copy_nothing_from_the_host(head: Any, target: Tensor) -> None:
    y_TBW, lengths_B = torch.randn(5, 2, 3, requires_grad=True), torch.tensor([5, 3])
    with _FromHost() as check:
        torch.tensor([1.0])
    assert check.seen  # it does notice
    with _FromHost() as noted:
        acc = head.pool(y_TBW, lengths_B, head.start(2, torch.float32, torch.device("cpu"))) if head.pooled else y_TBW
        loss, _ = head.loss(acc, target)
        loss.backward()
    assert not noted.seen
