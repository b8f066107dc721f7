"""Every backend against the definition: outputs, carry and all gradients, with lengths, padding of NaN, resets, and both directions."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from carrywave.kernels import reference
from carrywave.kernels.backends import Backend
from carrywave.kernels.carry import Carry
from carrywave.kernels.lstm import aten, manual
from carrywave.kernels.step_marks import StepMarks
from carrywave.kernels.weights import Layer, LayerWeights

OTHERS = {"aten": aten.layer, "manual": manual.layer}
BACKENDS = {"reference": reference.layer, **OTHERS}  # of the CPU


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
    resets: tuple[tuple[bool, ...], ...] | None = None  # of each step, for each lane
    learned: bool = False  # an initial carry that is not zero


@st.composite
def cases(draw: st.DrawFn) -> Case:
    steps, lanes = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    lengths = draw(st.none() | st.tuples(*[st.integers(0, steps)] * lanes))
    hidden = draw(st.integers(2, 6))
    return Case(
        steps,
        lanes,
        draw(st.integers(1, 9)),
        hidden,
        draw(st.integers(1, 2)),
        draw(st.sampled_from([0, 0, 1])),
        draw(st.booleans()),
        lengths,
        draw(st.integers(0, 1000)),
        draw(st.none() | st.tuples(*[st.tuples(*[st.booleans()] * lanes)] * steps)),
        draw(st.booleans()),
    )


class Problem:
    """Tensors for a case, and gradients of a random projection of everything that a layer gives."""

    def __init__(self, case: Case, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(case.seed)

        def make(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

        width = case.projection or case.hidden
        self.x = make(case.steps, case.lanes, case.inputs)
        self.carry = Carry(make(case.directions, case.lanes, width), make(case.directions, case.lanes, case.hidden))
        self.layer: Layer = tuple(
            LayerWeights(
                make(4 * case.hidden, case.inputs),
                make(4 * case.hidden, width),
                make(4 * case.hidden) if case.bias else None,
                make(4 * case.hidden) if case.bias else None,
                make(width, case.hidden) if case.projection else None,
            )
            for _ in range(case.directions)
        )
        self.lengths = None if case.lengths is None else torch.tensor(case.lengths)
        self.resets = None if case.resets is None else torch.tensor(case.resets)
        self.initial = Carry(*(make(case.directions, 1, part.shape[2]) for part in self.carry)) if case.learned and case.resets else None
        self.weigh = [make(case.steps, case.lanes, width * case.directions), make(*self.carry.h.shape), make(*self.carry.c.shape)]

    @property
    def leaves(self) -> list[Tensor]:
        weights = (tensor for weights in self.layer for tensor in weights if tensor is not None)
        return [self.x, *self.carry, *weights, *(self.initial or ())]

    def solve(self, backend: Backend, x: Tensor | None = None) -> tuple[list[Tensor], list[Tensor]]:
        marks = {} if self.resets is None else {"marks": StepMarks(self.resets, self.initial)}
        y, end = backend(self.x if x is None else x, self.carry, self.layer, self.lengths, **marks)
        outputs = [y, *end]
        total = sum(((out * weigh.detach()).sum() for out, weigh in zip(outputs, self.weigh, strict=True)), torch.zeros(()))
        return [out.detach() for out in outputs], list(torch.autograd.grad(total, self.leaves, materialize_grads=True))


@pytest.mark.parametrize("name", OTHERS)
@given(case=cases())
@settings(max_examples=60)
def test_backend_is_the_reference(name: str, case: Case) -> None:
    problem = Problem(case)
    backend = OTHERS[name]
    if name == "manual" and case.projection:
        assert not manual.serves(problem.x, problem.layer)
        return
    # Both compute in float64; rounding grows over at most 7 steps of sums of at most 9 terms.
    torch.testing.assert_close(problem.solve(backend), problem.solve(reference.layer), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", BACKENDS)
@given(case=cases(), data=st.data())
@settings(max_examples=40)
def test_a_reset_separates_sequences(name: str, case: Case, data: st.DataObject) -> None:
    """Two sequences one after the other in every lane, the second reset, are what each is alone."""
    first = data.draw(st.integers(0, case.steps - 1))
    backend, problem = BACKENDS[name], Problem(replace(case, lengths=None, learned=True, projection=0))
    initial = Carry(*(torch.randn(case.directions, 1, case.hidden, dtype=torch.float64) for _ in range(2)))
    resets = torch.zeros(case.steps, case.lanes, dtype=torch.bool)
    resets[first] = True
    with torch.no_grad():
        y, end = backend(problem.x, problem.carry, problem.layer, None, marks=StepMarks(resets, initial))
        start = Carry(*(part.expand_as(own) for part, own in zip(initial, problem.carry, strict=True)))
        hidden = case.hidden
        second, forward_end = backend(problem.x[first:], start, problem.layer, None)
        torch.testing.assert_close(y[first:, :, :hidden], second[..., :hidden], rtol=1e-11, atol=1e-12)  # float64, another order of sums
        torch.testing.assert_close(end.c[0], forward_end.c[0], rtol=1e-11, atol=1e-12)
        if first:
            # The reverse direction comes from the last step, and begins again with the last step of the first sequence.
            begin = Carry(*(torch.stack([own[0], *part[1:].expand_as(own[1:])]) for part, own in zip(initial, problem.carry, strict=True)))
            before, reverse_end = backend(problem.x[:first], begin, problem.layer, None)
            torch.testing.assert_close(y[:first], before, rtol=1e-11, atol=1e-12)
            torch.testing.assert_close(end.c[1:], reverse_end.c[1:], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", OTHERS)
@given(case=cases(), data=st.data())
@settings(max_examples=40)
def test_resets_in_chunks_are_those_of_the_window(name: str, case: Case, data: st.DataObject) -> None:
    """The steps in two calls, the carry passed between them, with gradients through both."""
    case = replace(case, directions=1, projection=0, resets=case.resets or ((True,) * case.lanes,) * case.steps)
    cut, problem, twin = data.draw(st.integers(1, case.steps)), Problem(case), Problem(case)

    def in_chunks(x: Tensor, carry: Carry, layer: Layer, lengths: Tensor | None, *, marks: StepMarks) -> tuple[Tensor, Carry]:
        ys, at = [], 0
        for steps in (cut, case.steps - cut):
            if steps and marks.resets is not None:
                left = None if lengths is None else (lengths - at).clamp(0, steps)
                here = StepMarks(marks.resets[at : at + steps], marks.initial)
                y, carry = OTHERS[name](x[at : at + steps], carry, layer, left, marks=here)
                ys.append(y)
                at += steps
        return torch.cat(ys), carry

    torch.testing.assert_close(problem.solve(in_chunks), twin.solve(reference.layer), rtol=1e-10, atol=1e-11)  # as above


@given(case=cases(), most_steps=st.integers(1, 7))
@settings(max_examples=60)
def test_pieces_of_a_sequence_that_is_too_long_for_cudnn(case: Case, most_steps: int) -> None:
    problem = Problem(replace(case, lengths=None, resets=None))

    def in_pieces(x: Tensor, carry: Carry, layer: Layer, lengths: Tensor | None) -> tuple[Tensor, Carry]:
        return aten._in_pieces(x, carry, layer, most_steps)

    # As above; the sums over steps are added up piece by piece besides.
    torch.testing.assert_close(problem.solve(in_pieces), problem.solve(reference.layer), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("directions", [1, 2])
def test_padding_of_nan_changes_nothing(name: str, directions: int) -> None:
    problem = Problem(Case(5, 4, 3, 4, directions, lengths=(5, 2, 0, 3)))
    assert problem.lengths is not None
    padding = torch.arange(5)[:, None] >= problem.lengths
    dirty = torch.where(padding[..., None], torch.nan, problem.x)
    outputs, gradients = problem.solve(BACKENDS[name])
    same_outputs, same_gradients = problem.solve(BACKENDS[name], dirty)
    assert all(torch.equal(a, b) for a, b in zip(outputs + gradients, same_outputs + same_gradients, strict=True))
    assert not outputs[0][padding].any()
    assert not gradients[0][padding].any()
    # A lane without a real step hands its carry through, and its gradient.
    assert torch.equal(outputs[1][:, 2], problem.carry.h[:, 2])
    assert torch.equal(gradients[2][:, 2], problem.weigh[2][:, 2])


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("onednn", [True, False])
def test_carry_passes_padded_steps_to_the_bit(name: str, dtype: torch.dtype, onednn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lanes one by one, without padding, end with the same bits of c as all of them padded."""
    monkeypatch.setattr(aten, "ONEDNN_IS_FAST", onednn)
    problem = Problem(Case(9, 4, 7, 16, lengths=(9, 4, 1, 0)), dtype)
    assert problem.lengths is not None
    _, end = OTHERS[name](problem.x, problem.carry, problem.layer, problem.lengths)
    # From the end of each lane on, more padding must not move c or h: append ten steps of it.
    longer = torch.cat((problem.x, torch.full((10, 4, 7), torch.nan, dtype=dtype)))
    y, later = OTHERS[name](longer, problem.carry, problem.layer, problem.lengths)
    assert torch.equal(end.c, later.c)
    assert torch.equal(end.h, later.h)
    assert torch.equal(later.c[:, 3], problem.carry.c[:, 3])
    assert not y[9:].any()


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("directions", [1, 2])
def test_lengths_are_packed_sequences(name: str, directions: int) -> None:
    problem = Problem(Case(6, 4, 3, 5, directions, lengths=(6, 1, 4, 3)))
    assert problem.lengths is not None
    packed = nn.utils.rnn.pack_padded_sequence(problem.x, problem.lengths, enforce_sorted=False)
    flat = [tensor for weights in problem.layer for tensor in weights if tensor is not None]
    data, h, c = torch.lstm(
        packed.data,
        packed.batch_sizes,
        tuple(part[:, packed.sorted_indices] for part in problem.carry),
        flat,
        True,
        1,
        0.0,
        True,
        directions == 2,
    )
    expected, _ = nn.utils.rnn.pad_packed_sequence(packed._replace(data=data))
    y, end = BACKENDS[name](problem.x, problem.carry, problem.layer, problem.lengths)
    # Different order of summation in float64.
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(end, Carry(h[:, packed.unsorted_indices], c[:, packed.unsorted_indices]), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("lengths", [None, (5, 3)])
def test_manual_gradient_is_the_slope(lengths: tuple[int, ...] | None) -> None:
    """Against finite differences, so that an error shared by all backends would be seen; of gradients too."""
    resets = ((False, True), (False, False), (True, False), (False, False), (True, True))
    problem = Problem(Case(5, 2, 3, 3, lengths=lengths, resets=resets, learned=True))
    assert problem.initial is not None
    weights = problem.layer[0]

    def run(x: Tensor, h: Tensor, c: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        w_ih, w_hh, b_ih, b_hh, *first = others
        marks = StepMarks(problem.resets, Carry(*first)) if first else None
        y, end = manual.layer(x, Carry(h, c), (LayerWeights(w_ih, w_hh, b_ih, b_hh),), problem.lengths, marks=marks)
        return y, *end

    assert torch.autograd.gradcheck(run, (problem.x, *problem.carry, *weights[:4]))
    assert torch.autograd.gradcheck(run, (problem.x, *problem.carry, *weights[:4], *problem.initial))
    assert torch.autograd.gradgradcheck(run, (problem.x, *problem.carry, *weights[:4], *problem.initial), fast_mode=True)


def test_manual_handles_every_subset_of_gradients() -> None:
    """Whatever output is used, and whatever input wants a gradient."""
    for lengths in (None, (4, 0, 2)):
        case = Case(4, 3, 2, 3, lengths=lengths)
        for used in range(3):
            problem, twin = Problem(case), Problem(case)
            for each, backend in ((problem, manual.layer), (twin, reference.layer)):
                each.x.requires_grad_(False)
                y, end = backend(each.x, each.carry, each.layer, each.lengths)
                (y, *end)[used].sum().backward()
            for mine, theirs in zip(problem.leaves[1:], twin.leaves[1:], strict=True):
                expected = torch.zeros_like(mine) if theirs.grad is None else theirs.grad
                got = torch.zeros_like(mine) if mine.grad is None else mine.grad
                torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)  # float64, another order of summation
            assert problem.x.grad is None


@pytest.mark.parametrize("lengths", [None, (3, 1, 0)])
def test_manual_outputs_may_be_changed_in_place(lengths: tuple[int, ...] | None) -> None:
    """Backward must not read what the user has changed."""
    problem, twin = Problem(Case(3, 3, 2, 3, lengths=lengths)), Problem(Case(3, 3, 2, 3, lengths=lengths))
    for each, backend in ((problem, manual.layer), (twin, reference.layer)):
        y, end = backend(each.x, each.carry, each.layer, each.lengths)
        y = y if backend is manual.layer else y.clone()
        (y.mul_(2).square().sum() + end.h.sum()).backward()
    for mine, theirs in zip(problem.leaves, twin.leaves, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-11, atol=1e-12)  # float64, another order of summation


@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize("case", [Case(9, 4, 7, 16, d, lengths=lengths) for d in (1, 2) for lengths in (None, (9, 4, 1, 0))])
def test_float32_is_the_reference(case: Case, onednn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through oneDNN too, which only float32 takes."""
    monkeypatch.setattr(aten, "ONEDNN_IS_FAST", onednn)
    outputs, gradients = Problem(case, torch.float32).solve(aten.layer)
    expected, slopes = Problem(case).solve(reference.layer)
    # float32 has 24 bits; gradients are sums over 36 steps and lanes of terms up to about 10.
    torch.testing.assert_close([out.double() for out in outputs], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close([gradient.double() for gradient in gradients], slopes, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", OTHERS)
def test_onednn_flag_is_left_as_it_was(name: str) -> None:
    problem = Problem(Case(3, 2, 2, 3))
    before = torch.backends.mkldnn.enabled
    problem.solve(OTHERS[name])
    assert torch.backends.mkldnn.enabled == before
