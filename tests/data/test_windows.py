"""Windows in random order: every step is scored once an epoch, after a warm-up; the same on every platform and from any cursor."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from carrywave.data.order import Cursor, WindowOrder


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    lanes=st.integers(1, 9),
    steps=st.integers(1, 12),
    warm=st.integers(0, 15),
    seed=st.integers(0, 9),
)
def test_every_step_is_scored_once_an_epoch_after_its_warm_up(lengths: list[int], lanes: int, steps: int, warm: int, seed: int):
    order = WindowOrder(np.array(lengths), lanes=lanes, steps=steps, warm=warm, seed=seed)
    for epoch in (0, 3):
        scored = [np.zeros(length, np.int64) for length in lengths]
        for step in range(order.num_steps(epoch)):
            window = order.window(Cursor(epoch, step))
            assert window.steps == warm + steps
            assert (window.length > 0).any()
            for sequence, offset, length, skip, fresh in zip(
                window.sequence, window.offset, window.length, window.skip, window.fresh, strict=True
            ):
                assert fresh == (sequence >= 0) == (length > 0)
                if length:
                    assert skip == min(warm, offset + skip)  # as much warm-up as there is
                    scored[sequence][offset + skip : offset + length] += 1
        assert all((each == 1).all() for each in scored)


def test_windows_and_their_order_change_from_epoch_to_epoch_and_with_the_seed():
    def places(seed: int, epoch: int) -> list[tuple[int, int]]:
        order = WindowOrder(np.array([100, 90]), lanes=4, steps=8, warm=4, seed=seed)
        windows = [order.window(Cursor(epoch, step)) for step in range(order.num_steps(epoch))]
        return [(int(s), int(o)) for window in windows for s, o in zip(window.sequence, window.offset, strict=True)]

    assert places(1, 0) == places(1, 0)
    assert places(1, 0) != places(1, 1)
    assert places(1, 0) != places(2, 0)
    assert places(1, 0) != sorted(places(1, 0))
