"""Rolling origins of a backtest: when forecasts are made, after how many rows of each series, and the table as it was known then."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from carrywave.data.sequences import Ints
from carrywave.data.tables.calendar import calendar_columns
from carrywave.data.tables.frequency import Keys
from carrywave.data.tables.table import Table, filled_cells, unread_cells
from carrywave.errors import DataError

SHOWN = 3  # names in a message

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Rolling:
    """Origins counted from the end: the last one leaves just a horizon, the one before a stride more."""

    horizon: int
    stride: int
    origins: int
    reach: int = 0  # rows ahead of which a model reads what is known, if these are more than the horizon

    @property
    def beyond(self) -> int:
        """Rows after the last origin."""
        return max(self.horizon, self.reach)

    @property
    def span(self) -> int:
        """Rows after the first origin."""
        return self.beyond + (self.origins - 1) * self.stride

    def before(self, length: int) -> Ints:
        """How many of this many rows, or times, come before each origin, the first origin first; 0 or less if there are too few."""
        return length - self.span + np.arange(self.origins, dtype=np.int64) * self.stride


@dataclass(frozen=True)
class Origins:
    """Where origins lie in each series of a table. Shapes: S series, O origins.

    They are the same times for all series, so that nothing that is known at an origin, of any series, is later than it.
    """

    rolling: Rolling
    known_SO: Ints  # rows before each origin
    made_SO: Mask  # from which of them a series is forecast: it has enough rows after them; never from one again after one that it lacks
    last_O: Keys | None = None  # the last time before each origin; None: there are none in common, and rows are counted from each one's end

    def of(self, kept: Mask) -> Origins:
        """Those of some of the series."""
        return replace(self, known_SO=self.known_SO[kept], made_SO=self.made_SO[kept])


def place_origins(table: Table, rolling: Rolling) -> Origins:
    """The origins of a table: counted back over all of its times, or else over the rows of each series."""
    times = _times_in_common(table)
    last_O: Keys | None = None
    if times is None:
        known_SO = np.array([rolling.before(int(length)) for length in table.lengths], np.int64)
    else:
        at_O = rolling.before(len(times))
        last_O = times[np.maximum(at_O - 1, 0)]
        assert table.times is not None
        keys = [table.times.keys[start : start + length] for start, length in zip(table.starts, table.lengths, strict=True)]
        known_SO = np.stack([np.searchsorted(series_keys, last_O, side="right") for series_keys in keys]).astype(np.int64)
        known_SO = np.where(at_O > 0, known_SO, 0)
    return Origins(rolling, known_SO, table.lengths[:, None] - known_SO >= rolling.beyond, last_O)


def _times_in_common(table: Table) -> Keys | None:
    """All times of a table, in order; None if rows are counted instead."""
    if table.times is None or table.times.frequency is None:
        return None
    keys = table.times.keys
    times: Keys = np.unique(
        np.concatenate([keys[start : start + length] for start, length in zip(table.starts, table.lengths, strict=True)])
    )
    return times


def long_enough(table: Table, rolling: Rolling, *, before: int) -> tuple[Table, Origins, tuple[str, ...]]:
    """The series that have `before` rows ahead of the first origin, where origins lie in them, and lines about the others."""
    origins = place_origins(table, rolling)
    fits = origins.known_SO[:, 0] >= before
    if not fits.any():
        needed, longest = rolling.span + before, int(table.lengths.max())
        reach = f" and what is known {rolling.reach} rows ahead" if rolling.reach > rolling.horizon else ""
        raise DataError(
            f"{table.name}: {rolling.origins} origins, {rolling.stride} rows apart, with a horizon of {rolling.horizon}{reach} "
            f"need {needed} rows, but the longest series has {longest}; use fewer origins, or a smaller stride or horizon"
        )
    lines = []
    if not fits.all():
        has, are = ("has", "is") if (~fits).sum() == 1 else ("have", "are")
        fact = f"{has} fewer than {before} row{'s' * (before != 1)} before the first origin and {are} left out"
        lines.append(f"{table.name}: {_some(table, ~fits)} {fact}: {_named(table, ~fits)}")
    made_SO = origins.made_SO & fits[:, None]
    if not made_SO.any():
        raise DataError(
            f"{table.name}: origins are counted back from the last time of all series, but no series has {before} rows before the first "
            f"and {rolling.beyond} after it; leave out those that end much later than the others, or use fewer origins"
        )
    from_some = made_SO.any(axis=1)
    for ended, what in (
        (fits & from_some & ~made_SO.all(axis=1), "forecast from fewer origins"),
        (fits & ~from_some, "not forecast from any of the origins"),
    ):
        if ended.any():
            ends, are = ("ends", "is") if ended.sum() == 1 else ("end", "are")
            fact = f"{ends} earlier than others and {are} {what}, which are the same times for all"
            lines.append(f"{table.name}: {_some(table, ended)} {fact}: {_named(table, ended)}")
    if origins.last_O is None and _end_apart(table):
        lines.append(f"{table.name}: series have no times in common, so the origins of each are counted back from its own end")
    if fits.all():
        return table, origins, tuple(lines)
    return cut(table, np.where(fits, table.lengths, 0), np.where(fits, table.totals - table.lengths, 0)), origins.of(fits), tuple(lines)


def _some(table: Table, which: Mask) -> str:
    return f"{int(which.sum()):,} of {len(table.names):,} series"


def _named(table: Table, which: Mask) -> str:
    names = [table.names[place] for place in np.flatnonzero(which)]
    return ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")


def _end_apart(table: Table) -> bool:
    """True if series do not end together, as far as is known."""
    ends = table.lengths if table.times is None else table.times.keys[table.starts + table.lengths - 1]
    return len(np.unique(ends)) > 1


def cut(table: Table, lengths: Ints, ahead: Ints) -> Table:
    """The first `lengths` rows of each series, and the next `ahead` as rows ahead; series without rows are left out."""
    counts = np.where(lengths > 0, lengths + ahead, 0)
    kept = np.concatenate([np.arange(start, start + count) for start, count in zip(table.starts, counts, strict=True)])
    nonempty = np.flatnonzero(lengths)
    return replace(
        table,
        values=table.values[kept],
        codes=table.codes[kept],
        unfilled=None if table.unfilled is None else table.unfilled[kept],
        labels=tuple(table.labels[place] for place in nonempty) if table.series else (),
        weights=None if table.weights is None else table.weights[kept],
        starts=np.concatenate([np.zeros(1, np.int64), np.cumsum(counts[nonempty])[:-1]]),
        lengths=np.asarray(lengths, np.int64)[nonempty],
        ahead_rows=np.asarray(ahead, np.int64)[nonempty] if ahead[nonempty].any() else None,
        names=tuple(table.names[place] for place in nonempty),
        times=None if table.times is None else table.times.sorted(kept),
    )


def at_origin(table: Table, origins: Origins, number: int, *, forecast: bool = False) -> Table:
    """What was known at one of the origins: the rows before it and, where columns are known ahead, these for the horizon after it.

    With `forecast`, only series that are forecast from it are there. Empty cells are filled from what was known alone, so those at the
    end of the past are filled from the values before them.
    """
    lengths = np.where(origins.made_SO[:, number] | (not forecast), origins.known_SO[:, number], 0)
    ahead = np.minimum(table.totals - lengths, origins.rolling.beyond if table.choice.known else 0)
    past = cut(table, lengths, ahead)
    measured = len(table.columns) - len(calendar_columns(table.choice.calendar))
    columns = (*table.columns[:measured], *table.categorical)
    unread = unread_cells(columns, table.choice, _is_ahead(past))
    if past.unfilled is None:
        values, codes = past.values.copy(), np.where(unread[:, measured:], -1, past.codes)
        values[:, :measured][unread[:, :measured]] = np.nan
        return replace(past, values=values, codes=codes)
    of_row = np.repeat(np.arange(len(past.names)), past.totals)
    cells = filled_cells(past.unfilled, of_row, unread, measured, table.choice.missing)
    empty = np.isnan(cells) & ~unread
    empty[:, measured:] = False
    cells[empty] = 0.0  # nothing is known of it yet
    values = np.concatenate([cells[:, :measured], past.values[:, measured:]], axis=1)
    codes = np.where(np.isnan(cells[:, measured:]), -1, cells[:, measured:]).astype(np.int64)
    return replace(past, unfilled=None, values=values, codes=codes)


def _is_ahead(table: Table) -> Mask:
    """A mask of the rows ahead."""
    mask = np.zeros(len(table.values), np.bool_)
    for start, length, total in zip(table.starts, table.lengths, table.totals, strict=True):
        mask[start + length : start + total] = True
    return mask
