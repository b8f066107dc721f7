"""The scale of the last values, against its definition."""

from __future__ import annotations

import numpy as np
import pytest

from carrywave.data.sequences import Sequences
from carrywave.data.tables.window_scale import WindowScale, window_scale
from carrywave.spec.step_inputs import LEAST_DEVIATION


def by_definition(values: np.ndarray, row: int, steps: int) -> tuple[float, float]:
    last = np.array([values[max(place, 0)] for place in range(row - steps + 1, row + 1)])
    return float(last.mean()), float(np.sqrt(max(last.var(), LEAST_DEVIATION**2)))


@pytest.mark.parametrize("steps", [1, 3, 7, 40])
def test_mean_and_deviation_of_the_last_values(steps: int) -> None:
    values = np.random.default_rng(1).normal(size=(30, 2)) * [1.0, 0.01] + [5.0, -300.0]
    mean, deviation = window_scale(values, steps)
    for row in range(30):
        for column in range(2):
            wanted = by_definition(values[:, column], row, steps)
            # Products of sums of float64 numbers near one.
            assert (mean[row, column], deviation[row, column]) == pytest.approx(wanted, rel=1e-10)
    assert (deviation[:, 1] == LEAST_DEVIATION).all()


def test_rows_of_any_sequence_are_found_and_none_reads_another() -> None:
    values = np.random.default_rng(2).normal(size=(40, 3)).astype(np.float32)
    data = Sequences(values, np.array([25, 3]), np.array([10, 12]))
    scale = WindowScale(data, np.array([2, 0]), 5)
    mean, deviation = scale(np.array([[3, 14], [25, 34]]))
    assert mean.shape == (2, 2, 2)
    for (i, j), (first, row) in {(0, 0): (3, 0), (0, 1): (3, 11), (1, 0): (25, 0), (1, 1): (25, 9)}.items():
        for place, column in enumerate((2, 0)):
            wanted = by_definition(values[first : first + 12, column].astype(np.float64), row, 5)
            assert (mean[i, j, place], deviation[i, j, place]) == pytest.approx(wanted, rel=1e-6)  # kept as float32
