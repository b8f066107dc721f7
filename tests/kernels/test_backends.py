"""Every backend against the definition: outputs, carry and all gradients, with lengths, padding of NaN, resets, and both directions; of
each cell that has backends of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from carrywave.cells.cell import by_name
from carrywave.kernels import reference
from carrywave.kernels.gru import aten as gru_aten
from carrywave.kernels.gru import manual as gru_manual
from carrywave.kernels.lstm import aten, manual
from carrywave.kernels.step_marks import StepMarks
from carrywave.kernels.weights import Backend, Layer, LayerWeights

BACKENDS: dict[tuple[str, str], Backend] = {  # of the CPU
    **{(name, "reference"): partial(reference.layer, cell=by_name(name)) for name in ("lstm", "gru")},
    ("lstm", "aten"): aten.layer,
    ("lstm", "manual"): manual.layer,
    ("gru", "aten"): gru_aten.layer,
    ("gru", "manual"): gru_manual.layer,
}
each_backend = pytest.mark.parametrize(("cell", "name"), BACKENDS)
each_other = pytest.mark.parametrize(("cell", "name"), [both for both in BACKENDS if both[1] != "reference"])


@dataclass(frozen=True)
class Case:
    steps: int
    lanes: int
    inputs: int
    hidden: int
    directions: int = 1
    projection: int = 0
    bias: bool = True
    lengths: tuple[int, ...] | None = None
    seed: int = 0
    cell: str = "lstm"
    resets: tuple[tuple[bool, ...], ...] | None = None  # of each step, for each lane
    learned: bool = False  # an initial carry that is not zero


@st.composite
def cases(draw: st.DrawFn, cell: str) -> Case:
    steps, lanes = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    lengths = draw(st.none() | st.tuples(*[st.integers(0, steps)] * lanes))
    hidden = draw(st.integers(2, 6))
    return Case(
        steps,
        lanes,
        draw(st.integers(1, 9)),
        hidden,
        draw(st.integers(1, 2)),
        draw(st.sampled_from([0, 0, 1] if by_name(cell).projects else [0])),
        draw(st.booleans()),
        lengths,
        draw(st.integers(0, 1000)),
        cell,
        draw(st.none() | st.tuples(*[st.tuples(*[st.booleans()] * lanes)] * steps)),
        draw(st.booleans()),
    )


class Problem:
    """Tensors for a case, and gradients of a random projection of everything that a layer gives."""

    def __init__(self, case: Case, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(case.seed)

        def make(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

        width, cell = case.projection or case.hidden, by_name(case.cell)
        rows = cell.gates * case.hidden
        self.cell = case.cell
        self.x = make(case.steps, case.lanes, case.inputs)
        self.carry: Any = cell.carry(*(make(case.directions, case.lanes, each) for each in cell.widths(case.hidden, case.projection)))
        self.layer: Layer = tuple(
            LayerWeights(
                make(rows, case.inputs),
                make(rows, width),
                make(rows) if case.bias else None,
                make(rows) if case.bias else None,
                make(width, case.hidden) if case.projection else None,
            )
            for _ in range(case.directions)
        )
        self.lengths = None if case.lengths is None else torch.tensor(case.lengths)
        self.resets, self.initial = None if case.resets is None else torch.tensor(case.resets), None
        if case.learned and case.resets is not None:
            self.initial = cell.carry(*(make(case.directions, 1, part.shape[2]) for part in self.carry))
        self.weigh = [make(case.steps, case.lanes, width * case.directions), *(make(*part.shape) for part in self.carry)]

    @property
    def leaves(self) -> list[Tensor]:
        weights = (tensor for weights in self.layer for tensor in weights if tensor is not None)
        return [self.x, *self.carry, *weights, *(self.initial or ())]

    def solve(self, backend: Backend | str, x: Tensor | None = None) -> tuple[list[Tensor], list[Tensor]]:
        run = BACKENDS[self.cell, backend] if isinstance(backend, str) else backend
        marks = {} if self.resets is None else {"marks": StepMarks(self.resets, self.initial)}
        y, end = run(self.x if x is None else x, self.carry, self.layer, self.lengths, **marks)
        outputs = [y, *end]
        total = sum(((out * weigh.detach()).sum() for out, weigh in zip(outputs, self.weigh, strict=True)), torch.zeros(()))
        return [out.detach() for out in outputs], list(torch.autograd.grad(total, self.leaves, materialize_grads=True))


@each_other
@given(data=st.data())
@settings(max_examples=60)
def test_backend_is_the_reference(cell: str, name: str, data: st.DataObject) -> None:
    case = data.draw(cases(cell))
    problem = Problem(case)
    if name == "manual" and case.projection:
        assert not manual.serves(problem.x, problem.layer)
        return
    # Both compute in float64; rounding grows over at most 7 steps of sums of at most 9 terms.
    torch.testing.assert_close(problem.solve(name), problem.solve("reference"), rtol=1e-10, atol=1e-11)


@each_backend
@given(data=st.data())
@settings(max_examples=40)
def test_a_reset_separates_sequences(cell: str, name: str, data: st.DataObject) -> None:
    """Two sequences one after the other in every lane, the second reset, are what each is alone."""
    case = replace(data.draw(cases(cell)), lengths=None, resets=None, projection=0)
    first, hidden = data.draw(st.integers(0, case.steps - 1)), case.hidden
    backend, problem, of_parts = BACKENDS[cell, name], Problem(case), by_name(cell).carry
    initial = of_parts(*(torch.randn(case.directions, 1, hidden, dtype=torch.float64) for _ in problem.carry))
    resets = torch.zeros(case.steps, case.lanes, dtype=torch.bool)
    resets[first] = True
    close = {"rtol": 1e-11, "atol": 1e-12}  # float64, another order of sums
    with torch.no_grad():
        y, end = backend(problem.x, problem.carry, problem.layer, None, marks=StepMarks(resets, initial))
        start = of_parts(*(part.expand_as(own) for part, own in zip(initial, problem.carry, strict=True)))
        second, forward_end = backend(problem.x[first:], start, problem.layer, None)
        torch.testing.assert_close(y[first:, :, :hidden], second[..., :hidden], **close)
        torch.testing.assert_close(end[-1][0], forward_end[-1][0], **close)
        if first:
            # The reverse direction comes from the last step, and begins again with the last step of the first sequence.
            begin = of_parts(
                *(torch.stack([own[0], *part[1:].expand_as(own[1:])]) for part, own in zip(initial, problem.carry, strict=True))
            )
            before, reverse_end = backend(problem.x[:first], begin, problem.layer, None)
            torch.testing.assert_close(y[:first], before, **close)
            torch.testing.assert_close(end[-1][1:], reverse_end[-1][1:], **close)


@each_backend
@pytest.mark.parametrize("directions", [1, 2])
def test_padding_of_nan_changes_nothing(cell: str, name: str, directions: int) -> None:
    problem = Problem(Case(5, 4, 3, 4, directions, lengths=(5, 2, 0, 3), cell=cell))
    assert problem.lengths is not None
    padding = torch.arange(5)[:, None] >= problem.lengths
    dirty = torch.where(padding[..., None], torch.nan, problem.x)
    outputs, gradients = problem.solve(name)
    same_outputs, same_gradients = problem.solve(name, dirty)
    assert all(torch.equal(a, b) for a, b in zip(outputs + gradients, same_outputs + same_gradients, strict=True))
    assert not outputs[0][padding].any()
    assert not gradients[0][padding].any()
    # A lane without a real step hands its carry through, and its gradient.
    for number, part in enumerate(problem.carry, start=1):
        assert torch.equal(outputs[number][:, 2], part[:, 2])
        assert torch.equal(gradients[number][:, 2], problem.weigh[number][:, 2])


@each_other
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("onednn", [True, False])
def test_carry_passes_padded_steps_to_the_bit(
    cell: str, name: str, dtype: torch.dtype, onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lanes one by one, without padding, end with the same bits of their carry as all of them padded."""
    monkeypatch.setattr(aten, "ONEDNN_IS_FAST", onednn)
    problem = Problem(Case(9, 4, 7, 16, lengths=(9, 4, 1, 0), cell=cell), dtype)
    assert problem.lengths is not None
    _, end = BACKENDS[cell, name](problem.x, problem.carry, problem.layer, problem.lengths)
    # From the end of each lane on, more padding must not move the carry: append ten steps of it.
    longer = torch.cat((problem.x, torch.full((10, 4, 7), torch.nan, dtype=dtype)))
    y, later = BACKENDS[cell, name](longer, problem.carry, problem.layer, problem.lengths)
    for before, after, given_part in zip(end, later, problem.carry, strict=True):
        assert torch.equal(before, after)
        assert torch.equal(after[:, 3], given_part[:, 3])
    assert not y[9:].any()
