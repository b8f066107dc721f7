"""A chain over labels as its words say: every path is listed. And problems to try it on, drawn by hypothesis.

Shapes: T time, B lane, V labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from hypothesis import strategies as st
from torch import Tensor

from carrywave.kernels.crf.definition import UNKNOWN, Chain


@dataclass
class Problem:
    """Emissions, a chain with transitions that are ruled out, lengths from 0 on, and labels of which some are unknown."""

    emissions_TBV: Tensor
    chain: Chain
    lengths_B: Tensor
    tags_TB: Tensor
    weights_B: Tensor | None

    @property
    def leaves(self) -> list[Tensor]:
        return [self.emissions_TBV, *self.chain]


def problem(
    seed: int,
    steps: int,
    lanes: int,
    labels: int,
    *,
    ruled_out: float = 0.2,
    unknown: float = 0.2,
    weighted: bool = False,
    scale: float = 2.0,
) -> Problem:
    """One that has a path through its known labels in every lane: its labels are drawn along allowed transitions."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return 2.0 * torch.randn(*shape, generator=draw, dtype=torch.float64)

    def flags(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=draw) < ruled_out

    forbidden = flags(labels), flags(labels, labels), flags(labels)
    for each in forbidden:
        each[..., 0] = False  # the first label is always possible, so that there is a way on
    start, transitions, end = (torch.where(no, -torch.inf, normal(*no.shape)).requires_grad_() for no in forbidden)
    lengths = torch.randint(0, steps + 1, (lanes,), generator=draw)
    tags = torch.full((steps, lanes), UNKNOWN)
    for lane, length in enumerate(lengths.tolist()):
        allowed = ~forbidden[0]
        for t in range(length):
            if t + 1 == length:
                allowed = allowed & ~forbidden[2]
            choices = allowed.nonzero()[:, 0]
            tag = int(choices[int(torch.randint(len(choices), (), generator=draw))])
            allowed = ~forbidden[1][tag]
            if not bool(torch.rand((), generator=draw) < unknown):
                tags[t, lane] = tag
    weights = torch.rand(lanes, generator=draw, dtype=torch.float64) if weighted else None
    return Problem(normal(steps, lanes, labels).requires_grad_(), Chain(start, transitions, end), lengths, tags, weights)


@st.composite
def problems(draw: st.DrawFn, most_steps: int = 4, most_labels: int = 4, most_lanes: int = 4) -> Problem:
    def share() -> float:
        return draw(st.sampled_from([0.0, 0.3, 1.0]))

    sizes = [draw(st.integers(1, most)) for most in (most_steps, most_lanes, most_labels)]
    return problem(draw(st.integers(0, 2**31)), *sizes, ruled_out=min(share(), 0.5), unknown=share(), weighted=draw(st.booleans()))


def score(given: Problem, lane: int, path: tuple[int, ...]) -> Tensor:
    """The score of one path, term by term."""
    start_V, transitions_VV, end_V = given.chain
    total = start_V[path[0]] + end_V[path[-1]] + transitions_VV.new_zeros(())
    for t, label in enumerate(path):
        total = total + given.emissions_TBV[t, lane, label]
        if t:
            total = total + transitions_VV[path[t - 1], label]
    return total


def paths(given: Problem, lane: int) -> list[tuple[int, ...]]:
    """All paths of a lane that nothing rules out."""
    every = product(range(given.emissions_TBV.shape[2]), repeat=int(given.lengths_B[lane]))
    return [path for path in every if bool(score(given, lane, path) > -torch.inf)]


def listed_loss(given: Problem) -> Tensor:
    """The weighted sum of the lanes' losses, from all their paths."""
    total = given.emissions_TBV.sum() * 0.0
    for lane, length in enumerate(given.lengths_B.tolist()):
        if not length:
            continue
        tags = given.tags_TB[:length, lane].tolist()
        every = paths(given, lane)
        right = [path for path in every if all(tag in (UNKNOWN, label) for tag, label in zip(tags, path, strict=True))]
        free, held = (torch.stack([score(given, lane, path) for path in some]).logsumexp(0) for some in (every, right))
        total = total + (free - held) * (1.0 if given.weights_B is None else given.weights_B[lane])
    return total
