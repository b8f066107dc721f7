"""The view of each task: maps `Sequences` to a `View` of steps and targets. NumPy only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carrywave.data.codec import Codec
from carrywave.data.sequences import Ints, Sequences, View
from carrywave.data.tables.step_series import LEAST_SPREAD
from carrywave.data.tables.window_scale import WindowScale
from carrywave.data.text.documents import DocumentEnds
from carrywave.spec.spec import Spec


def resets(data: Sequences, ends: DocumentEnds | None = None) -> Callable[[Ints], NDArray[np.bool_]] | None:
    """At which rows the state starts anew: where the data says so, or after the end of a document; None: nowhere."""
    row_resets = data.resets
    if row_resets is None and ends is None:
        return None

    def at(rows: Ints) -> NDArray[np.bool_]:
        starts = np.zeros(rows.shape, np.bool_) if row_resets is None else np.asarray(row_resets[rows])
        return starts if ends is None else starts | ends.begins(data.inputs, rows)

    return at


def language(data: Sequences, ends: DocumentEnds | None = None) -> View:
    """Each token except the last of a sequence predicts its successor."""
    tokens = data.inputs

    def next_token(rows: Ints) -> NDArray[np.int64]:
        return np.asarray(tokens[rows + 1], dtype=np.int64)

    read = View(tokens, data.starts, data.lengths - 1, targets_at=next_token, resets_at=resets(data, ends))
    return weighted(read, data, lambda rows: rows + 1)


def weighted(view: View, data: Sequences, target_rows: Callable[[Ints], Ints] = lambda rows: rows) -> View:
    """The view with the weights of its targets, which are those of the rows that `target_rows` finds for each step."""
    step_weights = data.step_weights
    if step_weights is None:
        return replace(view, weights=data.weights)
    return replace(view, weights_at=lambda rows: np.asarray(step_weights[target_rows(rows)]))


def tagging(data: Sequences) -> View:
    """Each step has its own tag, or a number for each label; without tags (prediction) there are no targets."""
    tags = data.tags
    if tags is None:
        return View(data.inputs, data.starts, data.lengths, resets_at=resets(data))

    def tag(rows: Ints) -> NDArray[Any]:
        return np.asarray(tags[rows])

    return weighted(View(data.inputs, data.starts, data.lengths, targets_at=tag, resets_at=resets(data)), data)


def each_step(data: Sequences, loss: str) -> View:
    """Each step has numbers of its own, NaN where there are none; for the NSE loss, also the weight of each [..., 2]."""
    tags = data.tags
    if tags is None:
        return View(data.inputs, data.starts, data.lengths)
    order = np.argsort(data.starts, kind="stable")
    starts = data.starts[order]
    weights = None
    if loss == "nse":
        assert data.spreads is not None
        weights = (data.spreads[order] + LEAST_SPREAD).astype(np.float32) ** -2

    def numbers(rows: Ints) -> NDArray[np.float32]:
        values: NDArray[np.float32] = np.asarray(tags[rows])
        return values if weights is None else np.stack([values, weights[np.searchsorted(starts, rows, side="right") - 1]], axis=-1)

    return weighted(View(data.inputs, data.starts, data.lengths, targets_at=numbers, warm=data.warm), data)


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


class Units:
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


@dataclass(frozen=True)
class Layout:
    """Which columns of a forecaster's rows are read as what; rows hold numbers and then the codes of categories."""

    numbers: Ints
    changing: Ints  # numbers whose change since the last season is read, too
    known: Ints  # numbers that are read for the whole horizon, too
    codes: Ints
    known_codes: Ints
    scaled: Ints  # numbers that a moving window scales: those that change and are not known ahead

    @staticmethod
    def of(codec: Codec) -> Layout:
        """Return the layout of the rows that a codec writes."""
        count = len(codec.columns)
        changing = [place for place, name in enumerate(codec.columns) if name not in codec.fixed]
        return Layout(
            np.arange(count),
            np.array(changing, np.int64),
            np.array(codec.known_columns, np.int64),
            np.arange(count, count + len(codec.categorical)),
            np.array([count + place for place, name in enumerate(codec.categorical) if name in codec.known], np.int64),
            np.array([place for place in changing if place not in codec.known_columns], np.int64),
        )

    @property
    def ahead(self) -> bool:
        """True if anything is read ahead."""
        return bool(len(self.known) or len(self.known_codes))


def series(data: Sequences, spec: Spec, layout: Layout | None = None) -> View:
    """View every row of every series, without targets, to forecast from.

    With a season, the model also reads each column's change since the last one (`Spec.reads_changes`): an LSTM is slow to learn to recall
    raw values from that long ago. What is known ahead is read for each step of the horizon. The order is that of `StepInputs`. With
    `data.standardize: window`, measured columns and their changes are read in the scale of so many last values (`window_scale`).
    """
    values = data.inputs
    seasonal, scale_steps, season = spec.reads_changes, spec.scale_steps, spec.data.season
    if not seasonal and not scale_steps and (layout is None or not layout.ahead):
        return View(values, data.starts, data.lengths)
    every = np.arange(values.shape[1])
    at = layout or Layout(every, every, every[:0], every[:0], every[:0], every)
    first = FirstRow(data)
    ahead = np.arange(1, spec.data.horizon + 1)
    scale = WindowScale(data, at.scaled, scale_steps) if scale_steps else None

    def inputs(rows: Ints) -> NDArray[Any]:
        now = np.array(values[rows])
        # The change is zero if there is less than a season of history.
        change = now - values[np.where(rows - season >= first(rows), rows - season, rows)] if seasonal else now
        if scale is not None:
            mean, deviation = scale(rows)
            now[..., at.scaled] = (now[..., at.scaled] - mean) / deviation
            if seasonal:
                change[..., at.scaled] /= deviation
        parts = [now[..., at.numbers]]
        if seasonal:
            parts.append(change[..., at.changing])
        later = (rows[..., None] + ahead)[..., None]
        parts += [values[later, at.known].reshape(*rows.shape, -1)] if len(at.known) else []
        parts += [now[..., at.codes]]
        parts += [values[later, at.known_codes].reshape(*rows.shape, -1)] if len(at.known_codes) else []
        return np.concatenate(parts, axis=-1)

    return View(values, data.starts, data.lengths, inputs_at=inputs)


def forecasting(data: Sequences, spec: Spec, columns: Ints, layout: Layout | None = None) -> View:
    """Each row whose whole horizon lies inside its part is an origin; targets are differences from the naive forecast, or counts as they
    are in the data.
    """
    naive = Naive(data, columns, spec.data.horizon, spec.data.season, spec.starts_from)
    ahead = np.arange(1, spec.data.horizon + 1)
    values, missing = data.inputs, data.missing
    units = Units(data, columns) if spec.data.counts else None

    def future(rows: Ints) -> NDArray[Any]:
        # Padding repeats a real row, so only the end of the whole array needs clipping.
        wanted = np.minimum(rows[..., None] + ahead, len(values) - 1)
        if units is not None:
            made = np.asarray(np.rint(values[wanted][..., columns] * units(rows)[..., None, :]), dtype=np.float32)
        else:
            made = np.asarray(values[wanted][..., columns] - naive(rows), dtype=np.float32)
        return made if missing is None else np.where(missing[wanted], np.float32(np.nan), made)

    # The last warm-up row is the origin of the first forecast.
    warm = None if data.warm is None else np.maximum(data.warm - 1, 0)
    read = replace(series(data, spec, layout), lengths=data.lengths - spec.data.horizon, targets_at=future, warm=warm)
    return weighted(read, data, lambda rows: np.minimum(rows[..., None] + ahead, len(values) - 1))
