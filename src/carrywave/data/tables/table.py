"""Tables for forecasting, in long format (one row per series and time) or wide format (one row per time, one column per series).

A table is read as a whole, because rows must be sorted by series and time; training then reads memory-mapped arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pa_parquet
from numpy.typing import NDArray

from carrywave.data.files import dialect
from carrywave.data.files.quotes import check_quotes
from carrywave.data.files.rows import A_NUMBER
from carrywave.data.files.source import Source
from carrywave.data.sequences import Ints
from carrywave.data.tables.calendar import calendar_columns, calendar_features
from carrywave.data.tables.columns import SERIES_NAME, TIME_NAMES, ColumnChoice, Roles, roles_of, second_rows
from carrywave.data.tables.completing import SortedRows, completed
from carrywave.data.tables.covariates import categories_of
from carrywave.data.tables.dates import WRITE, is_dates, is_text, problem, texts_of
from carrywave.data.tables.frequency import Keys
from carrywave.data.tables.moments import TOO_WHOLE, WHOLE, too_whole, unusable
from carrywave.data.tables.times import TimeColumn, Times, read_times, with_frequency
from carrywave.errors import DataError

MANY_DIGITS = r"^\s*[-+]?\d{16,}\s*$"  # whole numbers that may be beyond 2**53, which has sixteen digits
SMALL_HOURS = np.timedelta64(4, "h")  # from midnight on: clocks are set back within them


@dataclass(frozen=True)
class Table:
    """Series stored end to end, each in chronological order."""

    name: str
    columns: tuple[str, ...]
    values: NDArray[np.float64]  # [rows, columns]
    starts: Ints
    lengths: Ints
    names: tuple[str, ...]  # of the series
    time: str | None
    series: str | None
    times: Times | None = None
    notes: tuple[str, ...] = ()  # remarks for the user about how the table was read
    whole_numbers: bool = False  # series names are integers in the file
    choice: ColumnChoice = field(default_factory=ColumnChoice)  # what was asked for
    categorical: tuple[str, ...] = ()  # columns of categories
    categories: tuple[tuple[str, ...], ...] = ()  # the values of each
    codes: Ints | None = None  # [rows, categorical columns] the places of values among them; -1 for none
    ahead_rows: Ints | None = None  # rows after the end of each series, in which only what is known ahead is filled in
    unfilled: NDArray[np.float64] | None = None  # [rows, measured and categorical columns] with NaN where a cell was filled; None: none was
    weights: NDArray[np.float32] | None = None  # [rows] of what a row holds as targets; None: all are 1
    value: str = ""  # the column that holds what is forecast, if each series is a column of the file (`channels`)

    @property
    def totals(self) -> Ints:
        """The rows of each series, with those ahead of its end."""
        return self.lengths if self.ahead_rows is None else self.lengths + self.ahead_rows

    def series_name(self, number: int) -> str | int:
        """Return the name of a series in the type it has in the file."""
        return int(self.names[number]) if self.whole_numbers else self.names[number]

    def ahead(self, number: int, count: int) -> list[str | int | float] | None:
        """Return the times that follow a series; None if unknown."""
        return None if self.times is None else self.times.ahead(int(self.starts[number]), int(self.lengths[number]), count)

    def check_ahead(self, count: int) -> None:
        """Raise an error if the times `count` steps ahead cannot be written; tested on the series that ends last."""
        if self.times is not None:
            self.ahead(int(np.argmax(self.times.keys[self.starts + self.lengths - 1])), count)

    @property
    def frequency(self) -> str | None:
        """The spacing of its times, as written in `data.frequency`."""
        return None if self.times is None or self.times.frequency is None else self.times.frequency.text


def read_table(source: Source, series: str | None = None, *, time: str | None = None, decimal: str = "auto") -> tuple[Any, tuple[str, ...]]:
    """Read the Arrow table in a CSV or Parquet file, and lines on what was found in it. In CSV, series names stay text: 007 is not 7."""
    if source.format == "parquet":
        return source.guard(lambda: pa_parquet.read_table(source.path, memory_map=True)), ()
    if source.format != "csv":
        raise DataError(
            f"{source.name} is read as {source.format}, but forecasting needs CSV or Parquet; "
            "rename the file to match its format, or set data.format"
        )
    if not any(block.strip() for block in source.blocks()):
        raise DataError(f"{source.name} is empty; use a table with a header line and at least one row")
    source.check_utf8()
    delimiter = source.separator()
    convert = pa_csv.ConvertOptions(column_types={series or SERIES_NAME: pa.string()}, decimal_point="," if decimal == "," else ".")
    options = pa_csv.ParseOptions(delimiter=delimiter, newlines_in_values=check_quotes(source, delimiter))
    with source.open() as stream:
        table = source.guard(lambda: pa_csv.read_csv(stream, parse_options=options, convert_options=convert))
    table = _as_written(table, source, options)
    times = [column for column in table.column_names if column.strip().lower() in TIME_NAMES]
    table, notes = dialect.with_points(table, decimal, source.name, {series or SERIES_NAME, time or "", *times})
    return table, (*source.notes(), *notes)


def _as_written(table: Any, source: Source, options: Any) -> Any:
    """Return a CSV table with text for what Arrow no longer tells: offsets of times from UTC, and digits of whole numbers beyond 2**53."""
    zoned = [field.name for field in table.schema if pa.types.is_timestamp(field.type) and field.type.tz is not None]
    large = [field.name for field in table.schema if pa.types.is_floating(field.type) and _largest(table[field.name]) >= WHOLE]
    if not (zoned or large) or len(set(table.column_names)) < len(table.column_names):
        return table
    types = dict.fromkeys((*zoned, *large), pa.string())
    kept = pa_csv.ConvertOptions(include_columns=[*zoned, *large], column_types=types, strings_can_be_null=True)
    with source.open() as stream:
        written = source.guard(lambda: pa_csv.read_csv(stream, parse_options=options, convert_options=kept))
    for column in zoned:
        texts = pc.replace_substring_regex(written[column], r"(\.\d{6})0+", r"\1")
        if texts.null_count or is_dates(texts):  # not so if they are finer than a microsecond
            table = table.set_column(table.column_names.index(column), column, texts)
    for column in large:
        if pc.any(pc.match_substring_regex(written[column], MANY_DIGITS)).as_py():
            table = table.set_column(table.column_names.index(column), column, written[column])
    return table


def _largest(column: Any) -> float:
    """The largest magnitude of a column, 0 if it is empty."""
    return float(pc.max(pc.abs(column)).as_py() or 0.0)


def arrange(table: Any, name: str, choice: ColumnChoice, *, index: str | None = None, read_notes: tuple[str, ...] = ()) -> Table:
    """Convert an Arrow table to series sorted by time, and validate its numbers; `index` is the column that was a frame's index.

    `read_notes` are remarks about how it was read so far.
    """
    if len(set(table.column_names)) != len(table.column_names):
        twice = next(column for column in table.column_names if table.column_names.count(column) > 1)
        raise DataError(f"{name}: duplicate column {twice}; give every column a unique name")
    if not table.num_rows:
        raise DataError(f"{name} is empty; use a table with at least one row")
    roles = roles_of(table, name, choice, index)
    values = np.empty((table.num_rows, len(roles.columns)), np.float64)
    for place, column in enumerate(roles.columns):
        values[:, place] = _numbers(table[column], name, column)
    codes, names, whole = _series_codes(table, roles.series, name)
    if choice.trained and choice.series is None and len(names) > 1:
        raise DataError(
            f"{name}: column {roles.series} names {len(names)} series, but the run was trained on a single series without such a column; "
            "pass one series, or train with the column"
        )
    order, times, notes = _in_time(table, roles, name, choice, codes, names)
    coded = [categories_of(table[column], name, column) for column in roles.categorical]
    rows = SortedRows(
        name,
        roles,
        choice,
        names,
        np.concatenate([values, *(places[:, None] for places, _ in coded)], axis=1)[order],
        codes[order],
        order,
        times,
    )
    rows, filled = completed(rows, table)
    all_notes = (roles.note(name, as_it_stands=times is not None and times.in_words), *read_notes, *notes, *filled)
    totals = np.bincount(rows.codes, minlength=len(names)).astype(np.int64)
    ahead = np.bincount(rows.codes, weights=rows.ahead, minlength=len(names)).astype(np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(totals)[:-1]])
    numbers = len(roles.columns)
    weights = None if choice.weight is None else _weights(rows, table[choice.weight], name, choice.weight)
    if weights is not None and choice.each_step:
        rows = replace(rows, cells=_without(rows, choice.targets, weights == 0))
    return Table(
        name,
        (*roles.columns, *calendar_columns(choice.calendar)),
        np.concatenate([rows.cells[:, :numbers], _calendar(rows, table)], axis=1) if choice.calendar else rows.cells[:, :numbers],
        starts,
        totals - ahead,
        names,
        roles.time,
        roles.series,
        rows.times,
        all_notes,
        whole,
        choice,
        roles.categorical,
        tuple(labels for _, labels in coded),
        np.where(np.isnan(rows.cells[:, numbers:]), -1, rows.cells[:, numbers:]).astype(np.int64) if coded else None,
        ahead if ahead.any() else None,
        rows.unfilled,
        weights,
    )


def _without(rows: SortedRows, targets: tuple[str, ...], none: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The cells without some of the targets at every step: one of weight 0 is missing, whatever is written there."""
    chosen = np.isin(np.arange(rows.cells.shape[1]), rows.places(targets))
    return np.where(none[:, None] & chosen, np.nan, rows.cells)


def _weights(rows: SortedRows, column: Any, name: str, label: str) -> NDArray[np.float32]:
    """The weight of each row; one that was not in the file has that of the row before it."""
    in_file = _numbers(column, name, label)
    at = np.maximum.accumulate(np.where(rows.rows >= 0, np.arange(len(rows.rows)), 0))
    weights = in_file[rows.rows[at]]
    wrong = ~(weights >= 0) & ~rows.ahead
    if wrong.any():
        row = int(rows.rows[at][wrong].min())
        shown = "empty" if np.isnan(in_file[row]) else f"{in_file[row]:g}"
        raise DataError(f"{name}: row {row + 1}, column {label} (data.weight) is {shown}; write a number from 0 on, 0 for no target")
    return np.where(rows.ahead, 0.0, weights).astype(np.float32)


def _calendar(rows: SortedRows, table: Any) -> NDArray[np.float64]:
    names, label, times = rows.choice.calendar, rows.roles.time, rows.times
    if clashing := [column for column in calendar_columns(names) if column in table.column_names]:
        raise DataError(f"{rows.name} has a column {clashing[0]}, which data.calendar adds; rename it, or remove data.calendar")
    if label is None or times is None or times.shape in ("number", "other"):
        what = "there is no column of times" if label is None else f"column {label} contains {table[label][0].as_py()!r:.40}"
        raise DataError(f"{rows.name}: data.calendar needs dates, but {what}; {WRITE}, or remove data.calendar")
    return calendar_features(names, times.local)


def _in_time(
    table: Any, roles: Roles, name: str, choice: ColumnChoice, codes: Ints, names: tuple[str, ...]
) -> tuple[Ints, Times | None, tuple[str, ...]]:
    """Return the row order by series and time, the times in that order, and remarks about them."""
    by_series: Ints = np.argsort(codes, kind="stable")
    if roles.time is None:
        return by_series, None, ()
    column = table[roles.time]
    if choice.frequency != "none":
        _refuse_calendar_numbers(column, name, roles.time)
    times = read_times(column, name, roles.time, choice.date_order)
    written = times.zone
    times = times.on_clocks_of("UTC" if choice.utc else choice.zone if times.of_several_offsets else None)
    if times.in_words:
        _refuse_unknown_dates(column, times, name, roles.time, by_series, codes, choice)
    order: Ints = np.lexsort((times.keys, codes))
    _refuse_twice(table, order, codes, times, names, name, roles)
    order = by_series if times.in_words else order
    remedy = (
        f"space rows as in the training data ({choice.frequency})"
        if choice.trained
        else "space rows evenly, set data.frequency, or set data.frequency=none to count rows and ignore times"
    )
    if times.of_several_offsets:
        remedy = f"write local times without offsets from UTC, or {remedy}"
    place = TimeColumn(name, roles.time, column, order, names, codes[order], remedy)
    times, gaps = with_frequency(
        times.sorted(order), codes[order], choice.frequency, strict=choice.strict, place=place, days=choice.month_days
    )
    remarks = [] if gaps is None or choice.missing != "error" else [gaps]
    if times.order is not None:
        remarks.insert(0, f"{name}: column {roles.time} contains {column[0].as_py()!r:.40}, read with the {times.order} first")
    remarks += [f"{name}: {remark}" for remark in times.clock_remarks(roles.time, written, choice.utc, choice.zone)]
    if times.in_words:
        fact = f"column {roles.time} contains {column[0].as_py()!r:.40}, which is not a recognised date"
        remarks.append(f"{name}: {fact}: rows are kept in file order, and forecasts have no times; {WRITE}")
    elif times.untold is not None and choice.frequency != "none":
        remarks.append(f"{name}: column {roles.time} contains {times.untold}, so forecasts have no times; {WRITE}")
    return order, times, tuple(remarks)


def _numbers(column: Any, name: str, label: str) -> NDArray[np.float64]:
    """Convert a column to float64, NaN where a cell is empty; reject anything but finite numbers, and report the row."""
    if is_text(column.type):
        column = _flat(column.cast(pa.string()))
        column = pc.if_else(pc.equal(pc.utf8_trim_whitespace(column), ""), None, column)
        wrong = pc.invert(pc.fill_null(pc.match_substring_regex(column, A_NUMBER), True))
        if pc.any(wrong).as_py():
            row = int(np.argmax(wrong.to_numpy(zero_copy_only=False)))
            raise _bad_value(name, row, label, column[row].as_py())
        column = pc.utf8_ltrim(pc.utf8_trim_whitespace(column), "+")  # Arrow does not parse a plus sign
        many = np.flatnonzero(pc.fill_null(pc.match_substring_regex(column, MANY_DIGITS), False).to_numpy(zero_copy_only=False))
        large = [int(row) for row in many if abs(int(column[int(row)].as_py()[:40])) > WHOLE]
        if large:
            raise _too_whole(name, large[0], label, column[large[0]].as_py())
    if pa.types.is_integer(column.type):
        beyond = too_whole(_flat(column).drop_null().to_numpy(zero_copy_only=False))
        if beyond is not None:
            row = int(pc.index(_flat(column), pa.scalar(beyond, column.type)).as_py())
            raise _too_whole(name, row, label, beyond)
    try:
        values: NDArray[np.float64] = (
            _flat(column.cast(pa.uint8()) if pa.types.is_boolean(column.type) else column).cast(pa.float64()).to_numpy(zero_copy_only=False)
        )
    except (pa.ArrowException, ValueError) as error:
        raise DataError(f"{name}: column {label} contains {column.type}, not numbers; remove it from data.columns") from error
    bad = unusable(values) & ~np.isnan(values)
    if bad.any():
        row = int(np.argmax(bad))
        raise _bad_value(name, row, label, column[row].as_py())
    return values


def _bad_value(name: str, row: int, column: str, value: Any) -> DataError:
    if isinstance(value, str):
        remedy = "correct it, or exclude the column with data.columns"
        return DataError(f"{name}: row {row + 1}, column {column} is {value!r:.40}, which is text, not a finite number; {remedy}")
    return DataError(f"{name}: row {row + 1}, column {column} is {value!r}, not a finite number (below 1e25); correct it or remove the row")


def _too_whole(name: str, row: int, column: str, value: Any) -> DataError:
    fact = f"row {row + 1}, column {column} is {value!s:.40}, {TOO_WHOLE}"
    return DataError(f"{name}: {fact}, or exclude the column with data.columns")


def _flat(column: Any) -> Any:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _series_codes(table: Any, series: str | None, name: str) -> tuple[Ints, tuple[str, ...], bool]:
    """Return each row's series code, in order of first appearance; the series names; and whether those are integers."""
    if series is None:
        return np.zeros(table.num_rows, np.int64), (name,), False
    column = _flat(table[series])
    plain = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
    plain = plain.cast(pa.string()) if is_text(plain.type) else plain
    missing = pc.or_(plain.is_null(), pc.fill_null(pc.equal(plain, ""), False)) if is_text(plain.type) else plain.is_null()
    if pc.any(missing).as_py():
        row = int(np.argmax(missing.to_numpy(zero_copy_only=False)))
        raise DataError(f"{name}: row {row + 1}, column {series} is empty; name the series of every row")
    if pa.types.is_floating(plain.type) and pc.all(pc.equal(plain, pc.floor(plain))).as_py():
        plain = plain.cast(pa.int64())  # pandas often turns integers into floats: 7.0 is the series 7
    coded = plain.dictionary_encode()
    names = tuple(str(value) for value in coded.dictionary.to_pylist())
    return coded.indices.to_numpy(zero_copy_only=False).astype(np.int64), names, bool(pa.types.is_integer(plain.type))


def _refuse_calendar_numbers(column: Any, name: str, label: str) -> None:
    """Reject months and days written as integers, such as 202312: counting on from them gives 202313."""
    if not pa.types.is_integer(column.type) or column.null_count or len(column) < 3:
        return
    numbers = column.to_numpy().astype(np.int64)
    for example, kind, divisor in (("2023-12", "months", 100), ("2023-12-31", "days", 10_000)):
        years = numbers // divisor
        months, days = (numbers % 100, np.ones_like(numbers)) if divisor == 100 else (numbers // 100 % 100, numbers % 100)
        if years.min() >= 1900 and years.max() < 2200 and ((months >= 1) & (months <= 12) & (days >= 1) & (days <= 31)).all():
            raise DataError(
                f"{name}: column {label} contains {numbers[0]}, {numbers[1]} …, which look like {kind} written as numbers; "
                f"write {example}, or set data.frequency=none to count rows"
            )


def _refuse_unknown_dates(column: Any, times: Times, name: str, label: str, by_series: Ints, codes: Ints, choice: ColumnChoice) -> None:
    """Reject text meant as dates that cannot be parsed, and other text unless rows are already in its order: it does not sort by time.

    If rows are counted regardless of their times, only a malformed date among valid ones is rejected.
    """
    counted = choice.frequency == "none"
    wrong = problem(texts_of(column), label, counted=counted, order=choice.date_order)
    if wrong is not None:
        raise DataError(f"{name}: {wrong}")
    falls = (np.diff(times.keys[by_series]) < 0) & (np.diff(codes[by_series]) == 0)
    if falls.any() and not counted:
        row = int(by_series[int(np.argmax(falls)) + 1])
        remedy = f"{WRITE}, or set data.frequency=none to keep rows in file order"
        raise DataError(f"{name}: row {row + 1}, column {label} is {column[row].as_py()!r:.40}, which cannot be ordered in time; {remedy}")


def _refuse_twice(table: Any, order: Ints, codes: Ints, times: Times, names: tuple[str, ...], name: str, roles: Roles) -> None:
    """Reject a time that occurs twice in a series, and suggest a column that may name the series."""
    same = (np.diff(times.keys[order]).astype(np.int64 if times.keys.dtype.kind == "M" else times.keys.dtype) == 0) & (
        np.diff(codes[order]) == 0
    )
    if not same.any():
        return
    row = int(order[int(np.argmax(same)) + 1])
    of = f" in series {names[int(codes[row])]}" if len(names) > 1 else ""
    shown = table[roles.time][row].as_py()
    remedy = second_rows(table, times.keys, roles) or "keep one row per time"
    if remedy.startswith("keep") and _set_back(times, times.keys[order][1:][same]):
        remedy = f"if clocks were set back then, write times in UTC or with their offset ({shown}+01:00); if not, keep one row per time"
    raise DataError(f"{name}: row {row + 1}, column {roles.time} repeats {shown}{of}; {remedy}")


def _set_back(times: Times, repeated: Keys) -> bool:
    """True if repeated times may be those of clocks that are set back: local times of day in the small hours, one day a year."""
    if times.shape != "datetime" or times.zone is not None:
        return False
    clock = times.keys - times.keys.astype("datetime64[D]")
    if (clock == clock[0]).all():
        return False  # dates, all at midnight or the like
    days = repeated.astype("datetime64[D]")
    return bool((repeated - days < SMALL_HOURS).all()) and len(np.unique(days)) <= len(np.unique(days.astype("datetime64[Y]")))
