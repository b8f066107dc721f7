"""Means and deviations."""

from __future__ import annotations

import numpy as np
import pytest

from carrywave.data.tables.moments import scale_of, standardise, unusable


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
