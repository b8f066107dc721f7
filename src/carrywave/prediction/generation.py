"""Continues prompts with a language model, one token at a time, passing the carry along.

The next token is the likeliest, or one drawn from those that top-k and top-p keep. The draw is a function of one uniform number, keyed by
(seed, prompt, position), so equal seeds give equal texts on every device. Shapes: T time, B prompt, H width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from carrywave.data.text.documents import DocumentEnds
from carrywave.errors import UserError, option
from carrywave.kernels import random
from carrywave.model.model import Model
from carrywave.prediction.averages import mean_of_shares


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Top-k applies before top-p, which counts the probability that top-k leaves."""

    temperature: float = 1.0  # 0 picks the likeliest token
    top_k: int | None = None  # draw from this many of the likeliest tokens
    top_p: float | None = None  # draw from the fewest of the likeliest tokens that have this probability together
    seed: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"{option('temperature')} is {self.temperature}; use a number >= 0")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"{option('top-k')} is {self.top_k}; use a number of tokens >= 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"{option('top-p')} is {self.top_p}; use a probability above 0 and at most 1")


def choose(logits_BV: Tensor, how: Sampling, uniform_B: Tensor) -> Tensor:
    """The token of each prompt, given a number in [0, 1) for each."""
    if how.temperature == 0:
        return logits_BV.argmax(dim=-1)
    # The likeliest token has 0 before the division, so that a tiny temperature leaves it finite.
    above_BV = logits_BV - logits_BV.amax(dim=-1, keepdim=True)
    shares_BV = kept(torch.softmax(above_BV / how.temperature, dim=-1), how)
    cumulative_BV = shares_BV.cumsum(dim=-1)
    # Scaled by the total, so that the shares need not add up to 1. A token without a share is never the first beyond the draw.
    drawn_B1 = (uniform_B.double() * cumulative_BV[:, -1])[:, None]
    return torch.searchsorted(cumulative_BV, drawn_B1, right=True)[:, 0].clamp(max=logits_BV.shape[-1] - 1)


def kept(shares_BV: Tensor, how: Sampling) -> Tensor:
    """The probabilities of the tokens to draw from, and 0 for the others. Among equals, the token with the lower number comes first."""
    top_k = None if how.top_k is None or how.top_k >= shares_BV.shape[-1] else how.top_k
    top_p = None if how.top_p == 1 else how.top_p
    if top_k is None and top_p is None:
        return shares_BV
    ranked_BV, token_BV = torch.sort(shares_BV, dim=-1, descending=True, stable=True)
    if top_k is not None:
        ranked_BV[:, top_k:] = 0.0
    if top_p is not None:
        reached_BV = ranked_BV.cumsum(dim=-1)
        before_BV = torch.cat([torch.zeros_like(reached_BV[:, :1]), reached_BV[:, :-1]], dim=-1)
        ranked_BV = torch.where(before_BV < top_p * reached_BV[:, -1:], ranked_BV, 0.0)
    return torch.zeros_like(shares_BV).scatter_(-1, token_BV, ranked_BV)


@torch.no_grad()
def generate(
    model: Model | Sequence[Model],
    prompts: Sequence[Sequence[int]],
    count: int,
    *,
    how: Sampling,
    device: torch.device,
    numbers: Sequence[int] | None = None,
    ends: DocumentEnds | None = None,
) -> list[list[int]]:
    """Generate `count` tokens for each prompt (of at least one token).

    Several models continue them together: each token is drawn from the mean of their probabilities. `numbers` are the numbers of the
    prompts among all of them, by which draws are keyed; by default, they are counted from 0. `ends`: what ends a document, after which the
    state starts anew.
    """
    if not prompts:
        return []
    models = [model] if isinstance(model, Model) else list(model)
    for each in models:
        each.eval()
    lengths_B = torch.tensor([len(prompt) for prompt in prompts], device=device)
    x_TB = torch.zeros((int(lengths_B.max()), len(prompts)), dtype=torch.int64)
    for lane, prompt in enumerate(prompts):
        x_TB[: len(prompt), lane] = torch.tensor(list(prompt))
    resets_TB = None if ends is None else torch.zeros_like(x_TB, dtype=torch.bool)
    if ends is not None and resets_TB is not None:
        for lane, prompt in enumerate(prompts):
            resets_TB[: len(prompt), lane] = torch.from_numpy(ends.begins(np.array(prompt), np.arange(len(prompt))))
    read = [each(x_TB.to(device), lengths=lengths_B, resets=resets_TB) for each in models]
    recent = [list(prompt[-2:]) for prompt in prompts]
    ys_BH = [y_TBH[lengths_B - 1, torch.arange(len(prompts), device=device)] for y_TBH, _ in read]
    states = [state for _, state in read]
    key = random.key(how.seed).to(device)
    number_B = torch.tensor(range(len(prompts)) if numbers is None else list(numbers), device=device)
    tokens: list[Tensor] = []
    for position in range(count):
        logits = [each.head(y_BH[None])[0].double() for each, y_BH in zip(models, ys_BH, strict=True)]
        logits_BV = logits[0] if len(logits) == 1 else mean_of_shares(logits)
        chosen_B = choose(logits_BV, how, random.uniform(key, number_B, torch.full_like(number_B, position)))
        tokens.append(chosen_B)
        if position + 1 < count:
            fresh_B = None
            if ends is not None:
                recent = [[*before, token][-3:] for before, token in zip(recent, chosen_B.tolist(), strict=True)]
                fresh_B = [bool(ends.begins(np.array(tokens), np.array(len(tokens) - 1))) for tokens in recent]
            read = [each(chosen_B[None], state, fresh=fresh_B) for each, state in zip(models, states, strict=True)]
            ys_BH, states = [y_TBH[0] for y_TBH, _ in read], [state for _, state in read]
    return torch.stack(tokens, dim=1).tolist() if tokens else [[] for _ in prompts]
