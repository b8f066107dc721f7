"""The persistent kernels over a window that arrives chunk by chunk, without a GPU: launches in float64 (`_in_float64`).

Shapes: T time, B lane, I input, H hidden.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from _in_float64 import replace_launches
from _problems import Stack, assert_same, each_kind, stacks

from carrywave.errors import UserError
from carrywave.kernels import deferred_gradients
from carrywave.kernels.deferred_gradients import Deferred, deferring
from carrywave.kernels.hopper import stack, wave, windowed
from carrywave.kernels.hopper.layout import LayerShape, Wave
from carrywave.kernels.window import ChunkedWindow, WindowChunk

SHAPE = LayerShape(64, 1, 8, 1)
HIDDEN = 20  # of `_problems`


@pytest.fixture(autouse=True)
def _in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_launches(monkeypatch)


@dataclass
class Windowed(Stack):
    """A stack, and one window for it."""

    chunk: int = 1
    shape: LayerShape = SHAPE
    deferred: Deferred = field(default_factory=Deferred)

    def __post_init__(self) -> None:
        super().__post_init__()
        firsts = [*range(0, self.steps, self.chunk), self.steps]
        self.window = ChunkedWindow(tuple(pairwise(firsts)), self.lengths)

    def part(self, index: int, carries: Any, x: Tensor, piece: int) -> tuple[Tensor, Any]:
        first, end = self.window.spans[index]
        masks = [mask if mask is None or len(mask) == 1 else mask[first:end] for mask in self.masks]
        lengths = None if self.lengths is None else (self.lengths - first).clamp(0, end - first)
        how = self.fitted(Wave(self.shape, 1, min(piece, end - first)))
        marks = self.marks_of(first, end)
        return windowed.run(x, carries, self.layers, masks, lengths, how, WindowChunk(self.window, index), marks=marks)

    def by_chunks(self, piece: int, seen: Callable[[Tensor], None] = lambda x: None) -> list[Tensor]:
        """The same, chunk by chunk as the executor does it."""
        for leaf in self.leaves:
            leaf.grad = None
        chunks = len(self.window.spans)
        xs = [self.x[first:end].clone().requires_grad_() for first, end in self.window.spans]
        kept, carries = [], self.carries
        with deferring(self.deferred):
            for index, x in enumerate(xs):
                entered = detached(carries) if index else carries
                y, carries = self.part(index, entered, x, piece)
                kept.append((y, carries, entered))
            last = [part for carry in carries for part in carry]
            handed: list[Tensor | None] = list(self.by_ends)
            for index in reversed(range(chunks)):
                (y, left, entered), (first, end) = kept[index], self.window.spans[index]
                pairs = list(zip([part for carry in left for part in carry], handed, strict=True))
                roots = [(part, grad) for part, grad in pairs if grad is not None and part.requires_grad]
                deferred_gradients.backward([y, *(root for root, _ in roots)], [self.by[first:end], *(grad for _, grad in roots)])
                handed = [part.grad for carry in entered for part in carry]
                seen(xs[index])
        assert all(weight.grad is None and self.deferred.pending(weight) for weight in self.weights)
        self.deferred.flush()
        assert not any(self.deferred.pending(weight) for weight in self.weights)
        dx = torch.cat([x.grad for x in xs if x.grad is not None])
        grads = [leaf.grad for leaf in self.leaves if leaf.grad is not None]
        return [torch.cat([y.detach() for y, _, _ in kept]), *(part.detach() for part in last), dx, *grads]


def detached(carries: Any) -> Any:
    """What the executor hands to the next chunk: the same carries, which autograd does not follow back."""
    return tuple(type(carry)(*(part.detach().requires_grad_() for part in carry)) for carry in carries)


@settings(max_examples=60)
@given(given_stack=stacks(Windowed, learned=False, chunk=st.integers(1, 9)), piece=st.integers(1, 9))
def test_chunks_of_a_window_are_the_definition(given_stack: Windowed, piece: int) -> None:
    assert_same(given_stack.by_chunks(piece), given_stack.defined())


@pytest.mark.sampled(15)
@each_kind
@pytest.mark.parametrize("piece", [2, 7])
def test_chunks_of_each_kind_are_the_definition(kind: dict[str, Any], piece: int) -> None:
    given_stack = Windowed(2, 9, 4, 5, chunk=4, short=True, **kind)
    assert_same(given_stack.by_chunks(piece), given_stack.defined())


@pytest.mark.parametrize("first_has", [False, True])
def test_resets_in_some_chunks_only_are_refused(first_has: bool) -> None:
    given_stack = Windowed(1, 8, 3, 6, chunk=4, resets=0.3)
    marks = given_stack.marks
    with deferring(given_stack.deferred):
        given_stack.marks = marks if first_has else None
        _, carries = given_stack.part(0, given_stack.carries, given_stack.x[:4], 4)
        given_stack.marks = None if first_has else marks
        with pytest.raises(ValueError, match="resets in some chunks of a window and none in others; pass them with every chunk"):
            given_stack.part(1, detached(carries), given_stack.x[4:], 4)


@pytest.mark.parametrize("masked", ["", "steps", "locked"])
@pytest.mark.parametrize(("short", "cell", "resets"), [(False, "lstm", 0.0), (True, "lstm", 0.0), (True, "gru", 0.2), (True, "slstm", 0.2)])
def test_the_same_launches_give_the_same_bits(short: bool, cell: str, resets: float, masked: str) -> None:
    """A wave whose pieces are the chunks has the same products and launches; weight gradients are one product over the window in both."""
    given_stack = Windowed(3, 10, 5, 12, short, masked, chunk=4, cell=cell, resets=resets)
    for one, other in zip(given_stack.by_chunks(4), given_stack.at_once(Wave(SHAPE, 1, 4)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("cell", "heads"), [("lstm", 1), ("gru", 2), ("slstm", 1), ("slstm", 2)])
def test_gradients_asked_for_along_the_way_are_those_of_the_chunk(cell: str, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside the step's own backward a chunk is differentiated by itself, as often as wanted, and the step's backward is not disturbed."""
    given_stack = Windowed(2, 9, 4, 6, chunk=4, short=True, masked="steps", cell=cell, heads=heads)
    expected = given_stack.at_once(Wave(SHAPE, 1, 9))
    asked: list[Tensor] = []
    run = given_stack.part

    def asking(index: int, carries: Any, x: Tensor, piece: int) -> tuple[Tensor, Any]:
        y, left = run(index, carries, x, piece)
        asked.extend(torch.autograd.grad(y.sum(), [x, given_stack.layers[0].w_hh], retain_graph=True))
        with pytest.raises(UserError, match="has no second derivative"):
            torch.autograd.grad(y.sum(), x, create_graph=True)
        return y, left

    monkeypatch.setattr(given_stack, "part", asking)
    for one, other in zip(given_stack.by_chunks(4), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    x = given_stack.x[:4].clone().requires_grad_()
    masks = [None if mask is None else mask[:4] for mask in given_stack.masks]
    assert given_stack.lengths is not None
    how = given_stack.fitted(Wave(SHAPE, 1, 4))
    y, _ = wave.run(x, given_stack.carries, given_stack.layers, masks, given_stack.lengths.clamp(0, 4), how)
    for one, other in zip(asked[:2], torch.autograd.grad(y.sum(), [x, given_stack.layers[0].w_hh]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("given", [False, True])
def test_a_weight_that_two_layers_share_gets_both_of_its_gradients(given: bool) -> None:
    """`given`: it has a gradient already, to which both are added."""
    given_stack = Windowed(2, 8, 3, HIDDEN, chunk=4)
    first, second = given_stack.layers
    given_stack.layers = [first, second._replace(w_ih=first.w_ih, b_hh=first.b_hh)]
    weights = list({id(weight): weight for weight in given_stack.weights}.values())
    x = given_stack.x.clone().requires_grad_()
    y, _ = wave.run(x, given_stack.carries, given_stack.layers, given_stack.masks, None, Wave(SHAPE, 1, 8))
    expected = torch.autograd.grad(y, weights, given_stack.by)
    for weight in weights if given else []:
        weight.grad = torch.ones_like(weight)
    ready: list[Tensor] = []
    with deferring(given_stack.deferred):
        y0, left = given_stack.part(0, given_stack.carries, given_stack.x[:4], 4)
        entered = detached(left)
        y1, _ = given_stack.part(1, entered, given_stack.x[4:], 4)
        deferred_gradients.backward([y1], [given_stack.by[4:]])
        deferred_gradients.backward([y0, left[0].h], [given_stack.by[:4], entered[0].h.grad])
    given_stack.deferred.flush(ready.append)
    assert [id(each) for each in ready] == [id(each) for each in weights]
    for weight, other in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.grad, other + float(given), rtol=1e-12, atol=1e-12)


def test_chunks_out_of_order_are_refused() -> None:
    given_stack = Windowed(1, 8, 3, 6, chunk=4)
    with deferring(given_stack.deferred):
        given_stack.part(0, given_stack.carries, given_stack.x[:4], 4)
        chunk = WindowChunk(given_stack.window, 1)
        held = windowed.held_by(chunk, given_stack.layers)
        assert held is not None
        with pytest.raises(ValueError, match="this chunk has steps 4 to 8 of a window"):
            held.run(chunk, given_stack.x[:3], given_stack.carries, [None], None, None, clean=False)
        with pytest.raises(RuntimeError, match="run them in order"):
            held.forward(0, given_stack.x[:4], None, [None])
    assert stack.spans_of(5, 2) == [(0, 2), (2, 4), (4, 5)]
