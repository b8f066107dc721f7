"""How a model reads the columns to forecast: all of a row together, or each as a series of its own (`data.channels: independent`), and
transformed or not.

With independent channels there is one global model for all columns of a wide table, as long format has them. Series s with the target
columns a and b becomes the series s/a and s/b, next to each other, each with a single target column, `value`, and a copy of all covariates.
What a person sees are the columns of the file: forecasts are put together again.

`data.transform` forecasts logarithms of values, which suit positive ones that grow by factors, or their changes from row to row. It is
applied before values are standardised, and undone in forecasts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carrywave.data.codec import Codec
from carrywave.data.tables.calendar import calendar_columns
from carrywave.data.tables.choice import require
from carrywave.data.tables.parts import SeriesPart
from carrywave.data.tables.table import Table
from carrywave.errors import DataError
from carrywave.spec.data_spec import COUNTS
from carrywave.spec.spec import Spec

VALUE = "value"  # the column that holds what is forecast
LEAST = {"log": 0.0, "log1p": -1.0}  # every value must be larger
LARGEST = 57.0  # exp of it is the largest number that files may hold, about 1e25


def melt(table: Table, channels: tuple[str, ...]) -> Table:
    """Return a table with a series for each series and channel; without channels, the table itself."""
    if not channels:
        return table
    many, totals = len(channels), table.totals
    rows = np.concatenate([np.tile(np.arange(start, start + total), many) for start, total in zip(table.starts, totals, strict=True)])
    places = np.array([table.columns.index(channel) for channel in channels])
    channel_places = np.concatenate([np.repeat(places, total) for total in totals])
    first = int(places.min())  # columns before it stay where they are

    def laid_out(cells: NDArray[np.float64]) -> NDArray[np.float64]:
        others = [place for place in range(cells.shape[1]) if place not in places]
        return np.insert(cells[rows][:, others], first, cells[rows, channel_places], axis=1)

    rest = [column for column in table.columns if column not in channels]
    name = VALUE
    while name in (*rest, *table.categorical):
        name += "_"
    repeated = np.repeat(totals, many)
    return replace(
        table,
        value=name,
        columns=(*rest[:first], name, *rest[first:]),
        values=laid_out(table.values),
        starts=np.cumsum(repeated) - repeated,
        lengths=np.repeat(table.lengths, many),
        names=tuple(f"{series}/{channel}" for series in table.names for channel in channels),
        times=None if table.times is None else table.times.sorted(rows),
        codes=table.codes[rows],
        ahead_rows=None if table.ahead_rows is None else np.repeat(table.ahead_rows, many),
        unfilled=None if table.unfilled is None else laid_out(table.unfilled),
        weights=None if table.weights is None else table.weights[rows],
    )


def series_names(names: Sequence[str], channels: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the series in the file, given those after `melt`."""
    return tuple(name.removesuffix(f"/{channels[0]}") for name in names[:: len(channels)]) if channels else tuple(names)


@dataclass(frozen=True)
class TargetReading:
    """How a model reads the columns of a table that are forecast."""

    targets: tuple[str, ...]  # in the table
    channels: tuple[str, ...]  # the same, if each is a series of its own; else none
    transform: str
    distribution: str = "none"

    @staticmethod
    def from_spec(table: Table, spec: Spec) -> TargetReading:
        """Return how a spec asks for a training table to be read."""
        choice = table.choice
        never = {*choice.known, *choice.static, *calendar_columns(choice.calendar)}
        targets = spec.data.targets or tuple(column for column in table.columns if column not in never)
        require(table.columns, targets, table.name, "data.targets")
        if not targets:
            raise DataError(f"{table.name}: no column is left to forecast; set data.targets, or shorten data.known and data.static")
        apart = spec.data.channels == "independent" and len(targets) > 1
        return TargetReading(targets, targets if apart else (), spec.data.transform, spec.data.distribution)

    @staticmethod
    def of(codec: Codec) -> TargetReading:
        """Return how the training data was read."""
        return TargetReading(codec.forecast_columns, codec.channels, codec.transform, codec.distribution)

    @property
    def many(self) -> int:
        """The series that become of one."""
        return len(self.channels) or 1

    def __call__(self, table: Table) -> Table:
        """Return the series as a model reads them, before they are standardised."""
        if self.distribution in COUNTS:
            check_counts(table, self.targets, self.distribution)
        return melt(transformed(table, self.targets, self.transform), self.channels)

    def part(self, part: SeriesPart, table: Table) -> SeriesPart:
        """Return a part of the table as the same part of the series that a model reads."""
        totals = np.repeat(table.totals, self.many)
        offsets = np.repeat(part.starts - table.starts, self.many)
        return SeriesPart(np.cumsum(totals) - totals + offsets, np.repeat(part.lengths, self.many), np.repeat(part.warm, self.many))


def transformed(table: Table, columns: tuple[str, ...], kind: str) -> Table:
    """Return the table with some of its columns transformed; refuse a value that has no logarithm."""
    if kind == "none":
        return table
    if kind in LEAST:
        remedy = f"use data.transform={'log1p or ' * (kind == 'log')}none, or correct it"
        _check(table, columns, lambda own: own <= LEAST[kind], f"{kind} needs values above {LEAST[kind]:g}; {remedy}")
    places, values = [table.columns.index(column) for column in columns], table.values.copy()
    changed = forward(values[:, places], kind, values[:1, places])
    if kind == "diff":
        changed[table.starts] = 0.0  # the first row of a series
    values[:, places] = changed
    return replace(table, values=values)


def check_counts(table: Table, columns: tuple[str, ...], kind: str) -> None:
    """Refuse values that are no counts."""
    remedy = "use data.distribution=normal or student_t, or round it (data.missing=forward or zero fills in whole numbers)"
    why = f"data.distribution={kind} needs whole numbers of 0 or more; {remedy}"
    _check(table, columns, lambda own: (own < 0) | (own > np.floor(own)), why)


def _check(table: Table, columns: tuple[str, ...], wrong: Callable[[NDArray[np.float64]], NDArray[np.bool_]], why: str) -> None:
    """Raise if any value of some columns is wrong, with the first of them; what is missing is not."""
    values = table.values[:, [table.columns.index(column) for column in columns]]
    bad = np.argwhere(wrong(values))
    if not len(bad):
        return
    row, place = (int(at) for at in bad[0])
    number = int(np.searchsorted(table.starts, row, side="right")) - 1
    at = f"row {row - table.starts[number] + 1}"
    if table.times is not None:
        at = f"the row of {table.times.written(slice(row, row + 1))[0]}"
    of = f" of series {table.names[number]}" if len(table.names) > 1 else ""
    raise DataError(f"{table.name}: {at}{of}, column {columns[place]} is {values[row, place]:g}, and {why}")


def forward(values: NDArray[Any], kind: str, last: NDArray[Any]) -> NDArray[np.float64]:
    """Transform values [rows, …]; `last` [1, …] is the row before the first, from which it differs."""
    values = np.asarray(values, np.float64)
    if kind == "diff":
        return np.diff(values, axis=0, prepend=np.broadcast_to(last, (1, *values.shape[1:])))
    result: NDArray[np.float64] = np.log(values) if kind == "log" else np.log1p(values) if kind == "log1p" else values
    return result


def backward(values: NDArray[np.float64], kind: str, last: NDArray[Any]) -> NDArray[np.float64]:
    """Undo `forward`: transformed values [rows, …] that follow the row `last` [1, …] of the file."""
    if kind == "diff":
        return np.asarray(last + np.cumsum(values, axis=0), np.float64)
    small = np.minimum(values, LARGEST)
    result: NDArray[np.float64] = np.exp(small) if kind == "log" else np.expm1(small) if kind == "log1p" else values
    return result
