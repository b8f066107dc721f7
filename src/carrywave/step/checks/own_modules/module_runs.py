"""Runs a user's module on the pieces of a sample: an encoder, layers, a head, or a model in one piece; with gradients if enabled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


INPUT = "its input"  # the name of its gradient
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
            weights = sample.weights_of(own, at, by_lane=pooled or whole)
            ran.sums.append(checked_score(module.loss(read, own, *lengths, **weights), f"loss of the head {type(module).__name__}"))

    def encode(sample: ProbeSample, at: Piece, *, alone: bool) -> None:
        if before is not None:
            with random.scope(sample.key, sample.lanes[at.low : at.high], at.first, whole=alone):
                before(sample.x[at.first : at.end, at.low : at.high])

    def run(sample: ProbeSample, pieces: Sequence[Piece]) -> Ran:
        ran, alone = Ran(), len(pieces) == 1
        if accumulates:
            for low, high in dict.fromkeys((at.low, at.high) for at in pieces):
                pooled_lanes(sample, [at for at in pieces if (at.low, at.high) == (low, high)], ran, alone=alone)
            return ran
        y = sample.y.detach().requires_grad_(torch.is_grad_enabled())
        for at in pieces:
            encode(sample, at, alone=alone)
            score(sample, y[at.first : at.end, at.low : at.high].clone(), at, ran, alone=alone)
        if ran.sums and torch.is_grad_enabled():
            total = torch.stack([total for total, _ in ran.sums]).sum() * sample.scale
            _add(ran, _gradients(total, module, path, {INPUT: y}))
        return ran

    def pooled_lanes(sample: ProbeSample, chunks: Sequence[Piece], ran: Ran, *, alone: bool) -> None:
        """Chunk after chunk forward, and backward from the last to the first, each from the accumulator that it began with: what a chunk
        leaves to others in another way is missed, as it is in a step.
        """

        def pool(at: Piece, y: Tensor, acc: Any) -> Any:
            encode(sample, at, alone=alone)
            with scope(sample, at, alone=alone):
                return module.pool(y.clone(), (sample.lengths[at.low : at.high] - at.first).clamp(0, at.end - at.first), acc)

        low, high, steps, grad = chunks[0].low, chunks[0].high, sample.y.shape[0], torch.is_grad_enabled()
        entered = [module.start(high - low, sample.y.dtype, sample.y.device)]
        for at in chunks[:-1]:
            entered.append(tree_map(torch.detach, pool(at, sample.y[at.first : at.end, low:high], entered[-1])))
        passed: list[Tensor | None] = []  # the gradients of what a chunk has pooled
        for at, acc in reversed([*zip(chunks, entered, strict=True)]):
            begun = tree_map(lambda part: part.detach().requires_grad_(grad and part.is_floating_point()), acc)
            y = sample.y[at.first : at.end, low:high].detach().requires_grad_(grad)
            pooled = pool(at, y, begun)
            if at is chunks[-1]:
                score(sample, pooled, Piece(0, steps, low, high), ran, alone=alone)
                roots = [ran.sums[-1][0] * sample.scale] if ran.sums else []
            else:
                roots = [(part * grown).sum() for part, grown in zip(pooled, passed, strict=False) if grown is not None]
            if not grad or not roots:
                return
            parts = {f"pooled {number}": part for number, part in enumerate(begun) if part.requires_grad}
            found = _gradients(torch.stack(roots).sum(), module, path, {INPUT: y, **parts})
            passed = [found.pop(f"pooled {number}", None) for number in range(len(begun))]
            if (of_input := found.pop(INPUT, None)) is not None:
                of_all = torch.zeros_like(sample.y)
                of_all[at.first : at.end, low:high] = of_input
                found[INPUT] = of_all
            _add(ran, found)

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
            weights = sample.weights if sample.weights is None else sample.weights[(slice(None),) * (sample.weights.dim() > 1) + (own,)]
            chunk = Chunk(sample.lengths[own], None, sample.lanes[own], 0, sample.key, whole=len(pieces) == 1, weights=weights)
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


def _gradients(total: Tensor, root: nn.Module, path: str, inputs: Mapping[str, Tensor] | None = None) -> dict[str, Tensor | None]:
    """Those of the parameters that are trained, and of these inputs, by name."""
    wanted = {f"{path}.{name}": p for name, p in root.named_parameters() if p.requires_grad} | dict(inputs or {})
    if not total.requires_grad or not wanted:
        return {}
    with random.without_draws():  # as in a step, which has words of its own for what is computed again in backward
        found = torch.autograd.grad(total, [*wanted.values()], allow_unused=True)
    return dict(zip(wanted, found, strict=True))


def _add(ran: Ran, gradients: dict[str, Tensor | None]) -> None:
    for name, gradient in gradients.items():
        before = ran.gradients.get(name)
        dense = gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient
        ran.gradients[name] = dense if before is None else before if dense is None else before + dense
