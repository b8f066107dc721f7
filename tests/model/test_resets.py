"""`cw.LSTM(x, resets=…)`: sequences that lie one after the other in a lane are what they are alone, in every layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import carrywave as cw
from carrywave.errors import UserError
from carrywave.model.recurrent import Recurrent

LENGTHS = ((3, 4), (1, 6), (7,), (2, 2, 3))  # of the sequences in each lane of 7 steps


def starts() -> Tensor:
    resets = torch.zeros(7, len(LENGTHS), dtype=torch.bool)
    for lane, lengths in enumerate(LENGTHS):
        for number in range(1, len(lengths)):
            resets[sum(lengths[:number]), lane] = True
    return resets


@pytest.mark.parametrize("made", [cw.LSTM, cw.RNN])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("learned", [False, True])
def test_sequences_in_a_lane_are_what_they_are_alone(made: type[Recurrent], bidirectional: bool, learned: bool) -> None:
    layers = made(3, 5, 2, bidirectional=bidirectional, learned_carry=learned, layer_norm=True, dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in layers.named_parameters():
            if name.startswith("carry"):
                parameter.normal_()
    x = torch.randn(7, 4, 3, dtype=torch.float64)
    y, _ = layers(x, resets=starts())
    weigh = torch.randn_like(y)
    gradients = torch.autograd.grad((y * weigh).sum(), list(layers.parameters()))
    total = torch.zeros((), dtype=torch.float64)
    for lane, lengths in enumerate(LENGTHS):
        at = 0
        for length in lengths:
            alone, _ = layers(x[at : at + length, lane])
            torch.testing.assert_close(y[at : at + length, lane], alone, rtol=1e-11, atol=1e-12)  # float64, another order of sums
            total = total + (alone * weigh[at : at + length, lane]).sum()
            at += length
    torch.testing.assert_close(gradients, torch.autograd.grad(total, list(layers.parameters())), rtol=1e-10, atol=1e-11)


def test_resets_lie_as_x_does() -> None:
    lstm = cw.LSTM(3, 5, batch_first=True)
    x, resets = torch.randn(4, 7, 3), starts().t()
    y, _ = lstm(x, resets=resets)
    torch.testing.assert_close(lstm(x[1], resets=resets[1])[0], y[1])
    with pytest.raises(UserError, match=r"LSTM got resets of shape \[7, 4\] in torch.bool; .*\[4, 7\]"):
        lstm(x, resets=resets.t())
    with pytest.raises(UserError, match=r"in torch.int64; pass true or false"):
        lstm(x, resets=resets.long())


def test_resets_without_any_change_nothing() -> None:
    lstm = cw.LSTM(3, 5, 2)
    x = torch.randn(7, 4, 3)
    for backend in ("manual", "aten", "reference"):
        lstm.kernel = backend
        assert torch.equal(lstm(x, resets=torch.zeros(7, 4, dtype=torch.bool))[0], lstm(x)[0])
