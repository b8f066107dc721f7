"""`cw.LSTM(x, resets=…)` and the others: sequences that lie one after the other in a lane are what they are alone, in every layout."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import carrywave as cw
from carrywave.kernels import random
from carrywave.kernels.hopper import persistent
from carrywave.kernels.hopper.layout import H200
from carrywave.model.recurrent import Recurrent

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
from _in_float64 import replace_launches

LENGTHS = ((3, 4), (1, 6), (7,), (2, 2, 3), (2, 1))  # of the sequences in each lane of 7 steps
NOISE: dict[str, Any] = {"recurrent_dropout": 0.3, "zoneout": 0.4, "dropout": 0.2}
KINDS = {"lstm": cw.LSTM, "gru": cw.GRU, "rnn": cw.RNN}


def starts() -> Tensor:
    """Where sequences start, and the first padded step of the lane that has some, which starts nothing."""
    resets = torch.zeros(7, len(LENGTHS), dtype=torch.bool)
    for lane, lengths in enumerate(LENGTHS):
        for number in range(1, len(lengths)):
            resets[sum(lengths[:number]), lane] = True
    resets[3, 4] = True
    return resets


def built(made: type[Recurrent], **options: Any) -> Recurrent:
    torch.manual_seed(0)
    layers = made(3, 5, 2, dtype=torch.float64, **options)
    with torch.no_grad():
        for name, parameter in layers.named_parameters():
            if name.startswith("carry"):
                parameter.normal_()
    return layers


def parts_of(end: Any) -> tuple[Tensor, ...]:
    return (end,) if isinstance(end, Tensor) else tuple(end)


def check_split(layers: Recurrent, kernel: str = "auto") -> None:
    """Outputs, the last carry and all gradients, of all lanes at once and of each sequence alone. Noise is that of its time and lane."""
    x, key = torch.randn(7, len(LENGTHS), 3, dtype=torch.float64), random.key(3)
    lengths, close = torch.tensor([sum(each) for each in LENGTHS]), {"rtol": 1e-10, "atol": 1e-11}  # float64, another order of sums
    layers.kernel = kernel
    y, end = layers(x, lengths=lengths, resets=starts(), key=key, start=11)
    weigh, by_end = torch.randn_like(y), [torch.randn_like(part) for part in parts_of(end)]
    loss = (y * weigh).sum() + torch.stack([(part * by).sum() for part, by in zip(parts_of(end), by_end, strict=True)]).sum()
    gradients = torch.autograd.grad(loss, list(layers.parameters()))
    layers.kernel = "reference"
    assert not y[3:, 4].any()
    total, ways = torch.zeros((), dtype=torch.float64), layers.directions
    for lane, of_lane in enumerate(LENGTHS):
        at = 0
        for number, length in enumerate(of_lane):
            alone, last = layers(x[at : at + length, lane : lane + 1], key=key, lanes=[lane], start=11 + at)
            torch.testing.assert_close(y[at : at + length, lane], alone[:, 0], **close)
            total = total + (alone[:, 0] * weigh[at : at + length, lane]).sum()
            # Forward, a lane ends with its last sequence; in reverse, with its first.
            for way, ends in ((0, number == len(of_lane) - 1), (1, number == 0)):
                for part, mine, by in zip(parts_of(last), parts_of(end), by_end, strict=True):
                    if ends and way < ways:
                        torch.testing.assert_close(mine[way::ways, lane], part[way::ways, 0], **close)
                        total = total + (part[way::ways, 0] * by[way::ways, lane]).sum()
            at += length
    torch.testing.assert_close(gradients, torch.autograd.grad(total, list(layers.parameters())), **close)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("noise", ["", "training", "evaluation"])
def test_sequences_in_a_lane_are_what_they_are_alone(name: str, bidirectional: bool, learned: bool, noise: str) -> None:
    options = {"bidirectional": bidirectional, "learned_carry": learned, "layer_norm": True, **(NOISE if noise else {})}
    check_split(built(KINDS[name], **options).train(noise == "training"))


@pytest.mark.parametrize("name", ["lstm", "gru"])
@pytest.mark.parametrize(("bidirectional", "noise"), [(True, ""), (False, ""), (False, "training"), (False, "evaluation")])
def test_on_the_persistent_kernels_too(name: str, bidirectional: bool, noise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their launches are replaced by what they define, in float64 (tests/kernels/_in_float64.py)."""
    replace_launches(monkeypatch)
    monkeypatch.setattr(persistent, "refusal", lambda *_: "")
    monkeypatch.setattr(persistent, "_chip", lambda *_: H200)
    options = {"bidirectional": bidirectional, "learned_carry": not noise, **(NOISE if noise else {})}
    check_split(built(KINDS[name], **options).train(noise == "training"), "persistent")
