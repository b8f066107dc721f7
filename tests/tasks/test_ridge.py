import numpy as np
import pytest

from carrywave.data.sequences import Sequences
from carrywave.tasks import ridge


def _series(lengths: list[int], columns: int, seed: int = 1) -> Sequences:
    values = np.random.default_rng(seed).normal(size=(sum(lengths), columns)).cumsum(axis=0)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    return Sequences(values.astype(np.float32), starts.astype(np.int64), np.array(lengths, np.int64))


def _rows(data: Sequences, column: int, lags: int, horizon: int) -> tuple[np.ndarray, np.ndarray]:
    read, ahead = [], []
    for start, length in zip(data.starts, data.lengths, strict=True):
        for first in range(start, start + length - lags - horizon + 1):
            window = data.inputs[first : first + lags + horizon, column].astype(np.float64)
            read.append(np.append(window[:lags] - window[lags - 1], 1.0))
            ahead.append(window[lags:] - window[lags - 1])
    return np.array(read), np.array(ahead)


def test_weights_are_those_of_least_squares_with_one_of_the_penalties():
    data = _series([60, 45, 9], 2)
    line = ridge.fit_line(data, np.array([1, 0]), 5, 3)
    for place, column in enumerate((1, 0)):
        x, y = _rows(data, column, 5, 3)
        square = (x**2).sum(axis=0)[:-1].mean()
        solved = [np.linalg.solve(x.T @ x + np.diag([*[p * square] * 5, 0.0]), x.T @ y) for p in ridge.PENALTIES]
        found = np.concatenate([line.weights_CNK[place], line.bias_CK[place][None]])
        assert min(np.abs(found - each).max() for each in solved) < 1e-9


def test_forecasts_a_line_and_a_wave_without_error():
    steps = np.arange(400)
    values = np.stack([0.3 * steps, np.sin(2 * np.pi * steps / 12)], axis=1).astype(np.float32)
    data = Sequences(values, np.array([0]), np.array([300]))
    line = ridge.fit_line(data, np.array([0, 1]), 24, 6)
    windows = np.stack([values[first : first + 24] for first in range(300, 360)])
    truth = np.stack([values[first + 24 : first + 30] - values[first + 23] for first in range(300, 360)])
    assert np.abs(line(windows) - truth).max() < 1e-2


@pytest.mark.parametrize("length", [3, 7])
def test_series_that_are_too_short_give_zeros(length: int):
    line = ridge.fit_line(_series([length], 1), np.array([0]), 6, 2)
    assert not line.weights_CNK.any()
    assert not line.bias_CK.any()
