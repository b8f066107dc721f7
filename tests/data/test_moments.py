"""Means and deviations, gathered in pieces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrywave.data.moments import Moments, standardise, unusable


@given(st.lists(st.lists(st.floats(-1e6, 1e6), max_size=5), max_size=6))
def test_pieces_give_the_moments_of_the_whole(pieces: list[list[float]]) -> None:
    moments = Moments()
    for piece in pieces:
        moments.add(np.array(piece, np.float64)[:, None])
    whole = np.array([number for piece in pieces for number in piece])
    mean, std = moments.scale(wanted=True, columns=1)
    if not len(whole):
        assert (mean, std) == ((0.0,), (1.0,))
        return
    # Sums of at most 30 terms of up to 1e6 (squares: 1e12) in float64.
    assert mean[0] == pytest.approx(whole.mean(), rel=1e-12, abs=1e-8)
    assert std[0] == pytest.approx(whole.std(), rel=1e-9, abs=1e-8) or (std[0] == 1.0 and whole.std() < 1e-5)


def test_constant_column_is_not_blown_up() -> None:
    moments = Moments()
    for _ in range(10):
        moments.add(np.full((7, 1), 0.1))
    assert moments.scale(wanted=True, columns=1)[1] == (1.0,)


def test_no_scaling_wanted() -> None:
    moments = Moments()
    moments.add(np.array([[1.0, 2.0]]))
    assert moments.scale(wanted=False, columns=2) == ((0.0, 0.0), (1.0, 1.0))


def test_large_offsets_lose_nothing() -> None:
    times = 1.7e9 + np.arange(4.0)[:, None]  # float32 has steps of 128 there
    assert standardise(times, (1.7e9,), (1.0,)).tolist() == [[0], [1], [2], [3]]


def test_what_is_usable_fits_float32_however_it_is_scaled() -> None:
    assert unusable(np.array([np.nan, np.inf, -np.inf, 1.1e25, 1e25, 0.0])).tolist() == [True, True, True, True, False, False]
    assert np.isfinite(standardise(np.array([[1e25]]), (-1e25,), (1e-12,))).all()
