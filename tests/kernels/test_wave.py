"""A stack as a wave, without a GPU: the launches of `recurrence` are replaced by what they define, in float64 (`_in_float64`).

Shapes: T time, B lane, I input, H hidden.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from _in_float64 import NAN, replace_launches
from _problems import Stack, assert_same, each_kind, make, stacks

from carrywave.errors import UserError
from carrywave.kernels.carry import Carry
from carrywave.kernels.hopper import wave
from carrywave.kernels.hopper.choice import wave_for
from carrywave.kernels.hopper.layout import H200, Chip, LayerShape, Wave
from carrywave.kernels.weights import LayerWeights

SHAPE = LayerShape(64, 1, 8, 1)


@pytest.fixture(autouse=True)
def _in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_launches(monkeypatch)


@settings(max_examples=60)
@given(given_stack=stacks(count=st.integers(1, 4)), piece=st.integers(1, 9))
def test_a_wave_is_the_definition(given_stack: Stack, piece: int) -> None:
    assert_same(given_stack.at_once(Wave(SHAPE, 1, min(piece, given_stack.steps))), given_stack.defined())


@pytest.mark.sampled(9)
@each_kind
@pytest.mark.parametrize("piece", [2, pytest.param(7, marks=pytest.mark.slow)])
def test_a_wave_of_each_kind_is_the_definition(kind: dict[str, Any], piece: int) -> None:
    given_stack = Stack(2, 7, 4, 5, short=True, learned=True, **kind)
    assert_same(given_stack.at_once(Wave(SHAPE, 1, piece)), given_stack.defined())


def test_padding_may_hold_anything() -> None:
    torch.manual_seed(0)
    layers = [LayerWeights(make(80, 20), make(80, 20), make(80), make(80)) for _ in range(2)]
    carries = tuple(Carry(make(1, 3, 20), make(1, 3, 20)) for _ in range(2))
    lengths, x = torch.tensor([4, 0, 2]), make(4, 3, 20)
    spoiled = torch.where((torch.arange(4)[:, None] < lengths)[..., None], x, NAN)
    for each in layers:
        each.w_ih.requires_grad_()
    results = []
    for given_x in (x, spoiled):
        y, _ = wave.run(given_x, carries, layers, [None, None], lengths, Wave(SHAPE, 1, 3))
        results.append([y, *torch.autograd.grad(y.sum(), [each.w_ih for each in layers])])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_a_gradient_of_a_gradient_is_refused() -> None:
    x = make(4, 3, 20).requires_grad_()
    layers = [LayerWeights(make(80, 20), make(80, 20))]
    y, _ = wave.run(x, (Carry(make(1, 3, 20), make(1, 3, 20)),), layers, [None], None, Wave(SHAPE, 1, 4))
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    with pytest.raises(
        UserError, match="the persistent recurrent kernel has no second derivative; build the layers with kernel='reference'"
    ):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(UserError, match="or to compute many at once"):
        torch.autograd.grad(y, x, torch.ones(2, *y.shape, dtype=torch.float64), is_grads_batched=True)


@given(
    st.sampled_from([H200, Chip(32, 28, 24, 16, 32)]),
    st.integers(1, 12),
    st.integers(1, 1536),
    st.integers(1, 600),
    st.integers(1, 600),
    st.booleans(),
)
def test_all_that_runs_at_once_fits_the_chip(chip: Chip, layers: int, hidden: int, lanes: int, steps: int, plain: bool) -> None:
    found = wave_for(chip, layers, hidden, lanes, steps, plain=plain)
    if found is None:
        return
    assert found.shape.fits(chip)
    assert found.back.fits(chip)
    assert found.streams * found.shape.blocks <= chip.room(found.shape.cluster)
    assert 1 <= found.streams <= layers
    assert 1 <= found.chunk_steps <= steps
    assert found.shape.groups * found.shape.lanes * found.shape.passes >= lanes
    if found.streams == 1:
        assert found.chunk_steps == steps


def test_a_wave_serves_small_batches_of_many_layers() -> None:
    small, large = wave_for(H200, 8, 512, 16, 256), wave_for(H200, 8, 512, 128, 256)
    assert small is not None
    assert large is not None
    assert small.streams == 8
    assert large.streams == 1
