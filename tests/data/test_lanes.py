"""Sequences in lanes: each step once, few windows, few cuts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrywave.data.lanes import assign_lanes
from carrywave.data.order import Cursor, StreamOrder


@pytest.mark.parametrize(
    ("lengths", "lanes", "windows", "most_waste"),
    [([600, 550, 500], 3, 18, 0.09), ([600, 550], 50, 1, 0.05), ([537, 492], 32, 1, 0.06), ([80] * 7, 32, 1, 0.13)],
)
def test_series_of_unlike_lengths_fill_their_lanes(lengths: list[int], lanes: int, windows: int, most_waste: float) -> None:
    order = StreamOrder(np.array(lengths), lanes=lanes, steps=35)
    steps = [order.window(Cursor(0, step)).steps for step in range(order.num_steps(0))]
    assert len(steps) == windows
    assert 1.0 - sum(lengths) / (sum(steps) * order.lanes) < most_waste


@given(st.lists(st.integers(1, 60), min_size=1, max_size=20), st.integers(1, 12), st.integers(1, 9), st.booleans())
def test_pieces_are_the_sequences(lengths: list[int], lanes: int, steps: int, cut: bool) -> None:
    lanes = min(lanes, sum(lengths))
    pieces = assign_lanes(np.array(lengths), lanes, steps, cut=cut)
    for sequence, length in enumerate(lengths):
        mine = pieces.sequence == sequence
        assert cut or mine.sum() == 1
        assert pieces.length[mine].sum() == length
        assert np.array_equal(pieces.offset[mine], np.cumsum(pieces.length[mine]) - pieces.length[mine])
    assert set(pieces.lane.tolist()) <= {*range(lanes)}
    assert len(pieces.lane) < len(lengths) + 2 * lanes


def test_the_longest_of_whole_sequences_comes_first() -> None:
    assert StreamOrder(np.array([10, 10, 10, 10, 40]), lanes=2, steps=10, cut=False).num_steps(0) == 4


@given(st.integers(1, 300), st.integers(1, 20), st.integers(1, 40))
def test_one_corpus_is_cut_into_even_pieces(total: int, lanes: int, steps: int) -> None:
    lanes = min(lanes, total)
    pieces = assign_lanes(np.array([total]), lanes, steps, cut=True)
    assert sorted(pieces.lane.tolist()) == [*range(lanes)]
    assert np.ptp(pieces.length) <= 1
