"""What the views of several tasks share: where the state starts anew, weights of targets, and the naive forecasts. NumPy only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carrywave.data.sequences import Ints, Sequences, View
from carrywave.data.text.documents import DocumentEnds


def resets(data: Sequences, ends: DocumentEnds | None = None) -> Callable[[Ints], NDArray[np.bool_]] | None:
    """At which rows the state starts anew: where the data says so, or after the end of a document; None: nowhere."""
    row_resets = data.resets
    if row_resets is None and ends is None:
        return None

    def at(rows: Ints) -> NDArray[np.bool_]:
        starts = np.zeros(rows.shape, np.bool_) if row_resets is None else np.asarray(row_resets[rows])
        return starts if ends is None else starts | ends.begins(data.inputs, rows)

    return at


def weighted(view: View, data: Sequences, target_rows: Callable[[Ints], Ints] = lambda rows: rows) -> View:
    """The view with the weights of its targets, which are those of the rows that `target_rows` finds for each step."""
    step_weights = data.step_weights
    if step_weights is None:
        return replace(view, weights=data.weights)
    return replace(view, weights_at=lambda rows: np.asarray(step_weights[target_rows(rows)]))


def counted(data: Sequences, rows: Ints) -> NDArray[np.bool_] | None:
    """Which of what some rows hold as targets is there and has a weight above 0, [..., columns] or [..., 1]; None: all of it."""
    if data.step_weights is None:
        return None if data.missing is None else ~np.asarray(data.missing[rows])
    weighed = np.asarray(data.step_weights[rows])[..., None] > 0
    return weighed if data.missing is None else weighed & ~np.asarray(data.missing[rows])


def pooled(data: Sequences) -> View:
    """One label per sequence: classification and regression."""
    return View(data.inputs, data.starts, data.lengths, labels=data.labels, weights=data.weights)


class FirstRow:
    """Maps each row to the first row of its series, which may lie before the part."""

    def __init__(self, data: Sequences) -> None:
        order = np.argsort(data.starts, kind="stable")
        self._starts = data.starts[order]
        self._firsts = self._starts if data.firsts is None else data.firsts[order]

    def __call__(self, rows: Ints) -> Ints:
        """Return the first rows."""
        return self._firsts[np.searchsorted(self._starts, rows, side="right") - 1]


class SeriesUnits:
    """Maps each row to the size of a unit of some columns in the data's own."""

    def __init__(self, data: Sequences, columns: Ints) -> None:
        assert data.units is not None
        order = np.argsort(data.starts, kind="stable")
        self._starts, self._units = data.starts[order], data.units[order][:, columns]

    def __call__(self, rows: Ints) -> NDArray[np.float64]:
        """Return the sizes [..., columns]."""
        return self._units[np.searchsorted(self._starts, rows, side="right") - 1]


class Naive:
    """The naive forecast that model outputs are relative to: zero, the last value, or the last season."""

    def __init__(self, data: Sequences, columns: Ints, horizon: int, season: int, kind: str) -> None:
        self.values, self.columns, self.kind = data.inputs, columns, kind
        self._first = FirstRow(data)
        ahead = np.arange(1, horizon + 1)
        # The latest value at the same phase of the season that is known at the origin.
        self._back = ahead - season * -(-ahead // season)

    def __call__(self, rows: Ints) -> NDArray[Any]:
        """Return forecasts [..., horizon, columns] made at the given rows."""
        if self.kind == "none":
            return np.zeros((*rows.shape, len(self._back), len(self.columns)), dtype=np.float32)
        wanted = rows[..., None] + (self._back if self.kind == "season" else np.zeros_like(self._back))
        starts = self._first(rows)
        # Fall back to the last value if there is less than a season of history.
        source = np.where(wanted >= starts[..., None], wanted, rows[..., None])
        return np.asarray(self.values[source][..., self.columns])
