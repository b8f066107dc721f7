"""Dealing: as few windows as can be, and few cuts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrywave.data.lanes import _evenly, _size, assign_lanes
from carrywave.data.order import Cursor, StreamOrder

many_lengths = st.lists(st.integers(1, 60), min_size=1, max_size=20).map(lambda values: np.array(values))


def waste(order: StreamOrder, lengths: np.ndarray) -> float:
    """The share of an epoch's steps that is padding."""
    steps = sum(order.window(Cursor(0, step)).steps for step in range(order.num_steps(0)))
    return 1.0 - float(lengths.sum()) / (steps * order.lanes)


@pytest.mark.parametrize(
    ("lengths", "lanes", "windows", "most_waste"),
    [([600, 550], 2, 17, 0.02), ([600, 550, 500], 3, 17, 0.03), ([600, 550], 50, 1, 0.05), ([537, 492], 32, 1, 0.06)],
)
def test_series_of_unlike_lengths_fill_their_lanes(lengths: list[int], lanes: int, windows: int, most_waste: float) -> None:
    given_lengths = np.array(lengths)
    order = StreamOrder(given_lengths, lanes=lanes, steps=35)
    assert order.num_steps(0) == windows
    assert waste(order, given_lengths) < most_waste


@given(many_lengths, st.integers(1, 12), st.integers(1, 9))
def test_an_epoch_has_as_few_windows_as_can_be(lengths: np.ndarray, lanes: int, steps: int) -> None:
    lanes = min(lanes, int(lengths.sum()))
    order = StreamOrder(lengths, lanes=lanes, steps=steps)
    assert order.num_steps(0) == -(-int((-(-lengths // steps)).sum()) // lanes)


def test_a_last_window_for_a_single_lane_is_avoided() -> None:
    lengths = np.array([537, 492])  # in ten even pieces, for nine lanes
    order = StreamOrder(lengths, lanes=9, steps=120)
    assert order.num_steps(0) == 2
    assert waste(order, lengths) < 0.1


@given(many_lengths, st.integers(1, 12), st.integers(1, 9), st.booleans())
def test_an_epoch_is_never_more_work_than_with_even_pieces(lengths: np.ndarray, lanes: int, steps: int, cut: bool) -> None:
    order = StreamOrder(lengths, lanes=min(lanes, int(lengths.sum())), steps=steps, cut=cut)
    dealt, even = (of(lengths, order.lanes, steps, cut=cut) for of in (assign_lanes, _evenly))
    assert _size(dealt, order.lanes, steps) <= _size(even, order.lanes, steps)
    windows = [order.window(Cursor(0, step)).steps for step in range(order.num_steps(0))]
    assert _size(dealt, order.lanes, steps) == (len(windows), sum(windows))


@given(many_lengths, st.integers(1, 12), st.integers(1, 9))
def test_no_more_cuts_than_even_pieces_need_or_one_for_each_lane(lengths: np.ndarray, lanes: int, steps: int) -> None:
    dealt, even = (of(lengths, lanes, steps, cut=True) for of in (assign_lanes, _evenly))
    assert len(dealt.sequence) <= max(len(even.sequence), len(lengths) + lanes - 1)


def test_the_longest_of_whole_sequences_is_dealt_first() -> None:
    lengths = np.array([10, 10, 10, 10, 40])
    assert StreamOrder(lengths, lanes=2, steps=10, cut=False).num_steps(0) == 4


@given(st.integers(1, 300), st.integers(1, 20), st.integers(1, 40))
def test_one_corpus_is_cut_into_even_pieces(total: int, lanes: int, steps: int) -> None:
    lanes = min(lanes, total)
    dealt = assign_lanes(np.array([total]), lanes, steps, cut=True)
    assert np.array_equal(dealt.lane, np.arange(lanes))
    assert np.ptp(dealt.length) <= 1
    assert np.array_equal(dealt.offset, np.cumsum(dealt.length) - dealt.length)
