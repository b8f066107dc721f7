"""`LSTM` against torch.nn.LSTM: values, carry, gradients and state_dict; then what nn.LSTM does not have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from carrywave.errors import UserError
from carrywave.kernels import random
from carrywave.model.lstm import LSTM
from carrywave.model.model import Model

DOUBLE = torch.float64


def twins(*sizes: int, **options: Any) -> tuple[LSTM, nn.LSTM]:
    torch.manual_seed(0)
    theirs = nn.LSTM(*sizes, **options, dtype=DOUBLE)
    mine = LSTM(*sizes, **options, dtype=DOUBLE)
    mine.load_state_dict(theirs.state_dict())
    return mine, theirs


def gradients(module: nn.Module, out: tuple[Tensor, Any], *leaves: Tensor) -> list[Tensor]:
    """Of a number that depends on every output."""
    y, (h, c) = out
    total = (y.sin().sum() + (h * 0.5).cos().sum() + c.square().sum()) * 0.1
    return list(torch.autograd.grad(total, [*leaves, *module.parameters()]))


@pytest.mark.parametrize("kernel", ["auto", "manual", "aten", "reference"])
@pytest.mark.parametrize("batched", [True, False])
@given(
    layers=st.integers(1, 3),
    bidirectional=st.booleans(),
    projection=st.sampled_from([0, 2]),
    bias=st.booleans(),
    batch_first=st.booleans(),
    given_carry=st.booleans(),
    steps=st.integers(1, 5),
    lanes=st.integers(1, 3),
)
@settings(max_examples=15)
def test_is_nn_lstm(
    kernel: str,
    batched: bool,
    layers: int,
    bidirectional: bool,
    projection: int,
    bias: bool,
    batch_first: bool,
    given_carry: bool,
    steps: int,
    lanes: int,
) -> None:
    mine, theirs = twins(3, 4, layers, bias, batch_first, 0.0, bidirectional, projection)
    mine.kernel = kernel
    shape = [steps, 3] if not batched else [lanes, steps, 3] if batch_first else [steps, lanes, 3]
    x = torch.randn(shape, dtype=DOUBLE, requires_grad=True)
    rows = layers * (2 if bidirectional else 1)
    middle = [lanes] if batched else []
    h = torch.randn(rows, *middle, projection or 4, dtype=DOUBLE, requires_grad=True)
    c = torch.randn(rows, *middle, 4, dtype=DOUBLE, requires_grad=True)
    carry, leaves = ((h, c), (x, h, c)) if given_carry else (None, (x,))
    expected, got = theirs(x, carry), mine(x, carry)
    # float64; only the order of summation differs.
    torch.testing.assert_close(got[0], expected[0], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(tuple(got[1]), tuple(expected[1]), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(gradients(mine, got, *leaves), gradients(theirs, expected, *leaves), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 3}, {"bidirectional": True, "num_layers": 2}, {"proj_size": 2}, {"bias": False}, {"batch_first": True}]
)
def test_state_dict_goes_both_ways(options: dict[str, Any]) -> None:
    mine, theirs = LSTM(3, 4, **options, dtype=DOUBLE), nn.LSTM(3, 4, **options, dtype=DOUBLE)
    assert list(mine.state_dict()) == list(theirs.state_dict())
    assert [p.shape for p in mine.parameters()] == [p.shape for p in theirs.parameters()]
    theirs.load_state_dict(mine.state_dict())
    x = torch.randn(2, 3, 3, dtype=DOUBLE)
    torch.testing.assert_close(mine(x)[0], theirs(x)[0], rtol=1e-12, atol=1e-13)
    mine.load_state_dict(nn.LSTM(3, 4, **options).state_dict())


@pytest.mark.parametrize("kernel", ["auto", "aten"])
def test_dropout_between_layers_is_keyed_and_only_in_training(kernel: str) -> None:
    lstm = LSTM(3, 4, 3, dropout=0.5, kernel=kernel, dtype=DOUBLE)
    x, key = torch.randn(6, 5, 3, dtype=DOUBLE), random.key(4)
    first, second, other = lstm(x, key=key)[0], lstm(x, key=key)[0], lstm(x, key=random.key(5))[0]
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert (first != 0).all()  # none after the last layer
    part = lstm(x[:, 2:4], key=key, lanes=torch.arange(2, 4))[0]
    torch.testing.assert_close(part, first[:, 2:4], rtol=0, atol=1e-12)
    half, carry = lstm(x[:3], key=key)
    rest, _ = lstm(x[3:], carry, key=key, start=3)
    torch.testing.assert_close(torch.cat((half, rest)), first, rtol=0, atol=1e-12)
    lstm.eval()
    assert torch.equal(lstm(x, key=key)[0], lstm(x)[0])


def test_learned_carry_starts_fresh_lanes_and_is_trained() -> None:
    lstm = LSTM(3, [4, 5], learned_carry=True, dtype=DOUBLE)
    assert {"carry_h_l0", "carry_c_l0", "carry_h_l1", "carry_c_l1"} <= set(lstm.state_dict())
    with torch.no_grad():
        for name, parameter in lstm.named_parameters():
            if name.startswith("carry"):
                parameter.uniform_(-1, 1)
    x = torch.randn(3, 2, 3, dtype=DOUBLE)
    begin, (_, end) = lstm(x), (None, lstm(x)[1])
    again = lstm(x, end, fresh=torch.tensor([True, False]))[0]
    torch.testing.assert_close(again[:, 0], begin[0][:, 0], rtol=0, atol=1e-14)
    assert not torch.allclose(again[:, 1], begin[0][:, 1])
    again[:, 0].sum().backward()
    assert all(
        parameter.grad is not None and parameter.grad.any() for name, parameter in lstm.named_parameters() if name.startswith("carry")
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LSTM(3, 0), "hidden_size=0"),
        (lambda: LSTM(3, [4, 5], 3), "2 widths for num_layers=3"),
        (lambda: LSTM(3, 4, dropout=1.0), "dropout=1.0"),
        (lambda: LSTM(3, 4, weight_drop=-0.1), "weight_drop=-0.1"),
        (lambda: LSTM(3, 4, proj_size=4), "proj_size=4 must be smaller"),
        (lambda: LSTM(3, 4)(torch.zeros(2, 2, 4)), r"shape \[2, 2, 4\]"),
        (lambda: LSTM(3, 4)(torch.zeros(0, 2, 3)), "at least one step"),
        (
            lambda: LSTM(3, 4)(torch.zeros(2, 2, 3), (torch.zeros(1, 3, 4), torch.zeros(1, 3, 4))),
            r"h of layer 0 has shape \[1, 3, 4\], expected \[1, 2, 4\]",
        ),
        (lambda: LSTM(3, 4, 2)(torch.zeros(2, 2, 3), (torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))), "first dimension must be 2"),
        (lambda: LSTM(3, [4, 5])(torch.zeros(2, 2, 3), (torch.zeros(2, 2, 4), torch.zeros(2, 2, 4))), "one .h, c. each"),
        (lambda: LSTM(3, [4, 5])(torch.zeros(2, 2, 3), [(torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))]), "expected 2 carries, got 1"),
        (lambda: LSTM(3, 4)(torch.zeros(2, 2, 3), None, [1, 3]), "lengths range from 1 to 3"),
        (lambda: LSTM(3, 4)(torch.zeros(2, 2, 3), None, [1]), "a whole number for each of the 2 lanes"),
        (lambda: LSTM(3, 4)(torch.zeros(2, 2, 3), None, torch.tensor([1.0, 2.0])), "a whole number for each of the 2 lanes"),
    ],
)
def test_mistakes_are_named(make: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


class Steps(nn.Module):
    """A head of a model that reads the last layer's output as it is."""

    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return (y - target).square().sum(), torch.tensor(target.numel())


@pytest.mark.parametrize("wrapped", [False, True], ids=["LSTM", "Model"])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"fresh": torch.tensor([[True], [False], [False], [False]])},
            r"fresh has shape \[4, 1\] .* pass true or false for each of the 4 lanes",
        ),
        ({"fresh": torch.ones(5, 4, dtype=torch.bool)}, r"fresh has shape \[5, 4\]"),  # as many lanes as hidden units
        ({"fresh": torch.tensor([True])}, r"fresh has shape \[1\]"),
        ({"fresh": torch.tensor([1, 0, 0, 0])}, "fresh has .* dtype torch.int64; pass true or false"),
        ({"lanes": torch.tensor([3])}, r"lanes has shape \[1\] .* pass a whole number for each of the 4 lanes"),
        ({"lengths": torch.tensor([[5], [5], [5], [5]])}, r"lengths has shape \[4, 1\]"),
        ({"lengths": [5, 5, 5, 6]}, "lengths range from 5 to 6; they must be between 0 and the 5 steps of x"),
    ],
)
def test_what_is_given_for_each_lane_is_not_broadcast(wrapped: bool, arguments: dict[str, Any], said: str) -> None:
    torch.manual_seed(0)
    lstm = LSTM(3, 4)
    call: nn.Module = Model(nn.Identity(), lstm, Steps()) if wrapped else lstm
    with pytest.raises(UserError, match=said):
        call(torch.randn(5, 4, 3), **arguments)
