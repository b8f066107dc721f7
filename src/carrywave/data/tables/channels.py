"""How a model reads the columns to forecast: all of a row together, or each as a series of its own (`data.channels: independent`), and
transformed or not.

With independent channels there is one global model for all columns of a wide table, as long format has them. Series s with the target
columns a and b becomes the series s/a and s/b, next to each other, each with a single target column, `value`, and a copy of all covariates.
What a person sees are the columns of the file: forecasts are put together again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from carrywave.data.codec import Codec
from carrywave.data.tables.calendar import calendar_columns
from carrywave.data.tables.choice import require
from carrywave.data.tables.parts import SeriesPart
from carrywave.data.tables.table import Table
from carrywave.data.tables.transform import check_counts, transformed
from carrywave.errors import DataError
from carrywave.spec.data_spec import COUNTS
from carrywave.spec.spec import Spec

VALUE = "value"  # the column that holds what is forecast


def spread(table: Table, channels: tuple[str, ...]) -> Table:
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
        codes=None if table.codes is None else table.codes[rows],
        ahead_rows=None if table.ahead_rows is None else np.repeat(table.ahead_rows, many),
        unfilled=None if table.unfilled is None else laid_out(table.unfilled),
        weights=None if table.weights is None else table.weights[rows],
    )


def series_names(names: Sequence[str], channels: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the series in the file, given those after `spread`."""
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
        return spread(transformed(table, self.targets, self.transform), self.channels)

    def part(self, part: SeriesPart, table: Table) -> SeriesPart:
        """Return a part of the table as the same part of the series that a model reads."""
        totals = np.repeat(table.totals, self.many)
        offsets = np.repeat(part.starts - table.starts, self.many)
        return SeriesPart(np.cumsum(totals) - totals + offsets, np.repeat(part.lengths, self.many), np.repeat(part.warm, self.many))
