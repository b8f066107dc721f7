"""Continues prompts with a language model: one token at a time, passing the carry along; sampling is keyed by (seed, prompt, position)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from carrywave.kernels import random
from carrywave.model.model import Model


@torch.no_grad()
def generate(
    model: Model, prompts: Sequence[Sequence[int]], count: int, *, temperature: float = 1.0, seed: int = 0, device: torch.device
) -> list[list[int]]:
    """Generate `count` tokens for each prompt (of at least one token). Temperature 0 picks the most likely token."""
    model.eval()
    lengths_B = torch.tensor([len(prompt) for prompt in prompts], device=device)
    x_TB = torch.zeros((int(lengths_B.max()), len(prompts)), dtype=torch.int64)
    for lane, prompt in enumerate(prompts):
        x_TB[: len(prompt), lane] = torch.tensor(list(prompt))
    y_TBH, state = model(x_TB.to(device), lengths=lengths_B)
    y_BH = y_TBH[lengths_B - 1, torch.arange(len(prompts), device=device)]
    key = random.key(seed).to(device)
    lanes = torch.arange(len(prompts), device=device)
    tokens: list[Tensor] = []
    for position in range(count):
        logits_BV = model.head(y_BH[None])[0].double()
        chosen_B = _choose(logits_BV, temperature, random.uniform(key, lanes, torch.full_like(lanes, position)))
        tokens.append(chosen_B)
        if position + 1 < count:
            y_TBH, state = model(chosen_B[None], state)
            y_BH = y_TBH[0]
    return torch.stack(tokens, dim=1).tolist() if tokens else [[] for _ in prompts]


def _choose(logits_BV: Tensor, temperature: float, uniform_B: Tensor) -> Tensor:
    if temperature <= 0:
        return logits_BV.argmax(dim=-1)
    cumulative_BV = torch.softmax(logits_BV / temperature, dim=-1).cumsum(dim=-1)
    # Scaled by the total, so that rounding never puts a draw beyond the last token.
    drawn_B1 = (uniform_B.double() * cumulative_BV[:, -1])[:, None]
    return torch.searchsorted(cumulative_BV, drawn_B1, right=True)[:, 0].clamp(max=logits_BV.shape[-1] - 1)
