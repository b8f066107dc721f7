"""What is held out is a pure function of (seed, sequence number)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrywave.data.holdout import held_out, split_tail
from carrywave.data.sequences import Sequences
from carrywave.errors import DataError


def test_the_choice_is_fixed_for_all_time() -> None:
    assert np.flatnonzero(held_out(20, 0.2, 2**63 - 1)).tolist() == [2, 3, 5, 15]


@given(seed=st.integers(0, 2**63 - 1), count=st.integers(0, 200), share=st.floats(0.001, 0.5))
def test_share_is_kept_and_no_side_is_empty(seed: int, count: int, share: float) -> None:
    held = held_out(count, share, seed)
    assert len(held) == count
    if count < 2:
        assert not held.any()
    else:
        assert held.sum() == min(max(round(count * share), 1), count - 1)
    assert held.tolist() == held_out(count, share, seed).tolist()


@pytest.mark.parametrize(("total", "share", "held"), [(100, 0.1, 10), (4, 0.01, 2), (4, 0.5, 2), (15, 0.1, 2)])
def test_the_end_of_a_stream_is_held_out(total: int, share: float, held: int) -> None:
    train, valid = split_tail(Sequences(np.arange(total), np.array([0]), np.array([total])), share, "t.txt")
    assert (train.starts.tolist(), train.lengths.tolist()) == ([0], [total - held])
    assert (valid.starts.tolist(), valid.lengths.tolist()) == ([total - held], [held])


def test_too_short_a_stream_is_refused() -> None:
    with pytest.raises(DataError, match=r"t\.txt has 3 tokens, too few to hold out validation data; set data\.valid"):
        split_tail(Sequences(np.arange(3), np.array([0]), np.array([3])), 0.1, "t.txt")
