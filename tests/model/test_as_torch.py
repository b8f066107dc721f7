"""Which calls go to torch's own function in one piece, that they are the definition, and that mistakes are errors of torch's kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import carrywave as cw
from carrywave.errors import UserError
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


def state(kind: Any, *shape: int, dtype: torch.dtype = torch.float32) -> Any:
    parts = tuple(torch.zeros(shape, dtype=dtype) for _ in range(2))
    return parts if kind.__name__ == "LSTM" else parts[0]


MISTAKES: dict[str, Callable[[Any], Any]] = {
    "bias": lambda kind: kind(3, 4, bias=1),
    "batch_first": lambda kind: kind(3, 4, batch_first=1),
    "no units": lambda kind: kind(3, 0),
    "no inputs": lambda kind: kind(0, 4),
    "no layers": lambda kind: kind(3, 4, 0),
    "half a unit": lambda kind: kind(3, 4.5),
    "a name for units": lambda kind: kind(3, "4"),
    "all is dropped, and more": lambda kind: kind(3, 4, 2, dropout=2.0),
    "a projection": lambda kind: kind(3, 4, proj_size=4),
    "an unknown option": lambda kind: kind(3, 4, units=3),
    "no x": lambda kind: kind(3, 4)(),
    "x of other inputs": lambda kind: kind(3, 4)(torch.zeros(5, 2, 7)),
    "x of one dimension": lambda kind: kind(3, 4)(torch.zeros(3)),
    "x without steps": lambda kind: kind(3, 4)(torch.zeros(0, 2, 3)),
    "x of tokens": lambda kind: kind(3, 4)(torch.zeros(5, 2, 3, dtype=torch.int64)),
    "x of another precision": lambda kind: kind(3, 4)(torch.zeros(5, 2, 3, dtype=DOUBLE)),
    "a nested x": lambda kind: kind(3, 4)(torch.nested.nested_tensor([torch.zeros(5, 3), torch.zeros(4, 3)], layout=torch.jagged)),
    "a state of other lanes": lambda kind: kind(3, 4)(torch.zeros(5, 2, 3), state(kind, 1, 3, 4)),
    "a state of another width": lambda kind: kind(3, 4)(torch.zeros(5, 2, 3), state(kind, 1, 2, 5)),
    "a state of other layers": lambda kind: kind(3, 4)(torch.zeros(5, 2, 3), state(kind, 2, 2, 4)),
    "a state without lanes": lambda kind: kind(3, 4)(torch.zeros(5, 2, 3), state(kind, 1, 4)),
    "a state with lanes": lambda kind: kind(3, 4)(torch.zeros(5, 3), state(kind, 1, 1, 4)),
    "a state of another precision": lambda kind: kind(3, 4)(torch.zeros(5, 2, 3), state(kind, 1, 2, 4, dtype=DOUBLE)),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=list(MISTAKES))
@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN"])
def test_a_mistake_is_an_error_of_torchs_kind(name: str, mistake: Callable[[Any], Any]) -> None:
    """So that a program which catches those of torch catches ours."""
    with pytest.raises((ValueError, TypeError, RuntimeError)) as theirs:
        mistake(getattr(nn, name))
    with pytest.raises(theirs.type) as ours:
        mistake(getattr(cw, name))
    if ours.type is not TypeError:  # Python's own, of an option that there is not
        assert isinstance(ours.value, UserError)
        assert "\n" not in str(ours.value)
