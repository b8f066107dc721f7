"""Continues prompts with a language model: one token at a time, passing the carry along; sampling is keyed by (seed, prompt, position)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from carrywave.kernels import random
from carrywave.model.model import Model
from carrywave.runs.rows.sampling import Sampling, choose


@torch.no_grad()
def generate(
    model: Model,
    prompts: Sequence[Sequence[int]],
    count: int,
    *,
    how: Sampling,
    device: torch.device,
    numbers: Sequence[int] | None = None,
) -> list[list[int]]:
    """Generate `count` tokens for each prompt (of at least one token).

    `numbers` are the numbers of the prompts among all of them, by which draws are keyed; by default, they are counted from 0.
    """
    if not prompts:
        return []
    model.eval()
    lengths_B = torch.tensor([len(prompt) for prompt in prompts], device=device)
    x_TB = torch.zeros((int(lengths_B.max()), len(prompts)), dtype=torch.int64)
    for lane, prompt in enumerate(prompts):
        x_TB[: len(prompt), lane] = torch.tensor(list(prompt))
    y_TBH, state = model(x_TB.to(device), lengths=lengths_B)
    y_BH = y_TBH[lengths_B - 1, torch.arange(len(prompts), device=device)]
    key = random.key(how.seed).to(device)
    number_B = torch.tensor(range(len(prompts)) if numbers is None else list(numbers), device=device)
    tokens: list[Tensor] = []
    for position in range(count):
        logits_BV = model.head(y_BH[None])[0].double()
        chosen_B = choose(logits_BV, how, random.uniform(key, number_B, torch.full_like(number_B, position)))
        tokens.append(chosen_B)
        if position + 1 < count:
            y_TBH, state = model(chosen_B[None], state)
            y_BH = y_TBH[0]
    return torch.stack(tokens, dim=1).tolist() if tokens else [[] for _ in prompts]
