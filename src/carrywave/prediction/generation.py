"""Continues prompts with a language model, one token at a time, passing the carry along; the prompts are shared among all workers.

The next token is the likeliest, or one drawn from those that top-k and top-p keep. The draw is a function of one uniform number, keyed by
(seed, prompt, position), so equal seeds give equal texts on every device. Shapes: T time, B prompt, H width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from carrywave.data.codec import Codec
from carrywave.data.files.rows import Row, Rows
from carrywave.data.text.documents import DocumentEnds
from carrywave.data.text.tally import Tally
from carrywave.errors import DataError, RunError, UserError, option
from carrywave.kernels import random
from carrywave.model.model import Model
from carrywave.parallel.gather import collect
from carrywave.parallel.world import raise_on_all
from carrywave.prediction.blocks import carried, cut
from carrywave.prediction.ensemble import mean_of_shares
from carrywave.prediction.saved_run import Saved

MOST_PROMPTS, MOST_STEPS = 1024, 1 << 18  # that are read side by side, padded to the longest


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


def continuations(
    members: Sequence[Saved], rows: Rows, kept: Mapping[str, str], count: int, how: Sampling, tally: Tally
) -> Iterator[list[Row]]:
    """The continuations of block after block of prompts; on ranks other than 0 the blocks are empty. Collective.

    Each worker continues its share of a block. Several runs continue them together. `tally` counts what train does not have.
    """
    saved, models = members[0], [member.model for member in members if isinstance(member.model, Model)]
    world, codec = saved.mesh.world, saved.task.codec
    if not isinstance(saved.model, Model):
        raise RunError(
            f"{type(saved.model.module).__name__} passes no carry from token to token, so it cannot continue prompts; "
            "train a cw.Model(encoder, lstm, head)"
        )
    blocks, first = cut(rows, lambda row: len(str(row.get("prompt", row.get("text")))), MOST_PROMPTS, MOST_STEPS), 0
    while True:
        with raise_on_all(world):
            if (block := next(blocks, None)) is None:
                return
            prompts = [_prompt(row, rows.where(number) if rows.kind else rows.name, codec) for number, row in block]
            for text, begun in prompts:
                tally.read(begun, codec.tokens.unknown, text)
            more = [carried(row, kept, rows.where(number)) for number, row in block]
        numbers = range(world.rank, len(block), world.size)
        made = generate(
            models,
            [prompts[number][1].tolist() for number in numbers],
            count,
            how=how,
            device=saved.mesh.device,
            numbers=[first + number for number in numbers],
            ends=saved.task.document_ends,
        )
        local = {"number": torch.tensor(list(numbers)), "tokens": torch.tensor(made)} if made and count else {}
        tokens = dict[int, list[int]]()
        for received in collect(world, local):
            if received:
                tokens |= zip(received["number"].tolist(), received["tokens"].tolist(), strict=True)
        whole = zip(prompts, more, strict=True) if world.rank == 0 else ()
        yield [fields | _row(codec, text, begun, tokens.get(number, [])) for number, ((text, begun), fields) in enumerate(whole)]
        first += len(block)


def _prompt(row: Row, where: str, codec: Codec) -> tuple[str, NDArray[Any]]:
    """The text to continue, and its tokens. A model must have read something: for an empty prompt, a line end."""
    text = row.get("prompt", row.get("text"))
    if not isinstance(text, str):
        raise DataError(f'{where}: no text; write {{"text": "…"}} on each line, or pass a list of strings')
    ids = codec.encode(text, where) if text else codec.tokens.ids("\n")[-1:]
    if not text and (not len(ids) or ids[0] == codec.tokens.unknown):
        raise DataError(f"{where} is empty, and the vocabulary has no newline to start from; pass some text to continue")
    if not len(ids):
        raise DataError(f"{where}: {text!r:.40} contains no tokens; pass some text to continue")
    return text, ids


def _row(codec: Codec, prompt: str, begun: NDArray[Any], more: list[int]) -> Row:
    whole = codec.decode([*begun.tolist(), *more]) if prompt else codec.decode(more)
    return {"prompt": prompt, "continuation": codec.decode(more), "text": whole}
