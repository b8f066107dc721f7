"""Cells, resets and noise in the persistent kernels on a Hopper GPU: the definition, and the same bits in every chunking and recording.

Shapes: T time, B lane, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from carrywave.cells.cell import by_name
from carrywave.kernels import reference
from carrywave.kernels.hopper import wave
from carrywave.kernels.hopper.choice import alone, heads_for
from carrywave.kernels.hopper.layout import H200, LayerShape, Wave
from carrywave.kernels.step_marks import CellNoise, StepMarks
from carrywave.kernels.weights import LayerWeights

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True, scope="module")
def _on_hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")


@dataclass
class Case:
    """Layers of a cell with marks, and what the outputs are multiplied with to give a number."""

    cell: str
    count: int
    steps: int
    lanes: int
    hidden: int
    resets: bool = False
    learned: bool = False
    noise: str = ""  # "train", "eval" or nothing
    short: bool = False
    heads: int = 1
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        cell = by_name(self.cell)
        rows, hidden, lanes, steps = cell.gates * self.hidden, self.hidden, self.lanes, self.steps

        def make(*shape: int) -> Tensor:
            return torch.randn(*shape, device="cuda")

        def weight(*shape: int) -> Tensor:
            # Exact in half precision, so that the definition has the same ones.
            drawn: Tensor = (torch.rand(*shape, device="cuda") * 2 - 1) * hidden**-0.5
            return drawn.to(self.dtype).float().requires_grad_()

        shapes = ((rows, hidden), (rows, hidden // self.heads), (rows,), (rows,))
        self.layers = [LayerWeights(*(weight(*shape) for shape in shapes)) for _ in range(self.count)]
        self.x = make(steps, lanes, hidden).to(self.dtype).requires_grad_()

        def part(name: str) -> Tensor:
            drawn = make(1, lanes, hidden).to(self.dtype).float()
            return (drawn.abs() + 0.5 if name == "n" else drawn).requires_grad_()  # weights of a mean are positive

        self.carries = tuple(cell.carry(*map(part, cell.parts)) for _ in range(self.count))
        self.lengths = torch.randint(0, steps + 1, (lanes,), device="cuda") if self.short else None
        self.by = make(steps, lanes, hidden)
        self.initial = [
            cell.carry(*(make(1, 1, hidden).to(self.dtype).float().requires_grad_() for _ in cell.parts)) if self.learned else None
            for _ in range(self.count)
        ]
        self.leaves = [self.x, *(part for carry in self.carries for part in carry)]
        self.leaves += [part for layer in self.layers for part in layer[:4] if part is not None]
        self.leaves += [part for start in self.initial if start is not None for part in start]
        resets = (torch.rand(steps, lanes, device="cuda") < 0.1) if self.resets else None
        key = torch.tensor([1, 2], dtype=torch.int32, device="cuda") if self.noise == "train" else None
        zoneout = (0.2, 0.1)[: len(cell.parts)] if self.cell != "slstm" else (0.2, 0.0, 0.0, 0.0)
        noises = [CellNoise(0.25, zoneout, (f"layer {n}",), key=key) if self.noise else None for n in range(self.count)]
        self.marks = [StepMarks(resets, start, noise) for start, noise in zip(self.initial, noises, strict=True)]

    def run(self, plan: Wave) -> list[Tensor]:
        y, ends = wave.run(self.x, self.carries, self.layers, [None] * self.count, self.lengths, plan.of_cell(self.cell), marks=self.marks)
        return self._with_gradients(y, list(ends))

    def defined(self) -> list[Tensor]:
        y, ends, cell = self.x.double(), [], by_name(self.cell)
        for layer, carry, marks in zip(self.layers, self.carries, self.marks, strict=True):
            wide = LayerWeights(*(None if part is None else part.double() for part in layer[:4]))  # type: ignore[arg-type]
            y, end = reference.layer(y, cell.carry(*(part.double() for part in carry)), (wide,), self.lengths, cell, marks=marks)
            ends.append(end)
        return self._with_gradients(y, ends)

    def _with_gradients(self, y: Tensor, ends: list[tuple[Tensor, ...]]) -> list[Tensor]:
        read = [part for end in ends for part in end]
        if self.cell == "slstm":  # c and n mean something only together, and m has a derivative that jumps where rounding may decide
            read = [part for h, c, n, _ in ends for part in (h, c / n)]
        total = (y * self.by.to(y.dtype)).double().sum() + torch.stack([part.double().sum() for part in read]).sum()
        found = torch.autograd.grad(total, self.leaves, allow_unused=True)
        return [y.detach(), *(part.detach() for end in ends for part in end), *(grad for grad in found if grad is not None)]


def plans(hidden: int, lanes: int, steps: int, heads: int = 1) -> list[Wave]:
    """The layout that is used, and one in pieces, which begin in the middle of the words that hold resets."""
    shape = heads_for(H200, hidden // heads, heads, lanes, "lstm") if heads > 1 else None
    whole = alone(H200, hidden, lanes, steps) if shape is None else Wave(shape, 1, steps)
    assert whole is not None
    return [whole, Wave(whole.shape, 1, 7, whole.apart)]


SHAPES = [(70, 64, 512), (45, 128, 256), (45, 40, 128), (37, 256, 512), (33, 20, 650), (20, 64, 1024)]
SHAPES += [(20, 60, 1792), (16, 62, 1536), (9, 30, 2048)]  # four, three and two passes


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize(("steps", "lanes", "hidden"), SHAPES)
@pytest.mark.parametrize(
    "marked",
    [
        {},
        {"resets": True},
        {"resets": True, "short": True},
        {"resets": True, "learned": True},
        {"noise": "train"},
        {"noise": "train", "resets": True, "short": True},
        {"noise": "eval"},
    ],
    ids=str,
)
def test_a_cell_with_marks_is_the_definition(cell: str, steps: int, lanes: int, hidden: int, marked: dict[str, object]) -> None:
    case = Case(cell, 1, steps, lanes, hidden, **marked)  # type: ignore[arg-type]
    expected = case.defined()
    for plan in plans(hidden, lanes, steps):
        got = case.run(plan)
        assert len(got) == len(expected)
        for number, (own, wanted) in enumerate(zip(got, expected, strict=True)):
            error = (own.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-12)
            assert error <= 1.2e-2, (number, float(error))  # bf16 keeps 8 bits, and errors grow a little from step to step


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("short", [False, True])
def test_a_cell_in_passes_that_overlap_is_the_definition(cell: str, short: bool) -> None:
    case = Case(cell, 1, 60, 250, 768, short=short)
    whole = alone(H200, 768, 250, 60, plain=True)
    assert whole is not None
    assert whole.shape.streamed is not None
    expected = case.defined()
    for plan in (whole.of_cell(cell), replace(whole.of_cell(cell), chunk_steps=7)):
        for number, (own, wanted) in enumerate(zip(case.run(plan), expected, strict=True)):
            error = (own.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-12)
            assert error <= 1.2e-2, (number, float(error))


@pytest.mark.parametrize("cell", ["slstm", "lstm", "gru"])
@pytest.mark.parametrize(
    ("steps", "lanes", "heads", "units"), [(50, 16, 4, 64), (45, 40, 6, 128), (33, 8, 3, 256), (40, 130, 12, 64), (40, 16, 1, 512)]
)
@pytest.mark.parametrize("marked", [{}, {"resets": True, "short": True}, {"noise": "train"}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_heads_are_the_definition(
    cell: str, steps: int, lanes: int, heads: int, units: int, marked: dict[str, object], dtype: torch.dtype
) -> None:
    case = Case(cell, 1, steps, lanes, heads * units, heads=heads, dtype=dtype, **marked)  # type: ignore[arg-type]
    expected = case.defined()
    for plan in plans(heads * units, lanes, steps, heads):
        got = case.run(plan)
        assert len(got) == len(expected)
        for number, (own, wanted) in enumerate(zip(got, expected, strict=True)):
            error = (own.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-12)
            most = 1.2e-2 if dtype == torch.bfloat16 else 2e-3  # 8 bits, and 11
            assert error <= most, (number, float(error))


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_a_wave_of_layers_with_marks(cell: str) -> None:
    case = Case(cell, 3, 40, 16, 256, resets=True, noise="train", short=True)
    expected = case.defined()
    for plan in (Wave(LayerShape(256, 1, 16, 1), 3, 6), Wave(LayerShape(256, 1, 16, 1), 1, 40)):
        for number, (own, wanted) in enumerate(zip(case.run(plan), expected, strict=True)):
            error = (own.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-12)
            assert error <= 2e-2, (number, float(error))  # three layers


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_bits_repeat(cell: str) -> None:
    case = Case(cell, 1, 50, 64, 256, resets=True, noise="train", short=True)
    plan = plans(256, 64, 50)[0]
    first, second = case.run(plan), case.run(plan)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
