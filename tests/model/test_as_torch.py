"""Which calls go to torch's own function in one piece, that they are the definition, and that mistakes are errors of torch's kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import carrywave as cw
from carrywave.kernels import random, torch_kernels
from carrywave.kernels.lstm import aten

DOUBLE = torch.float64
KINDS = [("LSTM", {}), ("LSTM", {"proj_size": 2}), ("GRU", {}), ("RNN", {}), ("RNN", {"nonlinearity": "relu"})]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of torch's functions that whole stacks were given to, with the library."""
    made: list[str] = []
    run = torch_kernels.stack

    def counted(name: str, *given: Any, onednn: bool, **named: Any) -> Any:
        made.append(f"{name} on oneDNN" if onednn else name)
        return run(name, *given, onednn=onednn, **named)

    monkeypatch.setattr(torch_kernels, "stack", counted)
    monkeypatch.setattr(aten, "ONEDNN_IS_FAST", True)
    return made


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=str)
@pytest.mark.parametrize("form", ["batched", "batch_first", "unbatched"])
@pytest.mark.parametrize("more", [{}, {"num_layers": 2, "bidirectional": True, "bias": False}], ids=str)
def test_without_gradients_it_is_the_definition(
    kind: str, options: dict[str, Any], form: str, more: dict[str, Any], calls: list[str]
) -> None:
    torch.manual_seed(0)
    layers = getattr(cw, kind)(3, 4, **more, **options, batch_first=form == "batch_first", dtype=DOUBLE)
    x = numbers(5, 3) if form == "unbatched" else numbers(5, 2, 3)
    with torch.no_grad():
        y, carry = layers(x)
        found = [y, carry, *layers(x, carry)]
        assert len(calls) == 2
        layers.kernel = "reference"
        y, carry = layers(x)
        expected = [y, carry, *layers(x, carry)]
    assert len(calls) == 2
    # float64; only the order of summation differs.
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    assert type(found[1]) is type(expected[1])


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({"kernel": "manual"}, {}),
        ({"zoneout": 0.1}, {}),
        ({"recurrent_dropout": 0.1}, {}),
        ({"layer_norm": True}, {}),
        ({"cell_norm": True}, {}),
        ({"learned_carry": True}, {}),
        ({"num_heads": 2}, {}),
        ({"dropout": 0.1, "num_layers": 2}, {}),
        ({"weight_drop": 0.1}, {}),
        ({"hidden_size": [4, 4]}, {}),
        ({}, {"lengths": [1, 2]}),
        ({}, {"resets": torch.ones(2, 2, dtype=torch.bool)}),
        ({}, {"fresh": [True, False]}),
        ({}, {"lanes": [3, 4]}),
        ({}, {"carry": [(torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))]}),  # in a form that torch does not take
    ],
    ids=str,
)
def test_what_only_ours_do_stays_here(options: dict[str, Any], given: dict[str, Any], calls: list[str]) -> None:
    lstm = cw.LSTM(**{"input_size": 3, "hidden_size": 4, **options})
    lstm(torch.zeros(2, 2, 3), **given)
    assert calls == []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cw.LSTM(3, 4)(torch.zeros(2, 2, 3))
    assert calls == []
    cw.LSTM(3, 4, 2, dropout=0.1, weight_drop=0.1).eval()(torch.zeros(2, 2, 3), key=random.key(1))
    assert calls == ["lstm"]
