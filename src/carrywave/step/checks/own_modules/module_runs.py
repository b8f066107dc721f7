"""Runs a user's module on the pieces of a sample: an encoder, layers, a head, or a model in one piece; with gradients if enabled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from carrywave.kernels import random
from carrywave.model.recurrent import Recurrent
from carrywave.model.stage import checked_score
from carrywave.model.state import Chunk, State
from carrywave.step.checks.own_modules.cuts import Piece
from carrywave.step.checks.own_modules.probe_sample import ProbeSample, numbers


@dataclass
class Ran:
    """The results of a run: outputs of each piece, loss and count of each, and gradients of the parameters by name and of the input."""

    outputs: list[list[Tensor]] = field(default_factory=list)
    sums: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)


Run = Callable[[ProbeSample, Sequence[Piece]], Ran]


def encoder(module: nn.Module, path: str) -> Run:
    """Make a runner for an encoder. Its output is differentiated with weights that differ by step and lane."""

    def run(sample: ProbeSample, pieces: Sequence[Piece]) -> Ran:
        ran = Ran()
        for first, end, low, high in pieces:
            with random.scope(sample.key, sample.lanes[low:high], first, whole=len(pieces) == 1):
                out = module(sample.x[first:end, low:high])
            if not isinstance(out, Tensor):
                return ran  # the step itself refuses it, in words of its own
            ran.outputs.append([out.detach()])
            if out.requires_grad:
                _add(ran, _gradients((out * _weights(out, first, low)).sum() * sample.scale, module, path))
        return ran

    return run


def head(module: Any, path: str, *, pooled: bool, whole: bool = False, before: nn.Module | None = None) -> Run:
    """Make a runner for a head: its loss, its output if it has one, and the gradients of its parameters and its input. `whole`: it reads
    whole sequences, and their lengths. `before`: an encoder that runs on each piece before it, and may leave something for it.
    """
    shows = type(module).forward is not nn.Module.forward
    accumulates = pooled and not whole

    def scope(sample: ProbeSample, at: Piece, *, alone: bool, pooled: bool = False) -> AbstractContextManager[object]:
        return random.scope(sample.key, sample.lanes[at.low : at.high], at.first, pooled=pooled, whole=alone, part="head")

    def score(sample: ProbeSample, read: Any, at: Piece, ran: Ran, *, alone: bool) -> None:
        lengths = [sample.lengths[at.low : at.high]] if whole else []
        with scope(sample, at, alone=alone, pooled=accumulates):
            if shows and (sample.shows or sample.targets is None):
                out = module(tree_map(torch.clone, read), *lengths)  # both may change what they read in place
                ran.outputs.append([leaf.detach() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)])
            if sample.targets is None:
                return
            own = sample.targets[at.low : at.high] if pooled else sample.targets[at.first : at.end, at.low : at.high]
            ran.sums.append(checked_score(module.loss(read, own, *lengths), f"loss of the head {type(module).__name__}"))

    def encode(sample: ProbeSample, at: Piece, *, alone: bool) -> None:
        if before is not None:
            with random.scope(sample.key, sample.lanes[at.low : at.high], at.first, whole=alone):
                before(sample.x[at.first : at.end, at.low : at.high])

    def run(sample: ProbeSample, pieces: Sequence[Piece]) -> Ran:
        ran, alone = Ran(), len(pieces) == 1
        y = sample.y.detach().requires_grad_(torch.is_grad_enabled())
        if not accumulates:
            for at in pieces:
                encode(sample, at, alone=alone)
                score(sample, y[at.first : at.end, at.low : at.high].clone(), at, ran, alone=alone)
        else:
            for low, high in dict.fromkeys((at.low, at.high) for at in pieces):
                acc = module.start(high - low, y.dtype, y.device)
                for at in [each for each in pieces if (each.low, each.high) == (low, high)]:
                    encode(sample, at, alone=alone)
                    lengths = (sample.lengths[low:high] - at.first).clamp(0, at.end - at.first)
                    with scope(sample, at, alone=alone):
                        acc = module.pool(y[at.first : at.end, low:high].clone(), lengths, acc)
                score(sample, acc, Piece(0, y.shape[0], low, high), ran, alone=alone)
        if ran.sums and torch.is_grad_enabled():
            _add(ran, _gradients(torch.stack([total for total, _ in ran.sums]).sum() * sample.scale, module, path, y))
        return ran

    return run


def layers(module: Recurrent, path: str, which: range, width: int) -> Run:
    """Make a runner for layers whose input has this width: random numbers. The carry passes from chunk to chunk."""

    def run(sample: ProbeSample, pieces: Sequence[Piece]) -> Ran:
        ran = Ran()
        like = sample.y
        x = numbers(like.shape[0], like.shape[1], width).to(like)
        for low, high in dict.fromkeys((at.low, at.high) for at in pieces):
            carries = module.initial(high - low, like.dtype, like.device, which)
            weighted: list[Tensor] = []
            for first, end, *_ in [at for at in pieces if (at.low, at.high) == (low, high)]:
                lengths = (sample.lengths[low:high] - first).clamp(0, end - first)
                lanes = sample.lanes[low:high]
                out, carries = module.run(
                    x[first:end, low:high], carries, lengths=lengths, lanes=lanes, start=first, key=sample.key, layers=which
                )
                ran.outputs.append([out.detach()])
                weighted.append((out * _weights(out, first, low)).sum())
            if torch.is_grad_enabled():
                _add(ran, _gradients(torch.stack(weighted).sum() * sample.scale, module, path))
        return ran

    return run


def piecewise(module: Any, path: str) -> Run:
    """Make a runner for a one-piece model, whose loss reads its output. It is cut along lanes only. Outputs may be anything that the loss
    takes, so they are compared only where there is no loss.
    """

    def run(sample: ProbeSample, pieces: Sequence[Piece]) -> Ran:
        ran = Ran()
        for at in pieces:
            own = slice(at.low, at.high)
            chunk = Chunk(sample.lengths[own], None, sample.lanes[own], 0, sample.key, whole=len(pieces) == 1)
            out, _, state = module(sample.x[:, own], State(()), chunk)
            if sample.targets is None:
                ran.outputs.append([leaf.detach() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)])
            else:
                ran.sums.append(module.loss(out, state, sample.targets[own] if module.pooled else sample.targets[:, own], chunk))
        if ran.sums and torch.is_grad_enabled():
            _add(ran, _gradients(torch.stack([total for total, _ in ran.sums]).sum() * sample.scale, module.module, path))
        return ran

    return run


def _weights(out: Tensor, first: int, low: int) -> Tensor:
    """Numbers that differ by step, lane and element, for an output [T, B, …] that begins at this step and lane."""
    angle = torch.zeros((), device=out.device, dtype=torch.float64)
    for dim, (begin, pace) in enumerate([(first, 1.3), (low, 2.1), *[(0, 0.7)] * (out.dim() - 2)]):
        place = torch.arange(begin, begin + out.shape[dim], device=out.device)
        angle = angle + pace * place.reshape(-1, *[1] * (out.dim() - 1 - dim))
    return torch.cos(angle).to(out.dtype)


def _gradients(total: Tensor, root: nn.Module, path: str, y: Tensor | None = None) -> dict[str, Tensor | None]:
    if not total.requires_grad:
        return {}
    trained = {f"{path}.{name}": p for name, p in root.named_parameters() if p.requires_grad}
    wanted = [*trained.values(), *([] if y is None else [y])]
    if not wanted:
        return {}
    with random.without_draws():  # as in a step, which has words of its own for what is computed again in backward
        found = torch.autograd.grad(total, wanted, allow_unused=True)
    return dict(zip([*trained, "its input"], found, strict=False))


def _add(ran: Ran, gradients: dict[str, Tensor | None]) -> None:
    for name, gradient in gradients.items():
        before = ran.gradients.get(name)
        dense = gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient
        ran.gradients[name] = dense if before is None else before if dense is None else before + dense
