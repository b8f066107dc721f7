"""The grid of lengths: as good as the best that trying everything finds, and as coarse as its bound allows."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from carrywave.data.order import length_grid

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


def test_no_bucket_reaches_across_the_edge() -> None:
    lengths = np.array([9] * 5 + [11] * 5)
    assert length_grid(lengths, most=2, edge=1000, waste=0.5).tolist() == [11]
    assert length_grid(lengths, most=2, edge=10, waste=0.5).tolist() == [9, 11]
    assert length_grid(lengths, most=1, edge=10, waste=0.0).tolist() == [11]  # one value: nothing can be told apart
