"""Orders: every step exactly once an epoch, the carry without gaps, few shapes, and the same answer from any cursor."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carrywave.data.order import Cursor, Order, SequenceOrder, StreamOrder, Window
from carrywave.errors import DataError

many_lengths = st.lists(st.integers(1, 40), min_size=1, max_size=25).map(lambda values: np.array(values))


def epoch_of(order: Order, epoch: int = 0) -> list[Window]:
    return [order.window(Cursor(epoch, step)) for step in range(order.num_steps(epoch))]


def steps_of(windows: list[Window]) -> Counter[tuple[int, int]]:
    """(sequence, step) of all real steps."""
    seen: Counter[tuple[int, int]] = Counter()
    for window in windows:
        for sequence, offset, length in zip(window.sequence, window.offset, window.length, strict=True):
            seen.update((int(sequence), int(offset) + t) for t in range(length))
    return seen


def all_steps(lengths: np.ndarray) -> Counter[tuple[int, int]]:
    return Counter((i, t) for i, length in enumerate(lengths.tolist()) for t in range(length))


def same(a: Window, b: Window) -> bool:
    return a.steps == b.steps and all(
        np.array_equal(getattr(a, name), getattr(b, name)) for name in ("sequence", "offset", "length", "fresh")
    )


@st.composite
def stream_orders(draw: st.DrawFn) -> tuple[np.ndarray, StreamOrder]:
    lengths = draw(many_lengths)
    cut = draw(st.booleans())
    lanes = draw(st.integers(1, min(8, int(lengths.sum()))))
    steps, seed, vary = draw(st.integers(1, 9)), draw(st.integers(0, 3)), draw(st.booleans())
    return lengths, StreamOrder(lengths, lanes=lanes, steps=steps, seed=seed, vary=vary, cut=cut)


def test_orders_do_not_load_torch() -> None:
    code = "import sys, carrywave.data.order; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@given(stream_orders())
def test_streams_cover_every_step_once(given_order: tuple[np.ndarray, StreamOrder]) -> None:
    lengths, order = given_order
    for epoch in (0, 5):
        assert steps_of(epoch_of(order, epoch)) == all_steps(lengths)


@given(stream_orders())
def test_a_lane_goes_on_where_it_stopped_unless_it_is_fresh(given_order: tuple[np.ndarray, StreamOrder]) -> None:
    _, order = given_order
    stopped = [(-1, -1)] * order.lanes  # sequence and next step of each lane
    for window in epoch_of(order):
        assert len(window.sequence) == order.lanes
        for lane in range(order.lanes):
            sequence, offset, length = (int(values[lane]) for values in (window.sequence, window.offset, window.length))
            if length == 0:
                assert (sequence, offset, bool(window.fresh[lane])) == (-1, 0, False)
                stopped[lane] = (-2, -2)  # nothing may follow
            elif window.fresh[lane]:
                assert stopped[lane] != (-2, -2)
            else:
                assert stopped[lane] == (sequence, offset)
            if length:
                stopped[lane] = (sequence, offset + length)


@settings(max_examples=40)
@given(stream_orders(), st.randoms(use_true_random=False))
def test_streams_can_be_entered_anywhere(given_order: tuple[np.ndarray, StreamOrder], random: object) -> None:
    lengths, order = given_order
    again = StreamOrder(lengths, lanes=order.lanes, steps=order.steps, seed=order._seed, vary=order._vary, cut=order.cut)
    in_turn = {Cursor(epoch, step): window for epoch in range(3) for step, window in enumerate(epoch_of(order, epoch))}
    cursors = list(in_turn)
    random.shuffle(cursors)  # type: ignore[attr-defined]
    assert all(same(again.window(cursor), in_turn[cursor]) for cursor in cursors)


def test_streams_by_hand() -> None:
    # An even share is ceil(18 / 3) = 6 steps: 11 is cut into 6 and 5, the others stay whole.
    windows = epoch_of(StreamOrder(np.array([11, 4, 3]), lanes=3, steps=4))
    shown = [list(zip(*(values.tolist() for values in (w.sequence, w.offset, w.length, w.fresh)), strict=True)) for w in windows]
    assert shown == [
        [(0, 0, 4, True), (0, 6, 4, True), (1, 0, 4, True)],
        [(0, 4, 2, False), (0, 10, 1, False), (2, 0, 3, True)],
    ]
    assert [w.steps for w in windows] == [4, 3]


def test_streams_are_the_same_every_epoch_unless_they_vary() -> None:
    def first_windows(vary: bool, seed: int, epoch: int) -> list[int]:
        order = StreamOrder(np.array([2000]), lanes=2, steps=30, seed=seed, vary=vary)
        return [order.window(Cursor(epoch, step)).steps for step in range(10)]

    assert first_windows(False, 0, 0) == first_windows(False, 1, 7) == [30] * 10
    assert first_windows(True, 0, 0) != first_windows(True, 0, 1)
    assert first_windows(True, 0, 0) != first_windows(True, 1, 0)


def test_more_lanes_than_steps_are_refused() -> None:
    with pytest.raises(DataError, match=r"batch.lanes=8 is more than the 7 steps in train; use batch.lanes<=7"):
        StreamOrder(np.array([4, 3]), lanes=8, steps=5)


@given(many_lengths, st.integers(1, 100), st.booleans(), st.integers(0, 3))
def test_sequences_come_once_each_under_the_budget(lengths: np.ndarray, tokens: int, shuffle: bool, epoch: int) -> None:
    order = SequenceOrder(lengths, tokens=tokens, shuffle=shuffle)
    windows = epoch_of(order, epoch)
    assert sorted(np.concatenate([w.sequence for w in windows]).tolist()) == list(range(len(lengths)))
    assert len({(w.steps, len(w.sequence)) for w in windows}) <= 64
    assert {(w.steps, len(w.sequence)) for w in windows} == set(order.shapes(epoch))
    for window in windows:
        assert window.fresh.all()
        assert not window.offset.any()
        assert (window.length == lengths[window.sequence]).all()
        assert (window.length <= window.steps).all()
        assert len(window.sequence) == 1 or window.steps * len(window.sequence) <= tokens
        assert window.steps <= tokens or window.length.max() > tokens
    padded = sum(w.steps * len(w.sequence) for w in windows)
    assert order.waste(epoch) == pytest.approx(1 - lengths.sum() / padded, abs=1e-12)


def test_sequences_can_be_entered_anywhere() -> None:
    lengths = np.random.default_rng(0).integers(1, 50, size=300)
    order, again = SequenceOrder(lengths, tokens=200, seed=4), SequenceOrder(lengths, tokens=200, seed=4)
    in_turn = {Cursor(epoch, step): window for epoch in range(3) for step, window in enumerate(epoch_of(order, epoch))}
    assert all(same(again.window(cursor), window) for cursor, window in reversed(in_turn.items()))


def test_sequences_are_shuffled_by_seed_and_epoch() -> None:
    lengths = np.full(1000, 7)

    def members(seed: int, epoch: int, shuffle: bool = True) -> list[int]:
        windows = epoch_of(SequenceOrder(lengths, tokens=70, seed=seed, shuffle=shuffle), epoch)
        return np.concatenate([w.sequence for w in windows]).tolist()

    assert len({tuple(members(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4
    assert members(0, 0, shuffle=False) == members(1, 1, shuffle=False) == list(range(1000))


def test_a_sequence_over_the_budget_is_alone() -> None:
    lengths = np.array([10, 11, 30, 10, 35, 10])
    order = SequenceOrder(lengths, tokens=20)
    assert order.oversized == 2
    alone = [w for w in epoch_of(order) if w.steps > 20]
    assert sorted(int(w.sequence[0]) for w in alone) == [2, 4]
    assert all(len(w.sequence) == 1 for w in alone)


def test_log_normal_lengths_waste_little_in_few_shapes() -> None:
    lengths = np.exp(np.random.default_rng(0).normal(4.5, 1.0, size=20_000)).astype(np.int64).clip(5, 2_000)
    order = SequenceOrder(lengths, tokens=16_384)
    assert order.waste(0) < 0.05
    assert len(order.shapes(0)) <= 64
    assert order.oversized == 0
