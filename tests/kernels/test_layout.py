"""How layers are laid over the chip: every lane has one place, and all blocks fit at once."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from carrywave.kernels.hopper.choice import alone, back_for, shape_for
from carrywave.kernels.hopper.layout import H200, Chip, LayerShape

# An H200; an H100 PCIe; an H20; halves, a quarter and an eighth of an H200; one that runs no clusters.
CHIPS = [
    H200,
    Chip.with_multiprocessors(114, {2: 57, 4: 26, 8: 12, 16: 5}),
    Chip.with_multiprocessors(78, {2: 39, 4: 18, 8: 8, 16: 4}),
    Chip.with_multiprocessors(66, {2: 33, 4: 15, 8: 7, 16: 3}),
    Chip.with_multiprocessors(33, {2: 16, 4: 7, 8: 3, 16: 1}),
    Chip.with_multiprocessors(16, {2: 8, 4: 4, 8: 2, 16: 1}),
    Chip.with_multiprocessors(132, {}),
]


def test_a_few_multiprocessors_stay_free() -> None:
    assert Chip.with_multiprocessors(132, {2: 66, 4: 30, 8: 15, 16: 7}) == H200
    assert CHIPS[4] == Chip(32, 28, 24, 16, 32)
    assert Chip.with_multiprocessors(8, {4: 2}).room(4) == 8
    assert H200.room(32) == 0


@given(st.sampled_from(CHIPS), st.integers(1, 2048), st.integers(1, 1100), st.booleans())
@settings(max_examples=300)
def test_every_lane_has_one_place_and_everything_fits(chip: Chip, hidden: int, lanes: int, plain: bool) -> None:
    forward = shape_for(chip, hidden, lanes)
    assume(forward is not None)
    assert forward is not None
    used = alone(chip, hidden, lanes, 10, plain=plain)
    assert used is not None
    for shape in (forward, back_for(chip, forward, lanes), used.shape, used.back):
        check(chip, shape, hidden, lanes)
        if shape.near:  # what the kernel is written for
            assert shape.passes == 1
            assert shape.blocks // shape.groups in (4, 8, 16)


def check(chip: Chip, shape: LayerShape, hidden: int, lanes: int) -> None:
    assert shape.hidden % 64 == 0
    assert 0 <= shape.hidden - hidden < 128
    assert shape.hidden % (4 * shape.units) == 0  # whole quads
    assert shape.lanes in (8, 16, 24, 32, 64)
    assert shape.wide or shape.streamed is not None or shape.units * shape.lanes <= 512  # a thread for each unit and lane
    # The kernel counts them in tables of so many places, and deals lanes out by rank.
    ranks = [place * shape.groups + group for group in range(shape.groups) for place in range(shape.lanes * shape.passes)]
    assert sorted(ranks)[:lanes] == list(range(lanes))
    assert shape.groups <= lanes  # a group without a lane would do nothing
    assert shape.shared_bytes <= 227 * 1024  # what a Hopper GPU lets a block have
    assert shape.blocks == shape.groups * shape.hidden // shape.units <= chip.room(shape.cluster)
    assert not shape.cluster or shape.blocks % 4 == 0
    assert dict(shape.constants(fp16=True))["FP16"] == 1
    assert dict(shape.constants(fp16=False))["FP16"] == 0


@pytest.mark.parametrize("hidden", [1, 64, 650, 1024])
@pytest.mark.parametrize("lanes", [1, 16, 64, 128])
def test_common_sizes_fit(hidden: int, lanes: int) -> None:
    assert shape_for(H200, hidden, lanes) is not None


def test_what_is_too_wide_does_not() -> None:
    assert shape_for(H200, 100_000, 1) is None
