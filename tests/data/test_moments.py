"""Means and deviations, gathered in pieces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrywave.data.tables.moments import Moments, scale_of, standardise, unusable


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
    assert std[0] == pytest.approx(whole.std(), rel=1e-9, abs=1e-8) or (std[0] == 1.0 and whole.std() <= 8 * 2.3e-16 * np.abs(whole).max())


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


def test_what_stands_for_nothing_in_files_is_not_usable() -> None:
    netcdf = 9.969209968386869e36
    assert unusable(np.array([np.nan, np.inf, -np.inf, netcdf, 1e25, 0.0])).tolist() == [True, True, True, True, False, False]


@pytest.mark.parametrize("unit", [1.0, 1e-11, 1e-13, 1e-20, 1e20])
def test_the_unit_of_a_column_changes_nothing(unit: float) -> None:
    column = np.random.default_rng(3).normal(size=(50, 1))
    mean, std = scale_of(column * unit)
    assert std[0] == pytest.approx(column.std() * unit, rel=1e-12)
    # Multiplying rounds; float32 is coarser.
    np.testing.assert_allclose(standardise(column * unit, mean, std), standardise(column, *scale_of(column)), rtol=1e-6)


def test_constant_is_what_float64_cannot_tell_from_it() -> None:
    changes = np.random.default_rng(3).normal(size=(1000, 1))
    assert scale_of(1e9 + changes * 1e-4)[1][0] == pytest.approx(changes.std() * 1e-4, rel=1e-3)  # 1e9 has steps of 1e-7
    noise = 0.1 + 0.2  # not 0.3
    assert scale_of(np.array([[0.3], [noise], [0.3], [noise]]))[1] == (1.0,)
    assert scale_of(np.zeros((5, 1))) == ((0.0,), (1.0,))
    assert scale_of(np.full((100_000, 1), 0.1)) == ((0.1,), (1.0,))  # the mean is the number itself, not a rounded sum
