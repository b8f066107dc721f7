"""Weight gradients that are put off and paid at the end are those of torch. float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close

from carrywave.kernels import deferred_gradients
from carrywave.kernels.deferred_gradients import Deferred, deferring

# Sums of some dozen terms, in another order, in float64.
TOLERANCE = {"rtol": 1e-12, "atol": 1e-14}


def made(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + len(shape)), dtype=torch.float64)


@pytest.fixture(autouse=True, params=["joined", "apart"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks have one product together, or each its own."""
    monkeypatch.setattr(deferred_gradients, "APART", request.param == "apart")
    monkeypatch.setattr(deferred_gradients, "LARGE", 1)


@pytest.mark.parametrize("before", [False, True])  # whether the gradient is there already, as in a bucket
def test_linear_and_embedding_over_chunks(before: bool) -> None:
    weight, bias, index = made(5, 3).requires_grad_(), made(5, seed=2).requires_grad_(), torch.tensor([[0, 4], [4, 1], [2, 2], [4, 0]])
    table = made(6, 3, seed=3).requires_grad_()

    def loss(part: slice, own: bool) -> Tensor:
        rows = deferred_gradients.embedding(index[part], table) if own else functional.embedding(index[part], table)
        y = deferred_gradients.linear(rows.tanh(), weight, bias) if own else functional.linear(rows.tanh(), weight, bias)
        return y.square().sum()

    loss(slice(0, 4), False).backward()  # type: ignore[no-untyped-call]
    expected = [each.grad for each in (weight, bias, table)]
    for each in (weight, bias, table):
        each.grad = torch.ones_like(each) if before else None
    deferred, whole = Deferred(), []
    with deferring(deferred):
        for part in (slice(2, 4), slice(0, 2)):
            deferred_gradients.backward([loss(part, True)], [None])
            assert deferred.pending(weight)
            assert deferred.pending(table)
            assert not deferred.pending(bias)
    deferred.flush(whole.append)
    assert [id(each) for each in whole] == [id(weight), id(table)]  # in the order of backward, each once
    assert not deferred.pending(weight)
    for each, wanted in zip((weight, bias, table), expected, strict=True):
        assert wanted is not None
        assert_close(each.grad, wanted + 1.0 if before else wanted, **TOLERANCE)


def test_a_tied_weight_is_paid_once() -> None:
    table, index = made(6, 3).requires_grad_(), torch.tensor([[0, 4], [4, 1]])
    functional.linear(functional.embedding(index, table), table).square().sum().backward()  # type: ignore[no-untyped-call]
    expected, table.grad = table.grad, None
    deferred, whole = Deferred(), []
    with deferring(deferred):
        deferred_gradients.backward([deferred_gradients.linear(deferred_gradients.embedding(index, table), table).square().sum()], [None])
    deferred.flush(whole.append)
    assert len(whole) == 1
    assert_close(table.grad, expected, **TOLERANCE)


def test_what_was_made_of_a_weight_goes_through_autograd() -> None:
    weight, x = made(5, 3).requires_grad_(), made(4, 3)
    deferred = Deferred()
    with deferring(deferred):
        deferred_gradients.backward([deferred_gradients.linear(x, weight * 2.0).sum()], [None])
    assert not deferred.pending(weight)
    assert weight.grad is not None
    assert_close(weight.grad, 2.0 * x.sum(0).expand(5, 3), **TOLERANCE)
