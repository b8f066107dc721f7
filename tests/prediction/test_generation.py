"""Top-k and top-p against a plain reference that walks through the tokens one by one."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from carrywave.errors import DataError, UserError
from carrywave.prediction.generation import Sampling, _prompt, choose, kept


def reference(logits: list[float], how: Sampling, uniform: float) -> int:
    """The token, by the definitions of top-k and top-p."""
    if how.temperature == 0:
        return max(range(len(logits)), key=lambda token: (logits[token], -token))
    weights = [math.exp((logit - max(logits)) / how.temperature) for logit in logits]
    ranked = sorted(range(len(weights)), key=lambda token: (-weights[token], token))[: how.top_k]
    total, chosen, reached = sum(weights[token] for token in ranked), [], 0.0
    for token in ranked:
        if how.top_p is None or reached < how.top_p * total:
            chosen.append(token)
        reached += weights[token]
    drawn = uniform * sum(weights[token] for token in chosen)
    for token in sorted(chosen):
        drawn -= weights[token]
        if drawn < 0:
            return token
    return max(chosen)


@pytest.mark.parametrize("top_k", [None, 1, 3, 50])
@pytest.mark.parametrize("top_p", [None, 1e-9, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 0.5, 2.0])
def test_draws_are_those_of_the_definition(temperature: float, top_k: int | None, top_p: float | None) -> None:
    how = Sampling(temperature, top_k, top_p)
    draw = torch.Generator().manual_seed(1)
    logits_BV = torch.randn(60, 12, generator=draw, dtype=torch.float64) * 2
    logits_BV[::5, 3:6] = logits_BV[::5, :1]  # equals
    uniform_B = torch.rand(60, generator=draw, dtype=torch.float64)
    wanted = [reference(logits, how, uniform) for logits, uniform in zip(logits_BV.tolist(), uniform_B.tolist(), strict=True)]
    assert choose(logits_BV, how, uniform_B).tolist() == wanted


def test_a_token_that_was_left_out_is_never_drawn() -> None:
    logits_BV = torch.log(torch.tensor([[0.1, 0.4, 0.0, 0.3, 0.2]], dtype=torch.float64)).expand(2000, -1)
    uniform_B = torch.arange(2000) / 2000
    shares = [round(share, 3) for share in kept(torch.softmax(logits_BV[:1], -1), Sampling(top_k=3, top_p=0.7)).tolist()[0]]
    assert shares == [0.0, 0.4, 0.0, 0.3, 0.0]  # 0.4 / 0.9 is not yet 0.7, and 0.7 / 0.9 is more
    found = torch.bincount(choose(logits_BV, Sampling(top_k=3, top_p=0.7), uniform_B), minlength=5)
    assert found.tolist() == pytest.approx([0, 2000 * 4 / 7, 0, 2000 * 3 / 7, 0], abs=1)


def test_a_tiny_temperature_is_the_likeliest_token() -> None:
    logits_BV = torch.tensor([[300.0, 301.0, -5.0]], dtype=torch.float64)
    assert choose(logits_BV, Sampling(1e-320), torch.tensor([0.999])).tolist() == [1]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"top_k": 0}, "top_k=... is 0; use a number of tokens"),
        ({"top_p": 0.0}, "top_p=... is 0.0; use a probability"),
        ({"top_p": 1.5}, "top_p"),
    ],
)
def test_what_cannot_be_meant_is_refused(how: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Sampling(**how)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "is empty, and the vocabulary has no newline to start"), (" ", "' ' contains no tokens; pass some text"), (3, "no text; write")],
)
def test_a_prompt_from_which_nothing_can_start(text: Any, message: str) -> None:
    none = np.array([], np.int64)
    codec: Any = SimpleNamespace(encode=lambda text, where: none, tokens=SimpleNamespace(ids=lambda text: none, unknown=0))
    with pytest.raises(DataError, match=message):
        _prompt({"text": text}, "the prompt", codec)
