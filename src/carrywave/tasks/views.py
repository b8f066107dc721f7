"""What each task reads of its data: `Sequences` in, a `View` of steps and targets out. NumPy only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carrywave.data.sequences import Ints, Sequences
from carrywave.data.view import View
from carrywave.spec.spec import DataSpec


def language(data: Sequences) -> View:
    """Each token but the last of a sequence predicts the one after it."""
    tokens = data.inputs

    def next_token(rows: Ints) -> NDArray[np.int64]:
        return np.asarray(tokens[rows + 1], dtype=np.int64)

    return View(tokens, data.starts, data.lengths - 1, targets_at=next_token)


def tagging(data: Sequences) -> View:
    """Each step has a tag of its own; without tags (prediction) there are no targets."""
    tags = data.tags
    if tags is None:
        return View(data.inputs, data.starts, data.lengths)

    def tag(rows: Ints) -> NDArray[np.int64]:
        return np.asarray(tags[rows], dtype=np.int64)

    return View(data.inputs, data.starts, data.lengths, targets_at=tag)


def pooled(data: Sequences) -> View:
    """One label for each sequence: classification and regression."""
    return View(data.inputs, data.starts, data.lengths, labels=data.labels)


class FirstRow:
    """For each row, the first row of the sequence that it lies in."""

    def __init__(self, data: Sequences) -> None:
        self._starts = np.sort(data.starts)

    def __call__(self, rows: Ints) -> Ints:
        """The first rows."""
        return self._starts[np.searchsorted(self._starts, rows, side="right") - 1]


class Naive:
    """The naive forecast that a forecast is the difference from: nothing, the last value, or the season before."""

    def __init__(self, data: Sequences, columns: Ints, horizon: int, season: int, kind: str) -> None:
        self.values, self.columns, self.kind = data.inputs, columns, kind
        self._first = FirstRow(data)
        ahead = np.arange(1, horizon + 1)
        # The latest value in the same place of the season that is known at the origin.
        self._back = ahead - season * -(-ahead // season)

    def __call__(self, rows: Ints) -> NDArray[Any]:
        """Forecasts [..., horizon, columns] made at the given rows."""
        if self.kind == "none":
            return np.zeros((*rows.shape, len(self._back), len(self.columns)), dtype=np.float32)
        wanted = rows[..., None] + (self._back if self.kind == "season" else np.zeros_like(self._back))
        starts = self._first(rows)
        # Where a season of history is not there yet, the last value stands in for it.
        known = np.where(wanted >= starts[..., None], wanted, rows[..., None])
        return np.asarray(self.values[known][..., self.columns])


def series(data: Sequences, spec: DataSpec) -> View:
    """Every row of every series, to forecast from: no targets.

    Where forecasts are differences from the season before, a model also reads each column's change since then: an LSTM is slow
    to learn from raw values what it was that long ago.
    """
    if spec.residual != "season":
        return View(data.inputs, data.starts, data.lengths)
    values = data.inputs
    first = FirstRow(data)

    def with_change(rows: Ints) -> NDArray[Any]:
        now = np.asarray(values[rows])
        # A change of zero where a season of history is not there yet.
        before = np.asarray(values[np.where(rows - spec.season >= first(rows), rows - spec.season, rows)])
        return np.concatenate([now, now - before], axis=-1)

    return View(values, data.starts, data.lengths, inputs_at=with_change)


def forecast_features(spec: DataSpec, columns: int) -> int:
    """Numbers that a forecaster reads at each step."""
    return 2 * columns if spec.residual == "season" else columns


def forecasting(data: Sequences, spec: DataSpec, columns: Ints) -> View:
    """Every row from which the whole horizon lies inside its part is an origin; targets are differences from the naive forecast."""
    naive = Naive(data, columns, spec.horizon, spec.season, spec.residual)
    ahead = np.arange(1, spec.horizon + 1)
    values = data.inputs

    def future(rows: Ints) -> NDArray[Any]:
        # Rows of padding repeat a real row, so only the end of the whole array needs care.
        wanted = np.minimum(rows[..., None] + ahead, len(values) - 1)
        return np.asarray(values[wanted][..., columns] - naive(rows), dtype=np.float32)

    # The last row of the context is the origin of the first forecast.
    warm = None if data.warm is None else np.maximum(data.warm - 1, 0)
    return replace(series(data, spec), lengths=data.lengths - spec.horizon, targets_at=future, warm=warm)


@dataclass(frozen=True)
class NaiveErrors:
    """How wrong the seasonal-naive forecast is, over the origins that a forecaster is scored on: means for each column."""

    absolute: NDArray[np.float64]  # [columns]
    square: NDArray[np.float64]
    scaled: float | None  # absolute errors relative to the change of each series, over all series and columns that have one
    pinball: NDArray[np.float64] | None  # averaged over quantiles, each forecast to be the naive one
    origins: int
    without_season: int  # origins before which a season of history is not there, so that the last value stands in


def naive_errors(data: Sequences, spec: DataSpec, columns: Ints, change_SC: NDArray[np.float64]) -> NaiveErrors:
    """The errors of the seasonal-naive forecast; `change_SC` is what MASE divides those of each series by, 0 where it leaves them out."""
    seasonal = Naive(data, columns, spec.horizon, spec.season, "season")
    first = FirstRow(data)
    ahead = np.arange(1, spec.horizon + 1)
    absolute, square, pinball = (np.zeros(len(columns)) for _ in range(3))
    share_Q = np.array(spec.quantiles or ())
    count = origins = without = scaled_count = 0
    scaled = 0.0
    for number, rows in _origins(data, spec.horizon):
        gap = np.asarray(data.inputs[rows[:, None] + ahead][..., columns], dtype=np.float64) - seasonal(rows)
        absolute += (sums := np.abs(gap).sum(axis=(0, 1)))
        known = change_SC[number] > 0
        scaled += float((sums[known] / change_SC[number][known]).sum())
        scaled_count += gap.shape[0] * gap.shape[1] * int(known.sum())
        square += (gap**2).sum(axis=(0, 1))
        for share in share_Q:
            pinball += np.maximum(share * gap, (share - 1.0) * gap).sum(axis=(0, 1)) / len(share_Q)
        count += gap.shape[0] * gap.shape[1]
        origins += len(rows)
        without += int((rows - first(rows) + 1 < spec.season).sum())
    count = max(count, 1)
    mase = scaled / scaled_count if scaled_count else None
    return NaiveErrors(absolute / count, square / count, mase, pinball / count if len(share_Q) else None, origins, without)


def _origins(data: Sequences, horizon: int, block: int = 1024) -> Iterator[tuple[int, Ints]]:
    """The number of a sequence and rows of it that count as origins, in blocks, so that memory stays flat."""
    warm = np.zeros(len(data), dtype=np.int64) if data.warm is None else np.maximum(data.warm - 1, 0)
    for number, (start, length, skip) in enumerate(zip(data.starts, data.lengths, warm, strict=True)):
        rows = np.arange(start + skip, start + length - horizon, dtype=np.int64)
        for first in range(0, len(rows), block):
            yield number, rows[first : first + block]
