"""A straight line through the last values: ridge regression of the next K values on the last N, fitted in one pass over the training rows.

One set of weights for each column, shared by all series. It reads values less the last one and forecasts the difference from it, so a shift
of a whole series changes nothing. It is a baseline beside every forecast, and where the linear part of a forecasting head begins.

The penalty is the one that does best on the last tenth of every series, judged by the same sums of products, so rows are read once;
the weights are then fitted to all of them. Float64 throughout. Shapes: C columns, N lags, K steps ahead, R rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from carrywave.data.sequences import Ints, Sequences

PENALTIES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)  # relative to the mean square of what is read
HELD_OUT = 0.1  # share of each series that the penalty is chosen on
BLOCK_ROWS = 4096
MOST_PRODUCTS = 2e10  # multiplications of a fit, a matter of seconds; for more, only some of the origins are read
Reals = NDArray[np.float64]


@dataclass(frozen=True)
class Line:
    """Weights [C, N, K] on the last N values less the last one, the most recent one last, and a bias [C, K]."""

    weights_CNK: Reals
    bias_CK: Reals

    def __call__(self, windows_RNC: NDArray[np.float32] | Reals) -> Reals:
        """The forecasts [R, K, C] of the difference from the last value."""
        gaps_RNC = np.asarray(windows_RNC, np.float64) - windows_RNC[:, -1:]
        return np.stack([gaps_RNC[..., c] @ self.weights_CNK[c] + self.bias_CK[c] for c in range(gaps_RNC.shape[-1])], axis=-1)


class _Sums:
    """Sums of products of what is read (with a 1 for the bias) and what is forecast, for one column."""

    def __init__(self, lags: int, horizon: int) -> None:
        self.read = np.zeros((lags + 1, lags + 1))
        self.both = np.zeros((lags + 1, horizon))
        self.ahead = 0.0

    def add(self, gaps_RN: Reals, ahead_RK: Reals) -> None:
        x = np.concatenate([gaps_RN, np.ones((len(gaps_RN), 1))], axis=1)
        self.read += x.T @ x
        self.both += x.T @ ahead_RK
        self.ahead += float((ahead_RK**2).sum())

    def __add__(self, other: _Sums) -> _Sums:
        total = _Sums(len(self.read) - 1, self.both.shape[1])
        total.read, total.both, total.ahead = self.read + other.read, self.both + other.both, self.ahead + other.ahead
        return total

    def solve(self, penalty: float) -> Reals:
        """The weights with a penalty, which does not touch the bias; with the smallest norm if there are several."""
        each = np.diag(self.read)[:-1]
        added = penalty * max(float(each.mean()), np.finfo(np.float64).tiny)
        left = self.read + np.diag([*np.full(len(each), added), 0.0])
        return np.asarray(np.linalg.lstsq(left, self.both, rcond=None)[0], np.float64)

    def error(self, solved: Reals) -> float:
        """The sum of squared errors of some weights."""
        return float(self.ahead - 2.0 * (solved * self.both).sum() + (solved * (self.read @ solved)).sum())


def fit_line(train: Sequences, columns: Ints, lags: int, horizon: int) -> Line:
    """Fit a line to every origin of the training rows that has all of its lags and its whole horizon; zeros if none has."""
    fitted, held = ([_Sums(lags, horizon) for _ in columns] for _ in range(2))
    stride = _stride(train, len(columns), lags, horizon)
    for windows_RNC, is_held in _windows(train, columns, lags, horizon, stride):
        gaps, ahead = windows_RNC[:, :lags] - windows_RNC[:, lags - 1 : lags], windows_RNC[:, lags:] - windows_RNC[:, lags - 1 : lags]
        for c, sums in enumerate(held if is_held else fitted):
            sums.add(gaps[..., c], ahead[..., c])
    found = [_best(one, other) for one, other in zip(fitted, held, strict=True)]
    return Line(np.stack([each[:-1] for each in found]), np.stack([each[-1] for each in found]))


def _best(fitted: _Sums, held: _Sums) -> Reals:
    """Weights fitted to all rows with the penalty that is best on those held out."""
    if not fitted.read.any():
        return held.solve(PENALTIES[-1])
    return (fitted + held).solve(min(PENALTIES, key=lambda penalty: held.error(fitted.solve(penalty))))


def _stride(train: Sequences, columns: int, lags: int, horizon: int) -> int:
    """Read every origin, or every second, third …: neighbours share nearly all of their values."""
    products = float(train.lengths.sum()) * columns * (lags + 1) * (lags + 1 + horizon)
    return max(1, round(products / MOST_PRODUCTS))


def _windows(train: Sequences, columns: Ints, lags: int, horizon: int, stride: int) -> Iterator[tuple[Reals, bool]]:
    """Blocks of windows [R, N + K, C] of the training rows, and whether they lie in the share that the penalty is chosen on."""
    size = lags + horizon
    for start, length in zip(train.starts, train.lengths, strict=True):
        rows = np.arange(start, start + length - size + 1, stride, dtype=np.int64)
        cut = len(rows) - int(len(rows) * HELD_OUT)
        for part, is_held in ((rows[:cut], False), (rows[cut:], True)):
            for first in range(0, len(part), BLOCK_ROWS):
                block = part[first : first + BLOCK_ROWS]
                yield np.asarray(train.inputs[block[:, None] + np.arange(size)][..., columns], np.float64), is_held
