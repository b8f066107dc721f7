"""A straight line through the last values: ridge regression of the next K values on the last N, fitted in one pass over the training rows.

One set of weights for each column, shared by all series. It reads values less the last one and forecasts the difference from it, so a shift
of a whole series changes nothing. It is a baseline beside every forecast, and where the linear part of a forecasting head begins.

Targets count with their weights, as they do in the loss: one that is missing or of weight 0 is not learned from. Sums of what is read then
differ from step ahead to step ahead.

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
class Ridge:
    """Weights [C, N, K] on the last N values less the last one, the most recent one last, and a bias [C, K]."""

    weights_CNK: Reals
    bias_CK: Reals

    def __call__(self, windows_RNC: NDArray[np.float32] | Reals) -> Reals:
        """The forecasts [R, K, C] of the difference from the last value."""
        gaps_RNC = np.asarray(windows_RNC, np.float64) - windows_RNC[:, -1:]
        return np.stack([gaps_RNC[..., c] @ self.weights_CNK[c] + self.bias_CK[c] for c in range(gaps_RNC.shape[-1])], axis=-1)


class _Sums:
    """Sums of products of what is read (with a 1 for the bias) and what is forecast, for one column. If targets have weights (`weighted`),
    there are sums of what is read for each step ahead, otherwise one for all.
    """

    def __init__(self, lags: int, horizon: int, *, weighted: bool = False) -> None:
        self.weighted = weighted
        self.read = np.zeros((horizon if weighted else 1, lags + 1, lags + 1))
        self.both = np.zeros((lags + 1, horizon))
        self.ahead = 0.0

    def add(self, gaps_RN: Reals, ahead_RK: Reals, weights_RK: Reals | None = None) -> None:
        x = np.concatenate([gaps_RN, np.ones((len(gaps_RN), 1))], axis=1)
        counted_RK = ahead_RK if weights_RK is None else weights_RK * ahead_RK
        self.read += x.T @ x if weights_RK is None else np.stack([(x * weights_R[:, None]).T @ x for weights_R in weights_RK.T])
        self.both += x.T @ counted_RK
        self.ahead += float((counted_RK * ahead_RK).sum())

    def __add__(self, other: _Sums) -> _Sums:
        total = _Sums(len(self.both) - 1, self.both.shape[1], weighted=self.weighted)
        total.read, total.both, total.ahead = self.read + other.read, self.both + other.both, self.ahead + other.ahead
        return total

    def solve(self, penalty: float) -> Reals:
        """The weights with a penalty, which does not touch the bias; with the smallest norm if there are several."""
        parts = [self.both] if not self.weighted else [column[:, None] for column in self.both.T]
        return np.concatenate([_solved(read, both, penalty) for read, both in zip(self.read, parts, strict=True)], axis=1)

    def error(self, solved: Reals) -> float:
        """The sum of squared errors of some weights."""
        parts = [solved] if not self.weighted else [column[:, None] for column in solved.T]
        through = np.concatenate([read @ weights for read, weights in zip(self.read, parts, strict=True)], axis=1)
        return float(self.ahead - 2.0 * (solved * self.both).sum() + (solved * through).sum())


def _solved(read: Reals, both: Reals, penalty: float) -> Reals:
    each = np.diag(read)[:-1]
    added = penalty * max(float(each.mean()), np.finfo(np.float64).tiny)
    left = read + np.diag([*np.full(len(each), added), 0.0])
    return np.asarray(np.linalg.lstsq(left, both, rcond=None)[0], np.float64)


def fit_line(train: Sequences, columns: Ints, lags: int, horizon: int) -> Ridge:
    """Fit a line to every origin of the training rows that has all of its lags and its whole horizon; zeros if none has."""
    weighted = train.step_weights is not None or train.missing is not None
    fitted, held = ([_Sums(lags, horizon, weighted=weighted) for _ in columns] for _ in range(2))
    stride = _stride(train, len(columns), lags, horizon)
    for windows_RNC, weights_RKC, is_held in _windows(train, columns, lags, horizon, stride):
        gaps, ahead = windows_RNC[:, :lags] - windows_RNC[:, lags - 1 : lags], windows_RNC[:, lags:] - windows_RNC[:, lags - 1 : lags]
        for c, sums in enumerate(held if is_held else fitted):
            sums.add(gaps[..., c], ahead[..., c], None if weights_RKC is None else weights_RKC[..., c if weights_RKC.shape[-1] > 1 else 0])
    solved = [_best(one, other) for one, other in zip(fitted, held, strict=True)]
    return Ridge(np.stack([each[:-1] for each in solved]), np.stack([each[-1] for each in solved]))


def _best(fitted: _Sums, held: _Sums) -> Reals:
    """Weights fitted to all rows with the penalty that is best on those held out."""
    if not fitted.read.any():
        return held.solve(PENALTIES[-1])
    return (fitted + held).solve(min(PENALTIES, key=lambda penalty: held.error(fitted.solve(penalty))))


def _stride(train: Sequences, columns: int, lags: int, horizon: int) -> int:
    """Read every origin, or every second, third …: neighbours share nearly all of their values."""
    sums = 1 if train.step_weights is None and train.missing is None else horizon
    products = float(train.lengths.sum()) * columns * (lags + 1) * (sums * (lags + 1) + horizon)
    return max(1, round(products / MOST_PRODUCTS))


def _windows(train: Sequences, columns: Ints, lags: int, horizon: int, stride: int) -> Iterator[tuple[Reals, Reals | None, bool]]:
    """Blocks of windows [R, N + K, C] of the training rows, the weights of what is forecast [R, K, C] or [R, K, 1], and whether they lie in
    the share that the penalty is chosen on.
    """
    size = lags + horizon
    if len(train.inputs) < size:
        return
    windows_RCN = np.lib.stride_tricks.sliding_window_view(train.inputs[:, columns], size, axis=0)
    for start, length in zip(train.starts, train.lengths, strict=True):
        rows = np.arange(start, start + length - size + 1, stride, dtype=np.int64)
        cut = len(rows) - int(len(rows) * HELD_OUT)
        for part, is_held in ((rows[:cut], False), (rows[cut:], True)):
            for first in range(0, len(part), BLOCK_ROWS):
                block = part[first : first + BLOCK_ROWS]
                rows_RK = block[:, None] + np.arange(lags, size)
                yield np.asarray(windows_RCN[block].swapaxes(1, 2), np.float64), _weights(train, rows_RK), is_held


def _weights(train: Sequences, rows_RK: Ints) -> Reals | None:
    """The weights of targets, 0 for those that are missing."""
    if train.step_weights is None and train.missing is None:
        return None
    weights = None if train.step_weights is None else np.asarray(train.step_weights[rows_RK], np.float64)[..., None]
    if train.missing is None:
        return weights
    present = (~np.asarray(train.missing[rows_RK])).astype(np.float64)
    return present if weights is None else weights * present
