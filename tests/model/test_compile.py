"""torch.compile around a training step with our LSTM inside: the numbers of the step without it. float64, but where it says otherwise.

A graph may break at the LSTM, as it does at torch's own.
"""

from __future__ import annotations

import shutil
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from carrywave.kernels import random
from carrywave.model.dropout import Dropout
from carrywave.model.lstm import LSTM

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's compiler says much about itself


KEY = random.key(5)  # left out, it comes of torch's generator, whose numbers a compiler may change


class Tagger(nn.Module):
    """Tokens to tags."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.rows, self.lstm, self.out = nn.Embedding(9, 4), LSTM(4, 5, **options), nn.Linear(5, 3)

    def forward(self, tokens: Tensor, lengths: Tensor | None) -> Tensor:
        y, _ = self.lstm(self.rows(tokens), None, lengths, KEY)
        out: Tensor = self.out(y)
        return out


def trained(backend: str | None, options: dict[str, Any], lengths: Tensor | None, *, whole: bool) -> list[Tensor]:
    """The losses of some steps on different numbers of steps, and the weights after them."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    tagger = Tagger(**options).double()
    optimizer = torch.optim.SGD(tagger.parameters(), lr=0.5)
    model: Any = tagger if backend is None or whole else torch.compile(tagger, backend=backend)

    def step(tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(tokens, lengths).flatten(0, 1), tokens.flatten() % 3)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    run: Any = torch.compile(step, backend=backend) if backend is not None and whole else step
    losses = []
    for number, steps in enumerate((4, 4, 6)):
        torch.manual_seed(number)
        losses.append(run(torch.arange(steps * 2).view(steps, 2) % 9))
    return [torch.stack(losses), *(each.detach() for each in tagger.parameters())]


CASES = {
    "plain": ({}, None),
    "lengths and dropout": ({"num_layers": 2, "dropout": 0.5}, torch.tensor([4, 2])),
    "all that nn.LSTM does not have": ({"num_layers": 2, "weight_drop": 0.3, "layer_norm": True, "learned_carry": True}, None),
    "noise and norms inside the cell": ({"recurrent_dropout": 0.3, "zoneout": 0.2, "cell_norm": True}, None),
    "the definition": ({"kernel": "reference"}, None),
}


@pytest.mark.parametrize(
    ("case", "backend", "whole"),
    [
        ("plain", "eager", False),
        pytest.param("plain", "eager", True, marks=pytest.mark.slow),
        pytest.param("lengths and dropout", "eager", False, marks=pytest.mark.slow),
        *(pytest.param(case, "aot_eager", False, marks=pytest.mark.slow) for case in CASES),
        pytest.param("lengths and dropout", "aot_eager", True, marks=pytest.mark.slow),
        *(pytest.param(case, "inductor", False, marks=pytest.mark.slow) for case in ("plain", "lengths and dropout")),
    ],
)
def test_a_compiled_step_is_the_step(case: str, backend: str, whole: bool) -> None:
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("no C++ compiler is here")
    expected, got = (trained(each, *CASES[case], whole=whole) for each in (None, backend))
    # The same operations, but for the kernels of the layer, which add in another order.
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_keyed_dropout_in_a_compiled_module_has_the_masks_of_one_that_is_not() -> None:
    torch._dynamo.reset()
    drop = Dropout(0.5, name="encoder.drop")

    def twice(x: Tensor) -> Tensor:
        return drop(x) + 10 * drop(2 * x)  # type: ignore[no-any-return]

    compiled: Any = torch.compile(twice, backend="eager")
    x, lanes = torch.ones(3, 4, 5), torch.arange(4, 8)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for start in (0, 3):
            found = []
            for run in (compiled, twice):
                with random.Scope(KEY, lanes, start):
                    found.append(run(x))
            assert torch.equal(*found)
    assert not [each for each in said if "zlib" in str(each.message)]
