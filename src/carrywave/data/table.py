"""Tables for forecasting: long format (a row for each series and time) or wide (a row for each time, a column for each series).

A table is read whole, since rows must be sorted by series and time; what is trained from afterwards is memory-mapped.
"""

from __future__ import annotations

import datetime as dt
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pa_parquet
from numpy.typing import NDArray

from carrywave.data.moments import unusable
from carrywave.data.sequences import Ints
from carrywave.data.source import Source
from carrywave.errors import DataError

TIME_NAMES = ("ds", "date", "datetime", "timestamp", "time")
SERIES_NAME = "unique_id"
A_NUMBER = r"^\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*$"


@dataclass(frozen=True)
class Table:
    """Series that lie end to end, each in the order of time."""

    name: str
    columns: tuple[str, ...]
    values: NDArray[np.float64]  # [rows, columns]
    starts: Ints
    lengths: Ints
    names: tuple[str, ...]  # of the series
    time: str | None
    series: str | None
    last_times: tuple[tuple[Any, ...], ...] = ()  # the last three of each series, as far as there are any


@dataclass(frozen=True)
class Choice:
    """Which columns play which part; None leaves it to the table."""

    columns: tuple[str, ...] | None = None
    time: str | None = None
    series: str | None = None


def read_table(source: Source) -> Any:
    """The Arrow table in a CSV or Parquet file."""
    if source.format == "parquet":
        return source.guard(lambda: pa_parquet.read_table(source.path, memory_map=True))
    if source.format != "csv":
        raise DataError(
            f"{source.name} is read as {source.format}, and forecasting reads CSV or Parquet; name the file so, or set data.format"
        )
    if not any(block.strip() for block in source.blocks()):
        raise DataError(f"{source.name} is empty; give a table with a line of column names and rows below it")
    options = pa_csv.ParseOptions(delimiter="\t" if source.tabs else ",")
    with source.open() as stream:
        return source.guard(lambda: pa_csv.read_csv(stream, parse_options=options))


def arrange(table: Any, name: str, choice: Choice) -> Table:
    """An Arrow table as series sorted by time, its numbers checked."""
    if len(set(table.column_names)) != len(table.column_names):
        twice = next(column for column in table.column_names if table.column_names.count(column) > 1)
        raise DataError(f"{name}: the column {twice} is there twice; give every column a name of its own")
    if not table.num_rows:
        raise DataError(f"{name} is empty; give a table with at least one row")
    for wanted, field in ((choice.time, "data.time"), (choice.series, "data.series")):
        require(table, [wanted] if wanted else [], name, field)
    series = choice.series or (SERIES_NAME if SERIES_NAME in table.column_names else None)
    time = choice.time or _find_time(table, series)
    columns = _numeric_columns(table, name, choice.columns, {time, series})
    values = np.empty((table.num_rows, len(columns)), np.float64)
    for place, column in enumerate(columns):
        values[:, place] = _numbers(table[column], name, column)
    codes, names = _series_codes(table, series, name)
    times = None if time is None else _times(table[time], name, time, codes)
    order = np.argsort(codes, kind="stable") if times is None else np.lexsort((times, codes))
    lengths = np.bincount(codes, minlength=len(names)).astype(np.int64)
    if times is not None:
        _refuse_twice(table, order, codes, times, names, name, str(time))
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)[:-1]])
    ends = (
        () if time is None else tuple(_last_times(table[time], order, start, length) for start, length in zip(starts, lengths, strict=True))
    )
    return Table(name, columns, values[order], starts, lengths, names, time, series, ends)


def _last_times(column: Any, order: Ints, start: int, length: int) -> tuple[Any, ...]:
    return tuple(column[int(row)].as_py() for row in order[max(start, start + length - 3) : start + length])


def require(table: Any, wanted: Sequence[str], name: str, field: str) -> None:
    """Refuses a column that is not there, and names the nearest ones."""
    for column in wanted:
        if column not in table.column_names:
            near = difflib.get_close_matches(column, table.column_names, n=3, cutoff=0.4) or table.column_names[:8]
            raise DataError(f"{name} has no column {column!r} ({field}); the nearest are {', '.join(near)}")


def _find_time(table: Any, series: str | None) -> str | None:
    for column in TIME_NAMES:
        if column in table.column_names:
            return column
    return next((column for column in table.column_names if column != series and not _is_numeric(table[column])), None)


def _is_numeric(column: Any) -> bool:
    kind = column.type
    if pa.types.is_null(kind):
        return True  # a column of gaps: refused by row, not passed over
    if _is_text(kind):
        return bool(pc.any(pc.match_substring_regex(column.cast(pa.string()), A_NUMBER)).as_py())
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind) or pa.types.is_boolean(kind))


def _is_text(kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _numeric_columns(table: Any, name: str, chosen: tuple[str, ...] | None, taken: set[str | None]) -> tuple[str, ...]:
    if chosen is not None:
        require(table, chosen, name, "data.columns")
        return chosen
    columns = tuple(column for column in table.column_names if column not in taken and _is_numeric(table[column]))
    if not columns:
        raise DataError(f"{name} has no numeric column besides {', '.join(str(column) for column in taken if column)}; set data.columns")
    return columns


def _numbers(column: Any, name: str, label: str) -> NDArray[np.float64]:
    """A column as float64; anything that is not a finite number is refused with its row."""
    if _is_text(column.type):
        column = column.cast(pa.string())
        wrong = pc.invert(pc.fill_null(pc.match_substring_regex(column, A_NUMBER), False))
        row = int(np.argmax(wrong.to_numpy(zero_copy_only=False) if isinstance(wrong, pa.Array) else wrong.to_numpy()))
        raise _bad_value(name, row, label, column[row].as_py())
    try:
        values: NDArray[np.float64] = (
            _flat(column.cast(pa.uint8()) if pa.types.is_boolean(column.type) else column).cast(pa.float64()).to_numpy(zero_copy_only=False)
        )
    except (pa.ArrowException, ValueError) as error:
        raise DataError(f"{name}: the column {label} holds {column.type}, not numbers; leave it out of data.columns") from error
    bad = unusable(values)
    if bad.any():
        row = int(np.argmax(bad))
        raise _bad_value(name, row, label, column[row].as_py())
    return values


def _bad_value(name: str, row: int, column: str, value: Any) -> DataError:
    shown = "empty or NaN" if value is None else repr(value)
    return DataError(f"{name}: row {row + 1}, column {column} is {shown}, not a finite number (below 1e25); fill the gap or remove the row")


def _flat(column: Any) -> Any:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _series_codes(table: Any, series: str | None, name: str) -> tuple[Ints, tuple[str, ...]]:
    """A number for each row's series, in the order in which they first appear, and their names."""
    if series is None:
        return np.zeros(table.num_rows, np.int64), (name,)
    column = _flat(table[series])
    if column.null_count:
        row = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
        raise DataError(f"{name}: row {row + 1}, column {series} is empty; name the series of every row")
    plain = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
    coded = plain.dictionary_encode()
    return coded.indices.to_numpy(zero_copy_only=False).astype(np.int64), tuple(str(value) for value in coded.dictionary.to_pylist())


def _times(column: Any, name: str, label: str, codes: Ints) -> NDArray[Any]:
    """Numbers that sort as the times do."""
    flat = _flat(column)
    if flat.null_count:
        row = int(np.argmax(flat.is_null().to_numpy(zero_copy_only=False)))
        raise DataError(f"{name}: row {row + 1}, column {label} is empty; give every row its time")
    if _is_text(flat.type):
        return _text_times(flat.cast(pa.string()), name, label, codes)
    if pa.types.is_temporal(flat.type):
        width = 32 if pa.types.is_date32(flat.type) or pa.types.is_time32(flat.type) else 64
        flat = flat.cast(pa.int32() if width == 32 else pa.int64())
    times: NDArray[Any] = flat.to_numpy(zero_copy_only=False)
    if times.dtype.kind not in "iuf":
        raise DataError(f"{name}: the column {label} holds {column.type}, which is no time; set data.time to the column of dates")
    return times


def _text_times(column: Any, name: str, label: str, codes: Ints) -> NDArray[Any]:
    """Times that are neither numbers nor ISO dates are taken only if the rows are in order already: text cannot be sorted as time."""
    ranks: NDArray[Any] = pc.rank(column, tiebreaker="dense").to_numpy(zero_copy_only=False).astype(np.int64)
    order = np.argsort(codes, kind="stable")
    falls = (np.diff(ranks[order]) < 0) & (np.diff(codes[order]) == 0)
    if falls.any():
        row = _first_odd(column) or int(order[int(np.argmax(falls)) + 1])
        remedy = "write 2024-01-31 23:00:00, or set data.time"
        raise DataError(f"{name}: row {row + 1}, column {label} is {column[row].as_py()!r}, which cannot be put in order; {remedy}")
    return ranks


def _first_odd(column: Any) -> int | None:
    """The first row whose text is no ISO date, where others are."""
    odd = [not _is_date(value) for value in column.to_pylist()]
    return odd.index(True) if True in odd and not all(odd) else None


def _is_date(text: str) -> bool:
    try:
        dt.datetime.fromisoformat(text)
    except ValueError:
        return False
    return True


def _refuse_twice(table: Any, order: Ints, codes: Ints, times: NDArray[Any], names: tuple[str, ...], name: str, label: str) -> None:
    same = (np.diff(times[order]) == 0) & (np.diff(codes[order]) == 0)
    if same.any():
        row = int(order[int(np.argmax(same)) + 1])
        of = f" of series {names[int(codes[row])]}" if len(names) > 1 else ""
        raise DataError(
            f"{name}: row {row + 1}, column {label} is {table[label][row].as_py()} for the second time{of}; keep one row for each time"
        )
