"""Stacks of layers in float64, with everything that the persistent kernels run: any of their cells, lengths, masks, resets and noise.

Shapes: T time, B lane, I input, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from carrywave.cells.cell import by_name
from carrywave.kernels import random, reference
from carrywave.kernels.carry import AnyCarries
from carrywave.kernels.hopper import wave
from carrywave.kernels.hopper.layout import Wave
from carrywave.kernels.step_marks import CellNoise, StepMarks
from carrywave.kernels.weights import LayerWeights

# What is always tested, whatever hypothesis draws.
KINDS = [
    {"cell": cell, "noise": noise, "resets": resets}
    for cell in ("lstm", "gru")
    for noise in ("", "training", "evaluation")
    for resets in (0.0, 0.3)
]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=[" ".join(map(str, kind.values())) for kind in KINDS])


def make(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@dataclass
class Stack:
    """Layers of one width, what they are run on, and the weights of all results in a loss."""

    count: int
    steps: int
    lanes: int
    inputs: int
    short: bool = False  # lanes have lengths
    masked: str = ""  # outputs between layers are masked: "steps", or "locked" for all steps alike
    biased: bool = True
    seed: int = 0
    cell: str = "lstm"
    hidden: int = 20
    resets: float = 0.0  # the share of steps at which a lane starts again
    every: int = 0  # half of the lanes start again at each multiple of so many steps
    learned: bool = False  # resets go back to a carry that is trained
    noise: str = ""  # inside the cell: "training" or "evaluation"
    dropped: float = 0.3
    zoned: tuple[float, float] = (0.4, 0.2)
    locked: bool = False

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        made, hidden = by_name(self.cell), self.hidden
        rows, parts = made.gates * hidden, len(made.parts)
        shapes = [((rows, hidden if layer else self.inputs), (rows, hidden), *([(rows,)] * 2 * self.biased)) for layer in range(self.count)]
        self.layers = [LayerWeights(*[make(*each).mul_(0.3).requires_grad_() for each in of_layer]) for of_layer in shapes]
        self.carries: AnyCarries = self._carries(self.lanes)
        self.x = make(self.steps, self.lanes, self.inputs)
        self.masks: list[Tensor | None] = [None] * self.count
        if self.masked:
            of_mask = (self.steps if self.masked == "steps" else 1, self.lanes, hidden)
            self.masks[:-1] = [(torch.rand(of_mask) > 0.5).double() * 2 for _ in range(self.count - 1)]
        self.lengths = torch.randint(0, self.steps + 1, (self.lanes,)) if self.short else None
        self.by = make(self.steps, self.lanes, hidden)
        self.by_ends = [make(1, self.lanes, hidden) for _ in range(parts * self.count)]
        self.marks = self._marks(parts)

    def _carries(self, lanes: int) -> AnyCarries:
        made = by_name(self.cell)
        return tuple(made.carry(*(make(1, lanes, self.hidden).requires_grad_() for _ in made.parts)) for _ in range(self.count))

    def _marks(self, parts: int) -> list[StepMarks] | None:
        if not (self.resets or self.every or self.noise):
            return None
        resets = None
        if self.resets or self.every:
            resets = torch.rand(self.steps, self.lanes) < self.resets
            resets[:: self.every or self.steps] |= torch.rand(self.lanes) < (0.5 if self.every else 0.0)
        self.initial = self._carries(1) if self.learned and resets is not None else [None] * self.count
        noises: list[CellNoise | None] = [None] * self.count
        if self.noise:
            key, lanes = random.key(self.seed) if self.noise == "training" else None, torch.randperm(2 * self.lanes)[: self.lanes]
            noises = [
                CellNoise(self.dropped, self.zoned[:parts], (tuple(range(10 * n, 10 * n + 1 + parts)),), self.locked, key, lanes, 5)
                for n in range(self.count)
            ]
        return [StepMarks(resets, *of_layer) for of_layer in zip(self.initial, noises, strict=True)]

    def marks_of(self, first: int, end: int) -> list[StepMarks] | None:
        """Those of some steps."""
        if self.marks is None:
            return None
        found = []
        for marks in self.marks:
            resets = None if marks.resets is None else marks.resets[first:end]
            noise = None if marks.noise is None else replace(marks.noise, start=marks.noise.start + first)
            found.append(StepMarks(resets, marks.initial, noise))
        return found

    @property
    def weights(self) -> list[Tensor]:
        return [part for layer in self.layers for part in layer if part is not None]

    @property
    def leaves(self) -> list[Tensor]:
        learned = [part for marks in self.marks or () for part in marks.initial or ()]
        return [*(part for carry in self.carries for part in carry), *self.weights, *learned]

    def at_once(self, how: Wave) -> list[Tensor]:
        """Outputs, last carries, and the gradients of x and of the leaves, by the persistent kernels."""
        x = self.x.clone().requires_grad_()
        y, ends = wave.run(x, self.carries, self.layers, self.masks, self.lengths, how.of_cell(self.cell), marks=self.marks)
        return self.results(x, y, ends)

    def defined(self) -> list[Tensor]:
        """The same by the definition, and autograd."""
        x = y = self.x.clone().requires_grad_()
        ends = []
        for number, (layer, carry, mask) in enumerate(zip(self.layers, self.carries, self.masks, strict=True)):
            marks = None if self.marks is None else self.marks[number]
            y, end = reference.layer(y, carry, (layer,), self.lengths, by_name(self.cell), marks=marks)
            y = y if mask is None else y * mask
            ends.append(end)
        return self.results(x, y, tuple(ends))

    def results(self, x: Tensor, y: Tensor, ends: AnyCarries) -> list[Tensor]:
        last = [part for end in ends for part in end]
        found = torch.autograd.grad([y, *last], [x, *self.leaves], [self.by, *self.by_ends], materialize_grads=True)
        return [y.detach(), *(part.detach() for part in last), *found]


@st.composite
def stacks(draw: st.DrawFn, made: type[Stack] = Stack, *, learned: bool = True, **fixed: Any) -> Any:
    """Any stack: of some layers, or as `fixed` says."""
    noise = draw(st.sampled_from(["", "", "training", "evaluation"]))
    some: dict[str, st.SearchStrategy[Any]] = {
        "count": st.integers(1, 3),
        "steps": st.integers(1, 9),
        "lanes": st.integers(1, 5),
        "inputs": st.integers(1, 12),
        "short": st.booleans(),
        "masked": st.sampled_from(["", "steps", "locked"]),
        "biased": st.booleans(),
        "seed": st.integers(0, 99),
        "cell": st.sampled_from(["lstm", "gru"]),
        "resets": st.sampled_from([0.0, 0.2, 0.7, 1.0]),
        "every": st.sampled_from([0, 1, 2, 3]),
        "learned": st.booleans() if learned and not noise else st.just(False),  # the kernels take either
        "dropped": st.sampled_from([0.0, 0.3]),
        "zoned": st.sampled_from([(0.4, 0.2), (0.0, 0.3), (0.5, 0.0)]),
        "locked": st.booleans(),
    }
    drawn = {name: draw(strategy) for name, strategy in some.items() if name not in fixed}
    return made(**drawn, noise=noise, **{name: draw(each) if isinstance(each, st.SearchStrategy) else each for name, each in fixed.items()})


def assert_same(got: list[Tensor], expected: list[Tensor], tolerance: float = 1e-11) -> None:
    """By norms: sums of some hundred terms in another order lose a few of float64's 53 bits."""
    for number, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        assert (mine - theirs).norm().item() <= tolerance * max(1.0, theirs.norm().item()), number
