"""Rolling origins: after how many rows of each series a forecast is made, and the table as it was known then. NumPy only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carrywave.data.sequences import Ints
from carrywave.data.tables.calendar import calendar_columns
from carrywave.data.tables.completing import filled, lacking, unread_cells
from carrywave.data.tables.table import Table
from carrywave.errors import DataError

SHOWN = 3  # names in a message

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Rolling:
    """Origins counted from the end of each series: the last one leaves just a horizon, the one before a stride more."""

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

    def known(self, length: int) -> Ints:
        """How many rows of a series are known at each origin, the first origin first."""
        return length - self.span + np.arange(self.origins, dtype=np.int64) * self.stride


def long_enough(table: Table, rolling: Rolling, *, before: int) -> tuple[Table, tuple[str, ...]]:
    """The series that have `before` rows ahead of the first origin, and a line about those that are left out."""
    needed = rolling.span + before
    fits = table.lengths >= needed
    if not fits.any():
        longest = int(table.lengths.max())
        reach = f" and what is known {rolling.reach} rows ahead" if rolling.reach > rolling.horizon else ""
        raise DataError(
            f"{table.name}: {rolling.origins} origins, {rolling.stride} rows apart, with a horizon of {rolling.horizon}{reach} "
            f"need {needed} rows, but the longest series has {longest}; use fewer origins, or a smaller stride or horizon"
        )
    if fits.all():
        return table, ()
    short = [table.names[place] for place in np.flatnonzero(~fits)]
    shown = ", ".join(short[:SHOWN]) + (", …" if len(short) > SHOWN else "")
    has, are = ("has", "is") if len(short) == 1 else ("have", "are")
    line = f"{table.name}: {len(short):,} of {len(table.names):,} series {has} fewer than {needed} rows and {are} left out: {shown}"
    return cut(table, np.where(fits, table.lengths, 0), np.where(fits, table.totals - table.lengths, 0)), (line,)


def cut(table: Table, lengths: Ints, ahead: Ints) -> Table:
    """The first so many rows of each series, and so many of those that follow, as rows ahead; series without rows are left out."""
    counts = np.where(lengths > 0, lengths + ahead, 0)
    kept = np.concatenate([np.arange(start, start + count) for start, count in zip(table.starts, counts, strict=True)])
    there = np.flatnonzero(lengths)
    return replace(
        table,
        values=table.values[kept],
        codes=None if table.codes is None else table.codes[kept],
        unfilled=None if table.unfilled is None else table.unfilled[kept],
        starts=np.concatenate([np.zeros(1, np.int64), np.cumsum(counts[there])[:-1]]),
        lengths=np.asarray(lengths, np.int64)[there],
        ahead_rows=np.asarray(ahead, np.int64)[there] if ahead[there].any() else None,
        names=tuple(table.names[place] for place in there),
        times=None if table.times is None else table.times.sorted(kept),
    )


def at_origin(table: Table, rolling: Rolling, number: int, among: Mask | None = None) -> Table:
    """What was known at one of the origins: the rows before it and, where columns are known ahead, these for the horizon after it.

    Empty cells are filled from what was known alone, so those at the end of the past are filled from the values before them. `among` marks
    the series that are wanted.
    """
    lengths = np.array([rolling.known(int(length))[number] for length in table.lengths], np.int64)
    lengths = lengths if among is None else np.where(among, lengths, 0)
    found = cut(table, lengths, np.full_like(lengths, rolling.beyond if table.choice.known else 0))
    measured = len(table.columns) - len(calendar_columns(table.choice.calendar))
    columns = (*table.columns[:measured], *table.categorical)
    unread = unread_cells(columns, table.choice, _is_ahead(found))
    if found.unfilled is None:
        values, codes = found.values.copy(), None if found.codes is None else np.where(unread[:, measured:], -1, found.codes)
        values[:, :measured][unread[:, :measured]] = np.nan
        return replace(found, values=values, codes=codes)
    of_row = np.repeat(np.arange(len(found.names)), found.totals)
    cells = filled(found.unfilled, of_row, unread, measured, table.choice.missing)
    if (empty := lacking(cells, unread, measured)).any():
        row, column = (int(place) for place in np.argwhere(empty)[0])
        series = int(of_row[row])
        fact = f"column {columns[column]} is empty in the first {int(found.lengths[series])} rows of series {found.names[series]}"
        raise DataError(f"{table.name}: {fact}, where origin {number + 1} lies; use fewer origins, or set data.missing=zero")
    changed: dict[str, Any] = {"values": np.concatenate([cells[:, :measured], found.values[:, measured:]], axis=1)}
    if found.codes is not None:
        changed["codes"] = np.where(np.isnan(cells[:, measured:]), -1, cells[:, measured:]).astype(np.int64)
    return replace(found, unfilled=None, **changed)


def _is_ahead(table: Table) -> Mask:
    """A mask of the rows ahead."""
    found = np.zeros(len(table.values), np.bool_)
    for start, length, total in zip(table.starts, table.lengths, table.totals, strict=True):
        found[start + length : start + total] = True
    return found


def same_past(early: Table, late: Table) -> Mask:
    """Which series say the same at an origin as at a later one, of the rows that are known at both; others had cells filled differently."""
    columns, codes = (np.array([name in early.choice.known for name in names], np.bool_) for names in (early.columns, early.categorical))
    every, every_code = np.ones_like(columns), np.ones_like(codes)
    return np.array(
        [
            _alike(early, late, place, 0, int(length), every, every_code)
            and _alike(early, late, place, int(length), int(total), columns, codes)
            for place, (length, total) in enumerate(zip(early.lengths, early.totals, strict=True))
        ],
        np.bool_,
    )


def _alike(early: Table, late: Table, series: int, first: int, last: int, columns: Mask, codes: Mask) -> bool:
    """True if some rows of a series, from the first to before the last, are alike in some columns of numbers and of categories."""
    rows, other = (slice(int(table.starts[series]) + first, int(table.starts[series]) + last) for table in (early, late))
    if not np.array_equal(early.values[rows][:, columns], late.values[other][:, columns]):
        return False
    return early.codes is None or late.codes is None or np.array_equal(early.codes[rows][:, codes], late.codes[other][:, codes])
