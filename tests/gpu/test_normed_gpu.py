"""Layers with norms inside their cell on CUDA: the definition, in every precision, with lengths and resets, and recorded.

Shapes: T time, B lane, H hidden.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from carrywave.cells.cell import by_name
from carrywave.kernels import reference
from carrywave.kernels.cuda import normed
from carrywave.kernels.dispatch import backends_of
from carrywave.kernels.step_marks import StepMarks
from carrywave.kernels.weights import Layer, LayerWeights

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


class Case:
    """A layer, its inputs, and what the outputs are multiplied with to give a number."""

    def __init__(self, name: str, dtype: torch.dtype, steps: int, lanes: int, hidden: int, *, short: bool, resets: bool) -> None:
        torch.manual_seed(0)
        self.cell, self.dtype = by_name(name), dtype
        rows = self.cell.gates * hidden

        def make(*shape: int, scale: float = 1.0) -> Tensor:
            # Exact in the precision of the layer, so that the definition has the same ones.
            drawn: Tensor = (torch.randn(*shape, device="cuda") * scale).to(dtype)
            return drawn.requires_grad_()

        extra = {name: make(*each.shape, scale=0.3) for name, each in self.cell.further(hidden, norm=True).items()}
        matrices = make(rows, 5), make(rows, hidden, scale=hidden**-0.5), make(rows, scale=0.2), make(rows, scale=0.2)
        self.layer: Layer = (LayerWeights(*matrices, extra=extra),)
        self.x = make(steps, lanes, 5)
        self.carry = self.cell.carry(*(make(1, lanes, hidden) for _ in self.cell.parts))
        self.lengths = torch.randint(0, steps + 1, (lanes,), device="cuda") if short else None
        self.marks = StepMarks(torch.rand(steps, lanes, device="cuda") < 0.2) if resets else None
        self.by = [torch.randn(steps, lanes, hidden, device="cuda"), *(torch.randn(1, lanes, hidden, device="cuda") for _ in self.carry)]
        self.leaves = [self.x, *self.carry, *self.layer[0].tensors()]

    def ours(self) -> list[Tensor]:
        assert normed.serves(self.cell, self.x, self.layer, self.marks)
        assert backends_of(self.cell).choose("auto", self.x, self.layer, self.marks) == "normed"
        return self._results(*normed.layer(self.x, self.carry, self.layer, self.lengths, self.cell, marks=self.marks))

    def defined(self) -> list[Tensor]:
        layer = tuple(each.to(torch.float64) for each in self.layer)
        carry = self.cell.carry(*(part.double() for part in self.carry))
        return self._results(*reference.layer(self.x.double(), carry, layer, self.lengths, self.cell, marks=self.marks))

    def _results(self, y: Tensor, end: tuple[Tensor, ...]) -> list[Tensor]:
        outputs = [y, *end]
        total = torch.stack([(out.double() * by.double()).sum() for out, by in zip(outputs, self.by, strict=True)]).sum()
        return [*(out.detach() for out in outputs), *torch.autograd.grad(total, self.leaves)]


@pytest.mark.parametrize("name", ["lstm", "gru"])
@pytest.mark.parametrize(("short", "resets"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 2e-4), (torch.float16, 1e-2), (torch.bfloat16, 6e-2)], ids=str)
@pytest.mark.parametrize(("steps", "lanes", "hidden"), [(12, 9, 96), (7, 33, 300), (9, 4, 1100)])
def test_norms_inside_a_cell_are_the_definition(
    name: str, short: bool, resets: bool, dtype: torch.dtype, most: float, steps: int, lanes: int, hidden: int
) -> None:
    case = Case(name, dtype, steps, lanes, hidden, short=short, resets=resets)
    for number, (own, wanted) in enumerate(zip(case.ours(), case.defined(), strict=True)):
        error = (own.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-12)
        assert error <= most, (number, float(error))  # rounding of the products, which a norm divides by their deviation


def test_a_recording_has_the_same_bits() -> None:
    case = Case("lstm", torch.bfloat16, 10, 16, 256, short=True, resets=True)
    first = case.ours()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        case.ours()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = case.ours()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(first, recorded, strict=True))
