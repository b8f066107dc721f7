"""How layers are laid over the chip: every lane has one place, and all blocks fit at once."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from carrywave.kernels.hopper.layout import MULTIPROCESSORS, LayerShape, alone, back_for, shape_for


@given(st.integers(1, 2048), st.integers(1, 1100))
@settings(max_examples=300)
def test_every_lane_has_one_place_and_everything_fits(hidden: int, lanes: int) -> None:
    forward = shape_for(hidden, lanes)
    assume(forward is not None)
    assert forward is not None
    used = alone(hidden, lanes, 10)
    assert used is not None
    for shape in (forward, back_for(forward, lanes), used.shape, used.back):
        check(shape, hidden, lanes)
        if shape.near:  # what the kernel is written for, and a chip of 132 multiprocessors runs at once
            assert shape.passes == 1
            assert shape.blocks // shape.groups in (4, 8, 16)
            assert shape.blocks <= 120


def check(shape: LayerShape, hidden: int, lanes: int) -> None:
    assert shape.hidden % 64 == 0
    assert 0 <= shape.hidden - hidden < 128
    assert shape.hidden % (4 * shape.units) == 0  # whole quads
    assert shape.lanes in (8, 16, 24, 32)
    assert shape.units * shape.lanes <= 512  # a thread for each unit and lane
    # The kernel counts them in tables of so many places, and deals lanes out by rank.
    ranks = [place * shape.groups + group for group in range(shape.groups) for place in range(shape.lanes * shape.passes)]
    assert sorted(ranks)[:lanes] == list(range(lanes))
    assert shape.groups <= lanes  # a group without a lane would do nothing
    assert shape.shared_bytes <= 227 * 1024  # what a Hopper GPU lets a block have
    assert shape.blocks == shape.groups * shape.hidden // shape.units <= (120 if shape.cluster else MULTIPROCESSORS) <= 132
    assert not shape.cluster or shape.blocks % 4 == 0
    assert dict(shape.constants(fp16=True))["FP16"] == 1
    assert dict(shape.constants(fp16=False))["FP16"] == 0


@pytest.mark.parametrize("hidden", [1, 64, 650, 1024])
@pytest.mark.parametrize("lanes", [1, 16, 64, 128])
def test_common_sizes_fit(hidden: int, lanes: int) -> None:
    assert shape_for(hidden, lanes) is not None


def test_what_is_too_wide_does_not() -> None:
    assert shape_for(100_000, 1) is None
