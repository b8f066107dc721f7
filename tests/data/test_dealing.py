"""Dealing: as few windows as can be, few cuts, and an order of old that a resumed run can ask for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrywave.data.dealing import _size, deal
from carrywave.data.order import Cursor, StreamOrder

many_lengths = st.lists(st.integers(1, 60), min_size=1, max_size=20).map(lambda values: np.array(values))


def waste(order: StreamOrder, lengths: np.ndarray) -> float:
    """The share of an epoch's steps that is padding."""
    steps = sum(order.window(Cursor(0, step)).steps for step in range(order.num_steps(0)))
    return 1.0 - float(lengths.sum()) / (steps * order.lanes)


@pytest.mark.parametrize(
    ("lengths", "lanes", "before", "windows", "most_waste"),
    [([600, 550], 2, 25, 17, 0.02), ([600, 550, 500], 3, 24, 17, 0.03), ([600, 550], 50, 2, 1, 0.05), ([537, 492], 32, 2, 1, 0.06)],
)
def test_series_of_unlike_lengths_fill_their_lanes(lengths: list[int], lanes: int, before: int, windows: int, most_waste: float) -> None:
    given_lengths = np.array(lengths)
    assert StreamOrder(given_lengths, lanes=lanes, steps=35, dealing=1).num_steps(0) == before
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
    before, now = (StreamOrder(lengths, lanes=9, steps=120, dealing=dealing) for dealing in (1, 2))
    assert (before.num_steps(0), now.num_steps(0)) == (2, 2)
    assert waste(before, lengths) > 0.4
    assert waste(now, lengths) < 0.1


@given(many_lengths, st.integers(1, 12), st.integers(1, 9), st.booleans())
def test_an_epoch_is_never_more_work_than_before(lengths: np.ndarray, lanes: int, steps: int, cut: bool) -> None:
    lanes = min(lanes, int(lengths.sum()))
    before, now = (StreamOrder(lengths, lanes=lanes, steps=steps, cut=cut, dealing=dealing) for dealing in (1, 2))
    assert (now.num_steps(0), waste(now, lengths)) <= (before.num_steps(0), waste(before, lengths))
    sized = [_size(deal(lengths, order.lanes, steps, cut=cut, dealing=order.dealing), order.lanes, steps) for order in (before, now)]
    windows = [[order.window(Cursor(0, step)).steps for step in range(order.num_steps(0))] for order in (before, now)]
    assert sized == [(len(each), sum(each)) for each in windows]


@given(many_lengths, st.integers(1, 12), st.integers(1, 9))
def test_no_more_cuts_than_before_or_one_for_each_lane(lengths: np.ndarray, lanes: int, steps: int) -> None:
    now, before = (deal(lengths, lanes, steps, cut=True, dealing=dealing) for dealing in (2, 1))
    assert len(now.sequence) <= max(len(before.sequence), len(lengths) + lanes - 1)


@given(many_lengths, st.integers(1, 12), st.integers(1, 9))
def test_whole_sequences_are_dealt_no_worse_than_before(lengths: np.ndarray, lanes: int, steps: int) -> None:
    now, before = (StreamOrder(lengths, lanes=lanes, steps=steps, cut=False, dealing=dealing).num_steps(0) for dealing in (2, 1))
    assert now <= before


def test_the_longest_of_whole_sequences_is_dealt_first() -> None:
    lengths = np.array([10, 10, 10, 10, 40])
    assert StreamOrder(lengths, lanes=2, steps=10, cut=False, dealing=1).num_steps(0) == 6
    assert StreamOrder(lengths, lanes=2, steps=10, cut=False).num_steps(0) == 4


@given(st.integers(1, 300), st.integers(1, 20), st.integers(1, 40))
def test_one_corpus_is_dealt_as_ever(total: int, lanes: int, steps: int) -> None:
    lengths = np.array([total])
    now, before = (deal(lengths, min(lanes, total), steps, cut=True, dealing=dealing) for dealing in (2, 1))
    assert all(np.array_equal(*pair) for pair in zip(now, before, strict=True))
