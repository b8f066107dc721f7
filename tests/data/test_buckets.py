"""The grid of lengths: as good as the best that trying everything finds, and as coarse as its bound allows."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrywave.data.order import CANDIDATES, length_grid

lengths_of = st.lists(st.integers(1, 30), min_size=1, max_size=40).map(lambda values: np.array(values))


def padding(lengths: np.ndarray, grid: np.ndarray) -> int:
    return int((grid[np.searchsorted(grid, lengths)] - lengths).sum())


@given(lengths_of, st.integers(1, 4))
def test_no_other_grid_of_this_size_pads_less(lengths: np.ndarray, most: int) -> None:
    grid = length_grid(lengths, most=most, edge=1000, waste=0.0)
    values = np.unique(lengths)
    others = (np.array([*some, values[-1]]) for size in range(most) for some in combinations(values[:-1].tolist(), size))
    assert len(grid) <= most
    assert grid[-1] == values[-1]
    assert (np.diff(grid) > 0).all()
    assert padding(lengths, grid) == min(padding(lengths, other) for other in others)


@given(lengths_of)
def test_the_fewest_values_that_keep_the_bound(lengths: np.ndarray) -> None:
    def share(grid: np.ndarray) -> float:
        return padding(lengths, grid) / (padding(lengths, grid) + int(lengths.sum()))

    grid = length_grid(lengths, most=62, edge=1000, waste=0.1)
    assert share(grid) <= 0.1 + 1e-12  # the bound is computed in float64
    if len(grid) > 1:
        assert share(length_grid(lengths, most=len(grid) - 1, edge=1000, waste=0.1)) > 0.1


def test_no_bucket_reaches_across_the_edge() -> None:
    lengths = np.array([9] * 5 + [11] * 5)
    assert length_grid(lengths, most=2, edge=1000, waste=0.5).tolist() == [11]
    assert length_grid(lengths, most=2, edge=10, waste=0.5).tolist() == [9, 11]
    assert length_grid(lengths, most=1, edge=10, waste=0.0).tolist() == [11]  # one value: nothing can be told apart


@pytest.mark.parametrize("edge", [1, 777, 10**9])
def test_many_lengths_are_thinned_out_at_little_cost(edge: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 5_000, size=20_000)
    assert len(np.unique(lengths)) > CANDIDATES
    grid = length_grid(lengths, most=62, edge=edge)
    assert grid[-1] == lengths.max()
    assert padding(lengths, grid) < 0.032 * lengths.sum()  # the bound is 3% of what is padded, 3.1% of what is real
    if 1 < edge < 5_000:
        assert lengths[lengths <= edge].max() in grid
