"""Complete the sorted rows of a table: missing rows, empty cells, one value per series in static columns, and which rows are ahead.

Whatever is still missing then is refused, with its place in the file and what to do about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carrywave.data.sequences import Ints
from carrywave.data.tables.columns import ColumnChoice, Roles
from carrywave.data.tables.covariates import constant, rows_ahead
from carrywave.data.tables.filling import Values, fill, regular, summary_of_cells, summary_of_rows
from carrywave.data.tables.times import Times
from carrywave.errors import DataError


@dataclass(frozen=True)
class SortedRows:
    """The rows of a table by series and time."""

    name: str
    roles: Roles
    choice: ColumnChoice
    names: tuple[str, ...]  # of the series
    cells: Values  # [rows, numeric and then categorical columns]; NaN where a cell is empty
    codes: Ints  # series of each row
    rows: Ints  # row of each in the file; -1 if it was missing
    times: Times | None
    ahead: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))  # rows in which only what is known ahead is filled in
    unfilled: Values | None = None  # `cells` before empty ones were filled; None: none were

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns of `cells`."""
        return (*self.roles.columns, *self.roles.categorical)

    def places(self, names: tuple[str, ...]) -> list[int]:
        """The places of some columns."""
        return [place for place, column in enumerate(self.columns) if column in names]


def completed(sorted_rows: SortedRows, table: Any) -> tuple[SortedRows, tuple[str, ...]]:
    """Return the rows with nothing missing in them, and lines on what was filled; `table` has the times as they are written."""
    choice, method, lines = sorted_rows.choice, sorted_rows.choice.missing, []
    rows = sorted_rows
    if method != "error" and rows.times is not None and (evened := regular(rows.times, rows.codes, rows.name)) is not None:
        label = str(rows.roles.time)
        written = table[label].take(rows.rows).to_pylist() if len(evened.source) else []
        lines.append(summary_of_rows(rows.name, evened, rows.names, label, method, written))
        present = evened.source >= 0
        cells = np.where(present[:, None], rows.cells[evened.source], np.nan)
        origin = np.where(present, rows.rows[evened.source], -1)
        rows = replace(rows, cells=cells, codes=evened.codes, rows=origin, times=evened.times)
    numbers = len(rows.roles.columns)
    # A series ends with the last value of what is to be forecast; rows after it can only tell what is known ahead.
    measured = rows.places(choice.targets) or [at for at in range(numbers) if rows.columns[at] not in (*choice.known, *choice.static)]
    ahead = rows_ahead(rows.cells[:, measured], rows.codes) if choice.known and measured else np.zeros(len(rows.codes), np.bool_)
    rows = replace(rows, ahead=ahead)
    _refuse_nothing_measured(rows)
    static = rows.places(choice.static)
    cells = rows.cells.copy()
    if static:
        cells[:, static] = constant(cells[:, static], rows.codes, [rows.columns[place] for place in static], rows.name, rows.names)
    unread = unread_cells(rows.columns, choice, ahead)
    # Targets at every step are never filled; with a mask, nothing is that changes.
    left = [
        at
        for at, column in enumerate(rows.columns)
        if choice.each_step and (column in choice.targets or (method == "mask" and at not in static))
    ]
    empty = np.isnan(cells) & ~unread
    empty[:, left] = False
    if method != "error" and empty.any():
        rows = replace(rows, unfilled=cells)
        untouched = cells[:, left]
        cells = filled(cells, rows.codes, unread, numbers, method)
        cells[:, left] = untouched
        line = summary_of_cells(rows.name, empty, rows.columns, rows.rows, method)
        lines += [] if line is None else [line]
        empty = lacking(cells, unread, numbers)
        empty[:, left] = False
    if empty.any():
        raise _lacking(rows, empty)
    return replace(rows, cells=cells), tuple(lines)


def unread_cells(columns: Sequence[str], choice: ColumnChoice, ahead: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return a mask of the cells that are not read: in rows ahead, whatever is not known there."""
    unread: NDArray[np.bool_] = ahead[:, None] & np.array([column not in (*choice.known, *choice.static) for column in columns])
    return unread


def filled(cells: Values, codes: Ints, unread: NDArray[np.bool_], numbers: int, method: str) -> Values:
    """Return the cells with the empty ones filled from those that are read, as asked; cells that are not read are NaN.

    The first `numbers` columns are numeric, the others places of categories.
    """
    readable = np.where(unread, np.nan, cells)
    full = readable.copy()
    full[:, :numbers] = fill(readable[:, :numbers], codes, method)
    if method != "zero":  # there is no category that stands for nothing: with zero it is unknown
        full[:, numbers:] = fill(readable[:, numbers:], codes, "forward")
    return np.where(unread, np.nan, full)


def lacking(cells: Values, unread: NDArray[np.bool_], numbers: int) -> NDArray[np.bool_]:
    """Return a mask of the cells that are still empty; a category that is empty throughout a series is unknown, not lacking."""
    mask: NDArray[np.bool_] = np.isnan(cells) & ~unread
    mask[:, numbers:] = False
    return mask


def _refuse_nothing_measured(rows: SortedRows) -> None:
    """Refuse a series of which only what is known ahead is given."""
    num_measured = np.bincount(rows.codes, weights=~rows.ahead, minlength=len(rows.names))
    if (num_measured == 0).any():
        series = rows.names[int(np.argmin(num_measured))]
        raise DataError(f"{rows.name}: series {series} has no row with a measured value; add its past, or remove it")


def _lacking(rows: SortedRows, empty: NDArray[np.bool_]) -> DataError:
    """Return the error for a cell that is still empty: the first of the first column that has one."""
    column = int(np.argmax(empty.any(axis=0)))
    label = rows.columns[column]
    lacks = empty[:, column]
    if rows.choice.missing != "error" or label in rows.choice.static:
        series = rows.names[int(rows.codes[int(np.argmax(lacks))])]
        fact = f"column {label} is empty throughout series {series}"
        return DataError(f"{rows.name}: {fact}; fill it in, remove the series, or set data.missing=zero")
    row = int(rows.rows[lacks].min())
    if bool(rows.ahead[lacks].any()):
        row = int(rows.rows[lacks & rows.ahead].min())
        fact = f"row {row + 1}, column {label} is empty, but data.known says that it is known ahead"
        return DataError(f"{rows.name}: {fact}; fill it in, or set data.missing")
    fact = f"row {row + 1}, column {label} is empty or NaN, not a {'finite number' if column < len(rows.roles.columns) else 'category'}"
    ways = "mask, forward, interpolate or zero" if rows.choice.each_step else "forward, interpolate or zero"
    return DataError(f"{rows.name}: {fact}; fill the gap, remove the row, or set data.missing={ways}")
