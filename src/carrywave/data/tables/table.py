"""A `Table` is series stored end to end: rows of a frame that is long (a row for each series and time) or wide (a column for each series).

A table is read as a whole, because rows must be sorted by series and time; training then reads memory-mapped arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from carrywave.data.sequences import Ints
from carrywave.data.tables.calendar import calendar_columns, calendar_features
from carrywave.data.tables.choice import ColumnChoice, listed, quoted, require
from carrywave.data.tables.filling import Values, complete, constant, fill
from carrywave.data.tables.frequency import infer, told
from carrywave.data.tables.moments import unusable
from carrywave.data.tables.reading import TableReading, codes_of, in_order, read
from carrywave.data.tables.times import Times
from carrywave.errors import DataError


@dataclass(frozen=True)
class Table:
    """Series stored end to end, each in chronological order."""

    name: str
    columns: tuple[str, ...]
    values: Values  # [rows, columns]
    starts: Ints
    lengths: Ints
    names: tuple[str, ...]  # of the series
    time: str | None = None
    series: tuple[str, ...] = ()  # the columns that name them
    labels: tuple[tuple[Any, ...], ...] = ()  # what these columns hold for each series
    times: Times | None = None
    notes: tuple[str, ...] = ()  # remarks for the user about how the table was read
    choice: ColumnChoice = field(default_factory=ColumnChoice)  # what was asked for
    categorical: tuple[str, ...] = ()  # columns of categories
    categories: tuple[tuple[str, ...], ...] = ()  # the values of each
    codes: Ints = field(default_factory=lambda: np.empty((0, 0), np.int64))  # [rows, categorical] the places of values; -1 for none
    ahead_rows: Ints | None = None  # rows after the end of each series, in which only what is known ahead is filled in
    unfilled: Values | None = None  # [rows, measured and categorical columns] with NaN where a cell was filled; None: none was
    weights: NDArray[np.float32] | None = None  # [rows] of what a row holds as targets; None: all are 1
    value: str = ""  # the column that holds what is forecast, if each series is a column of the file (`channels`)
    about: dict[str, Any] = field(default_factory=dict)  # how it was read, for programs
    separate: bool = False  # each series is an example by itself, so that whole ones are held out, not their ends

    @property
    def totals(self) -> Ints:
        """The rows of each series, with those ahead of its end."""
        return self.lengths if self.ahead_rows is None else self.lengths + self.ahead_rows

    def fields(self, number: int) -> dict[str, Any]:
        """The columns that name a series, with their values; nothing for one without a name."""
        return dict(zip(self.series, self.labels[number], strict=True)) if self.series else {}

    def ahead(self, number: int, count: int) -> list[str | int | float] | None:
        """Return the times that follow a series; None if unknown."""
        return None if self.times is None else self.times.ahead(int(self.starts[number]), int(self.lengths[number]), count)

    @property
    def frequency(self) -> str | None:
        """The spacing of its times, as written in `data.frequency`."""
        return _frequency(self.times)

    def missing(self, columns: Sequence[int], rows: slice = slice(None)) -> NDArray[np.bool_] | None:
        """Where some columns have no value of their own, [rows, columns]; None if nothing is missing."""
        if self.unfilled is None or self.choice.missing != "none":
            return None
        lacking = np.isnan(self.unfilled[rows][:, list(columns)])
        return lacking if lacking.any() else None


def arrange(frame: pd.DataFrame, name: str, choice: ColumnChoice, *, notes: tuple[str, ...] = ()) -> Table:
    """Convert a frame to series sorted by time; `notes` are remarks about how it was read so far."""
    reading = read(frame, name, choice)
    columns, categorical = _columns(reading, name, choice)
    remarks: list[str] = [*notes, *reading.notes]
    reading = replace(reading, frame=reading.frame.assign(**{column: _whole(reading.frame[column]) for column in reading.series}))
    codes, labels = codes_of(reading)
    names = tuple("/".join("NA" if pd.isna(value) else str(value) for value in label) for label in labels) if reading.series else (name,)
    coded = [_categories(reading.frame[column], name, column) for column in categorical]
    cells = np.column_stack([*(_numbers(reading.frame[column], name, column) for column in columns), *(places for places, _ in coded)])
    order, times, places = _in_time(reading, codes, choice, name, remarks)
    about = _about(reading, columns, cells, times, len(labels))
    rows = _Rows(name, (*columns, *categorical), cells[order], codes[order], order, times, np.zeros(len(order), np.bool_))
    rows = _cut_to_values(_regular(rows, places, names, choice, remarks), choice, len(columns))
    totals, ahead = (np.bincount(which, minlength=len(names)) for which in (rows.codes, rows.codes[rows.ahead]))
    kept = np.flatnonzero(totals)  # the others have no value at all
    if not len(kept):
        raise DataError(f"{name}: column {listed(columns)} has no value in any row; name another in data.columns")
    if len(kept) < len(names):
        remarks.append(f"{name}: {len(names) - len(kept):,} of {len(names):,} series have no values and are left out")
    filled, unfilled = _filled(rows, choice, len(columns), remarks)
    weights = None if choice.weight is None else _weights(rows, reading.frame[choice.weight], choice.weight)
    if weights is not None and choice.each_step:
        filled[np.ix_(weights == 0, rows.places(choice.targets))] = np.nan
    numbers, totals, ahead = len(columns), totals[kept], ahead[kept]
    calendar = _calendar(rows, choice)
    return Table(
        name,
        (*columns, *calendar_columns(choice.calendar)),
        np.concatenate([filled[:, :numbers], calendar], axis=1),
        np.cumsum(totals) - totals,
        totals - ahead,
        tuple(names[place] for place in kept),
        reading.time,
        reading.series,
        tuple(tuple(map(_plain, labels[place])) for place in kept) if reading.series else (),
        rows.times,
        (_note(reading, name, columns, categorical, choice, times), *remarks),
        choice,
        categorical,
        tuple(values for _, values in coded),
        np.where(np.isnan(filled[:, numbers:]), -1, filled[:, numbers:]).astype(np.int64),
        ahead if ahead.any() else None,
        unfilled,
        weights,
        about=about,
    )


@dataclass(frozen=True)
class _Rows:
    """Rows sorted by series and time."""

    name: str
    columns: tuple[str, ...]  # of numbers, then of categories
    cells: Values  # [rows, columns]; NaN where a cell is empty
    codes: Ints  # the series of each row
    source: Ints  # the row of the frame; -1 if there was none
    times: Times | None
    ahead: NDArray[np.bool_]  # which come after the last value of their series, and tell what is known ahead

    def places(self, names: Sequence[str]) -> list[int]:
        """The places of some columns."""
        return [place for place, column in enumerate(self.columns) if column in names]

    def only(self, kept: NDArray[np.bool_]) -> _Rows:
        """Some of the rows."""
        times = None if self.times is None else self.times.sorted(np.flatnonzero(kept))
        return _Rows(self.name, self.columns, self.cells[kept], self.codes[kept], self.source[kept], times, self.ahead[kept])


def _columns(reading: TableReading, name: str, choice: ColumnChoice) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The columns that are read as numbers, and those read as categories, known ones first."""
    for key in ("columns", "targets", "known", "categorical", "static", "weight"):
        wanted = getattr(choice, key) or ()
        told = None if choice.trained and key != "weight" else f"data.{key}"
        require(list(reading.frame.columns), (wanted,) if isinstance(wanted, str) else wanted, name, told)
    roles: dict[str | None, str] = {reading.time: "times", **dict.fromkeys(reading.series, "names of series")}
    if misused := next((column for column in choice.asked if column in roles), None):
        raise DataError(f"{name}: column {misused} holds the {roles[misused]}; remove it from what the other keys name")
    texts = () if choice.trained else tuple(column for column in choice.static if column not in reading.numbers)
    categorical = tuple(sorted(dict.fromkeys((*choice.categorical, *texts)), key=lambda column: column not in choice.known))
    asked = reading.numbers if choice.columns is None else (*choice.columns, *choice.targets, *choice.known, *choice.static)
    columns = tuple(column for column in dict.fromkeys(asked) if column not in categorical and column != choice.weight)
    if not columns:
        others = listed([f"{quoted(column)} ({why})" for column, why in reading.left.items()]) or "no others"
        known = [str(role) for role in roles if role is not None]
        raise DataError(f"{name} has no column of numbers{f' besides {listed(known)}' if known else ''}; there are {others}")
    return columns, categorical


def _numbers(column: pd.Series, name: str, label: str) -> Values:
    """A column as float64, NaN where a cell is empty."""
    try:
        values: Values = pd.to_numeric(column).to_numpy(np.float64, na_value=np.nan)
    except (ValueError, TypeError):
        wrong = column[pd.to_numeric(column, errors="coerce").isna() & column.notna()]
        shown = f"row {int(wrong.index[0]) + 1} is {wrong.iloc[0]!r:.40}" if len(wrong) else f"it holds {column.dtype}"
        remedy = "correct it, leave the column out of data.columns, or add it to data.categorical"
        raise DataError(f"{name}: column {label} has to be one of numbers, but {shown}; {remedy}") from None
    if (bad := unusable(values) & ~np.isnan(values)).any():
        row = int(np.argmax(bad))
        raise DataError(f"{name}: row {row + 1}, column {label} is {values[row]}, not a finite number (below 1e25); correct it")
    return values


def _whole(column: pd.Series) -> pd.Series:
    """A column of whole numbers as such: pandas turns those beside an empty cell into floats."""
    return column.astype("Int64") if pd.api.types.is_float_dtype(column) and (column.dropna() % 1 == 0).all() else column


def _categories(column: pd.Series, name: str, label: str) -> tuple[Values, tuple[str, ...]]:
    """The place of each row's value among the sorted values of a column, NaN where it is empty, and these values."""
    column = _whole(column)
    if pd.api.types.is_float_dtype(column):
        raise DataError(f"{name}: column {label} (data.categorical) contains fractions; remove it from data.categorical")
    if pd.api.types.is_bool_dtype(column):
        column = column.map({True: "true", False: "false"})
    texts = column.astype("str").str.strip().replace("", np.nan).where(column.notna())
    codes, values = pd.factorize(texts, sort=True)
    return np.where(codes < 0, np.nan, codes), tuple(map(str, values))


def _in_time(
    reading: TableReading, codes: Ints, choice: ColumnChoice, name: str, remarks: list[str]
) -> tuple[Ints, Times | None, Ints | None]:
    """The order of rows by series and time, the times in that order, with their frequency, and their places on its grid."""
    if reading.instants is None:
        return np.argsort(codes, kind="stable"), None, None
    times = Times.of(reading.instants)
    order = in_order(times.keys, codes) if reading.order is None or times.wall else reading.order
    times, codes = times.sorted(order), codes[order]
    if choice.frequency == "none":
        return order, times, None
    begins = np.append(np.flatnonzero(np.append(True, np.diff(codes) != 0)), len(codes))
    longest = int(np.argmax(np.diff(begins)))
    keys = times.keys[begins[longest] : begins[longest + 1]]
    frequency = told(choice.frequency, keys) if choice.frequency is not None else infer(keys)[0]
    if frequency is None:
        if len(codes) > 2:
            remarks.append(f"{name}: times in column {reading.time} are irregular: rows are taken in their order, forecasts have no times")
        return order, times, None
    places = frequency.places(times.keys, codes)
    off = places < 0
    if off.any():
        at = int(np.argmax(off))
        first = times.written(slice(at, at + 1))[0]
        fact = f"{int(off.sum()):,} times in column {reading.time}, the first {first}, are not {frequency.text} apart"
        if choice.frequency is not None and not choice.trained:
            raise DataError(f"{name}: {fact} (data.frequency) from others; correct them, or set data.frequency=none to count rows")
        remarks.append(f"{name}: {fact} from others: rows are taken in their order")
    return order, replace(times, frequency=frequency), places


def _regular(rows: _Rows, places: Ints | None, names: Sequence[str], choice: ColumnChoice, remarks: list[str]) -> _Rows:
    """The rows with those that are missing between them."""
    if rows.times is None or places is None or (made := complete(rows.times, rows.codes, places)) is None:
        return rows
    times, codes, source = made
    new = source < 0
    count, first = int(new.sum()), int(np.argmax(new))
    of = f" in series {names[int(codes[first])]}" if len(names) > 1 else ""
    many = "1 missing row" if count == 1 else f"{count:,} missing rows"
    how = f"count{'s' * (count == 1)} as empty{'' if choice.missing in ('none', 'mask') else f' (data.missing={choice.missing})'}"
    at = times.written(slice(first, first + 1))[0]
    remarks.append(f"{rows.name}: {many} (every {_frequency(times)}) {how}, the first at {at}{of}")
    source = np.where(new, -1, rows.source[source])
    cells = np.where(new[:, None], np.nan, rows.cells[made[2]])
    return replace(rows, cells=cells, codes=codes, source=source, times=times, ahead=np.zeros(len(codes), np.bool_))


def _cut_to_values(rows: _Rows, choice: ColumnChoice, numbers: int) -> _Rows:
    """The rows from the first to the last value of what is forecast in each series, and those ahead if anything is known there. Where every
    step is estimated, all rows are kept.
    """
    if choice.each_step:
        return rows
    never = (*choice.known, *choice.static)
    measured = rows.places(choice.targets) or [at for at in range(numbers) if rows.columns[at] not in never]
    empty = np.isnan(rows.cells[:, measured])
    if not empty.any():
        return rows
    valued = np.flatnonzero(~empty.all(axis=1))
    at = np.arange(len(rows.codes))
    firsts, lasts = np.full(len(at), len(at), np.int64), np.full(len(at), -1, np.int64)  # of each series, by its number
    firsts[rows.codes[valued[::-1]]] = valued[::-1]  # what is written last stays
    lasts[rows.codes[valued]] = valued
    rows = replace(rows, ahead=at > lasts[rows.codes])
    kept = (at >= firsts[rows.codes]) & (~rows.ahead | bool(choice.known))
    return rows if kept.all() else rows.only(kept)


def unread_cells(columns: Sequence[str], choice: ColumnChoice, ahead: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return a mask of the cells that are not read: in rows ahead, whatever is not known there."""
    unread: NDArray[np.bool_] = ahead[:, None] & np.array([column not in (*choice.known, *choice.static) for column in columns])
    return unread


def filled_cells(cells: Values, codes: Ints, unread: NDArray[np.bool_], numbers: int, method: str) -> Values:
    """Return the cells with the empty ones filled from those that are read; cells that are not read are NaN.

    The first `numbers` columns are numeric, the others places of categories, of which none stands for nothing: with `zero` it is unknown.
    """
    readable = np.where(unread, np.nan, cells)
    full = readable.copy()
    full[:, :numbers] = fill(readable[:, :numbers], codes, method)
    if method != "zero":
        full[:, numbers:] = fill(readable[:, numbers:], codes, "forward")
    return np.where(unread, np.nan, full)


def _filled(rows: _Rows, choice: ColumnChoice, numbers: int, remarks: list[str]) -> tuple[Values, Values | None]:
    """The cells with nothing missing in what is read, and the same before anything was filled, if anything was."""
    cells = rows.cells.copy()
    if static := rows.places(choice.static):
        cells[:, static], changed = constant(cells[:, static], rows.codes)
        if changed is not None:
            column, row = rows.columns[static[changed[1]]], int(rows.source[changed[0]]) + 1
            fact = f"column {column} (data.static) changes within a series, in row {row}"
            raise DataError(f"{rows.name}: {fact}; write one value for each series, or remove it from data.static")
    unread = unread_cells(rows.columns, choice, rows.ahead)
    # Targets at every step are never filled; with a mask, nothing is that changes.
    changing = [column for column in rows.columns if column not in choice.static] if choice.missing == "mask" else []
    left = rows.places((*choice.targets, *changing)) if choice.each_step else []
    empty = np.isnan(cells) & ~unread
    empty[:, left] = False
    if not empty.any():
        return np.where(unread, np.nan, cells), None
    full = np.where(empty, filled_cells(cells, rows.codes, unread, numbers, choice.missing), np.where(unread, np.nan, cells))
    in_file = (empty & (rows.source >= 0)[:, None]).sum(axis=0)
    if in_file.any():
        counts = listed([f"{column} {count:,}" for column, count in zip(rows.columns, in_file.tolist(), strict=True) if count])
        how = "not trained on, not scored" if choice.missing == "none" and not choice.each_step else f"data.missing={choice.missing}"
        remarks.append(f"{rows.name}: empty cells: {counts} ({how})")
    full[:, :numbers][np.isnan(full[:, :numbers]) & empty[:, :numbers]] = 0.0  # a column that is empty throughout a series tells nothing
    return full, cells


def _weights(rows: _Rows, column: pd.Series, label: str) -> NDArray[np.float32]:
    """The weight of each row; one that was not in the file has that of the row before it."""
    in_file = _numbers(column, rows.name, label)
    source = rows.source[np.maximum.accumulate(np.where(rows.source >= 0, np.arange(len(rows.source)), 0))]
    weights = in_file[source]
    if (wrong := ~(weights >= 0) & ~rows.ahead).any():
        row = int(source[wrong].min())
        shown = "empty" if np.isnan(in_file[row]) else f"{in_file[row]:g}"
        raise DataError(f"{rows.name}: row {row + 1}, column {label} (data.weight) is {shown}; write a number from 0 on, 0 for no target")
    return np.where(rows.ahead, 0.0, weights).astype(np.float32)


def _calendar(rows: _Rows, choice: ColumnChoice) -> Values:
    if not choice.calendar:
        return np.empty((len(rows.codes), 0))
    if rows.times is None or rows.times.counted:
        raise DataError(f"{rows.name}: data.calendar needs a column of dates; name it in data.time, or remove data.calendar")
    return calendar_features(choice.calendar, rows.times.local)


def _note(
    reading: TableReading, name: str, columns: Sequence[str], categorical: Sequence[str], choice: ColumnChoice, times: Times | None
) -> str:
    """A line on what is and is not read."""
    every = "" if _frequency(times) is None else f" (every {_frequency(times)})"
    by = "" if reading.time is None else f", ordered by {quoted(reading.time)}{every}"
    of = "" if not reading.series else f", one series per {' and '.join(map(quoted, reading.series))}"
    measured = [column for column in columns if column not in (*choice.known, *choice.static)]
    all_of_them = ("all of them (data.targets chooses)",) if len(measured) > 1 and not choice.targets else ()
    lists = {
        "estimated at every step" if choice.each_step else "forecast": all_of_them or choice.targets,
        "known ahead": choice.known,
        "categorical": categorical,
        "static": choice.static,
        "calendar": choice.calendar,
        "weights": () if choice.weight is None else (choice.weight,),
        "ignored": [f"{quoted(column)} ({why})" for column, why in reading.left.items() if column not in categorical],
    }
    besides = "".join(f"; {what}: {listed(list(each))}" for what, each in lists.items() if each and list(each) != list(columns))
    return f"{name}: reading {listed(list(map(quoted, columns)))}{by}{of}{besides}"


def _about(reading: TableReading, columns: Sequence[str], cells: Values, times: Times | None, number: int) -> dict[str, Any]:
    """How a table was read, for programs: rows, times, series, values and how many of these are missing."""
    shown: list[str | None] = [None, None]
    if times is not None and not times.counted and len(times.keys):
        zone = "+00:00" if times.zone is not None and not times.wall else ""
        shown = [f"{pd.Timestamp(key)}{zone}" for key in (times.keys.min(), times.keys.max())]
    missing = {column: int(count) for column, count in zip(columns, np.isnan(cells).sum(axis=0), strict=False) if count}
    return {
        "rows": len(cells),
        "time": reading.time,
        "frequency": _frequency(times),
        "series": list(reading.series),
        "number": number,
        "values": list(columns),
        "missing": missing,
        "first": shown[0],
        "last": shown[1],
    }


def _frequency(times: Times | None) -> str | None:
    return None if times is None or times.frequency is None else times.frequency.text


def _plain(value: Any) -> Any:
    """A value of a column as Python has it; None if it is empty."""
    return None if pd.isna(value) else value.item() if hasattr(value, "item") else value
