"""Determine the role of each column of a table: time, series name or values; and explain why other columns are not read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from carrywave.data.codec import Codec
from carrywave.data.files.rows import A_NUMBER, NO_WEIGHT, missing_column, quoted
from carrywave.data.sequences import Ints
from carrywave.data.tables.dates import is_dates, is_text, like_dates, share_of_dates, texts_of
from carrywave.errors import DataError
from carrywave.spec.data_spec import DataSpec

TIME_NAMES = ("ds", "date", "datetime", "timestamp", "time")
SERIES_NAME = "unique_id"
MOSTLY = 0.9  # a column whose name says nothing holds times if at least this fraction are dates; the rest are errors
SHOWN = 8  # at most this many names in a message
A_CLOCK = r"^\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?( ?[AaPp]\.?[Mm]\.?)?$"
HOURS = ("hour", "hr", "hours")  # names of columns of hours next to a column of days
DENSE = 0.25  # an integer column may name series only if its values occur at this fraction of times on average: measurements seldom repeat


COVARIATES = ("known", "calendar", "categorical", "static")


@dataclass(frozen=True)
class ColumnChoice:
    """The requested role of columns and spacing of times; None leaves the choice to the table."""

    columns: tuple[str, ...] | None = None
    time: str | None = None
    series: str | None = None
    frequency: str | None = None
    date_order: str | None = None  # of dates with the year last that do not show it themselves
    utc: bool = False  # times with an offset or a zone are read in UTC, as those of the training data
    zone: str | None = None  # of the calendar in the training data, if it was one
    month_days: tuple[int, ...] | None = None  # of the series in the training data; None if this is it
    strict: bool = True  # reject irregular times; otherwise accept them, and forecasts have no times
    trained: bool = False  # read as the training data was read
    known: tuple[str, ...] = ()  # known for the whole horizon
    calendar: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    static: tuple[str, ...] = ()
    missing: str = "error"  # how empty cells and missing rows are filled
    targets: tuple[str, ...] = ()  # to forecast; empty: all that are measured
    weight: str | None = None  # the weight of each row's values as targets
    each_step: bool = False  # targets are estimated at every step from the other columns, and may be empty

    @staticmethod
    def of(data: DataSpec, codec: Codec | None, *, labelled: bool = True) -> ColumnChoice:
        """Take the choice from the spec or, given a codec, from the training data; if not `labelled`, without weights and without targets
        that are estimated at every step.
        """
        weight = data.weight if labelled and data.weight != NO_WEIGHT else None
        if codec is None:
            settings: dict[str, Any] = {name: getattr(data, name) or () for name in COVARIATES}
            settings["targets"] = data.targets or ()
            settings["each_step"] = data.each_step
            columns = data.columns if data.columns is None or not data.each_step else (*data.columns, *settings["targets"])
            return ColumnChoice(columns, data.time, data.series, data.frequency_text, missing=data.missing, weight=weight, **settings)
        learned: dict[str, Any] = {name: getattr(codec, name) for name in COVARIATES}
        learned["targets"] = (codec.step_targets if labelled else ()) if codec.step_targets else codec.forecast_columns
        learned["each_step"] = bool(codec.step_targets)
        strict = codec.frequency is not None
        learned["date_order"] = codec.date_order
        learned["utc"], learned["zone"] = codec.utc, codec.zone
        learned["month_days"] = codec.month_days
        learned["weight"] = weight if labelled or not codec.step_targets else None
        columns = (*codec.read_columns, *learned["targets"]) if codec.step_targets else codec.read_columns
        return ColumnChoice(
            columns, codec.time, codec.series, codec.frequency, strict=strict, trained=True, missing=data.missing, **learned
        )

    @property
    def named(self) -> bool:
        """True if it asks for covariates, which only a table with named columns has."""
        return any(getattr(self, name) for name in COVARIATES)

    def check_unnamed(self, name: str, *keys: str) -> None:
        """Refuse keys about columns where a list of numbers has none."""
        for key in keys:
            value = None if self.trained else getattr(self, key)
            if value is not None and (key, value) != ("frequency", "none"):
                fact = f"{name} is a list of numbers without times and names, but data.{key} is {value}"
                raise DataError(f"{fact}; use a CSV or Parquet file, or a frame, or remove it")

    def check_weight(self, name: str, time: str | None, series: str | None) -> None:
        """Refuse weights in a column that has another role."""
        roles = {time: "holds the times", series: "names the series"} | {
            column: f"is in data.{field} as well" for field in ("columns", "targets", *COVARIATES) for column in getattr(self, field) or ()
        }
        if self.weight is not None and self.weight in roles:
            raise DataError(f"{name}: column {self.weight} (data.weight) {roles[self.weight]}; name another, or remove data.weight")


@dataclass(frozen=True)
class Roles:
    """The role of each column of a table."""

    columns: tuple[str, ...]  # read as numbers
    time: str | None
    series: str | None
    left: tuple[tuple[str, str], ...]  # (name, reason) of each column that is not read
    categorical: tuple[str, ...] = ()  # read as categories, those known for the whole horizon first
    covariates: tuple[str, ...] = ()  # what is read besides, for the line about it

    def note(self, name: str, *, as_it_stands: bool) -> str:
        """Return a line on what is and is not read; `as_it_stands`: the times do not determine the order of rows."""
        by = "" if self.time is None else ", in file order" if as_it_stands else f", ordered by {quoted(self.time)}"
        of = "" if self.series is None else f", one series per {quoted(self.series)}"
        left = "" if not self.left else f"; ignored: {_listed([f'{quoted(column)} ({why})' for column, why in self.left])}"
        besides = "".join(f"; {line}" for line in self.covariates)
        return f"{name}: reading {_listed([quoted(column) for column in self.columns])}{by}{of}{besides}{left}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def roles_of(table: Any, name: str, choice: ColumnChoice, index: str | None) -> Roles:
    """Assign roles to columns; `index` is the column that was a frame's index."""
    for wanted, field in ((choice.time, "data.time"), (choice.series, "data.series")):
        require(table, [] if wanted is None else [wanted], name, None if choice.trained else field)
    names = table.column_names
    series = choice.series if choice.series is not None else SERIES_NAME if SERIES_NAME in names else None
    counter = _counter(table, {choice.time, series})
    time = choice.time if choice.time is not None else _find_time(table, series, index, counter)
    if choice.columns is not None:
        require(table, choice.columns, name, None if choice.trained else "data.columns")
    for field in ("known", "categorical", "static"):
        require(table, getattr(choice, field), name, None if choice.trained else f"data.{field}")
        if misused := [column for column in getattr(choice, field) if column in (time, series)]:
            what = "times" if misused[0] == time else "names of the series"
            raise DataError(f"{name}: column {misused[0]} (data.{field}) holds the {what}; remove it from data.{field}")
    require(table, [] if choice.weight is None else [choice.weight], name, "data.weight")
    if not choice.trained:
        choice.check_weight(name, time, series)
    if choice.each_step:
        require(table, choice.targets, name, None if choice.trained else "data.targets")
    categorical = _categorical(table, choice)
    if choice.columns is not None:
        both = (*choice.columns, *choice.known, *choice.static)
        choice = replace(choice, columns=tuple(dict.fromkeys(column for column in both if column not in categorical)))
    left: dict[str, str] = {}
    read: list[str] = []
    for column in names:
        if (
            column == choice.weight
            or column in categorical
            or (column in (time, series) and (choice.columns is None or column not in choice.columns))
        ):
            continue
        why = "not in data.columns" if choice.columns is not None else _why_not(table[column], column in (index, counter))
        if why is None:
            read.append(column)
        elif choice.columns is None or column not in choice.columns:
            left[column] = why
    if choice.columns is None and not read:
        besides = ", ".join(quoted(column) for column in (time, series) if column is not None)
        others = "" if not left else f" ({_listed([f'{quoted(column)}: {why}' for column, why in left.items()])})"
        raise DataError(
            f"{name} has no numeric column{f' besides {besides}' if besides else ''}{others}; add a numeric column, or set data.columns"
        )
    columns = choice.columns or tuple(read)
    for column in (*choice.known, *choice.static):
        if column not in columns and column not in categorical:
            field = "known" if column in choice.known else "static"
            fact = f"column {column} (data.{field}) contains {_why_not(table[column], False) or 'no numbers'}, not numbers"
            raise DataError(f"{name}: {fact}; add it to data.categorical, or remove it from data.{field}")
    for column in choice.targets if choice.each_step else ():
        if column not in columns:
            fact = f"column {column} (data.targets) contains {_why_not(table[column], False) or 'no numbers'}, not numbers"
            raise DataError(f"{name}: {fact}; correct it, or name another column")
    measured = [column for column in columns if column not in (*choice.known, *choice.static)]
    all_of_them = len(measured) > 1 and not choice.targets
    forecast = ("all of them (data.targets chooses)",) if all_of_them else choice.targets if list(choice.targets) != list(columns) else ()
    lists = {
        "estimated at every step" if choice.each_step else "forecast": forecast,
        "known ahead": choice.known,
        "categorical": categorical,
        "static": choice.static,
        "calendar": choice.calendar,
        "weights": () if choice.weight is None else (choice.weight,),
    }
    remarks = tuple(f"{what}: {_listed(listed)}" for what, listed in lists.items() if listed)
    return Roles(columns, time, series, tuple(left.items()), categorical, remarks)


def _categorical(table: Any, choice: ColumnChoice) -> tuple[str, ...]:
    """Return the columns read as categories, those known for the whole horizon first: the ones asked for, and static ones of text."""
    if choice.trained:
        return choice.categorical
    texts = [column for column in choice.static if _may_name(table[column]) and not _is_numeric(table[column])]
    columns = dict.fromkeys((*choice.categorical, *texts))
    return tuple(sorted(columns, key=lambda column: column not in choice.known))


def require(table: Any, wanted: Sequence[str], name: str, field: str | None) -> None:
    """Reject a missing column; `field` is the key that names it, None if the training data had it."""
    for column in wanted:
        if column not in table.column_names:
            raise DataError(missing_column(name, column, table.column_names, field))


def _counter(table: Any, others: set[str | None]) -> str | None:
    """Return an unnamed first column of distinct integers: a row index that was written along with the table."""
    first = table.column_names[0]
    unnamed = not first.strip() or first.startswith("Unnamed: ")
    if not unnamed or first in others or len(table.column_names) < 2 or not pa.types.is_integer(table[first].type):
        return None
    return first if not table[first].null_count and pc.count_distinct(table[first]).as_py() == table.num_rows else None


def _find_time(table: Any, series: str | None, index: str | None, counter: str | None) -> str | None:
    """Try, in order: known names; dates, typed before text, but the frame's index first; a unique index; unique text that may be times."""
    columns: list[str] = [column for column in table.column_names if column not in (series, counter)]
    lower = {column.strip().lower(): column for column in reversed(columns)}
    named = next((lower[name] for name in TIME_NAMES if name in lower), None)
    if named is not None:
        return named
    typed = [column for column in columns if pa.types.is_timestamp(table[column].type) or pa.types.is_date(table[column].type)]
    texts = [column for column in columns if is_text(table[column].type) and not table[column].null_count]
    dates = typed + [column for column in texts if is_dates(table[column])]
    if dates:
        return index if index in dates else dates[0]
    if index is not None and (_is_numeric(table[index]) or pa.types.is_duration(table[index].type)) and _once(table, index, series):
        return index
    return next((column for column in texts if not _is_numeric(table[column]) and _in_words(table, column, series)), None)


def _in_words(table: Any, column: str, series: str | None) -> bool:
    """True for unique text that may be times: dates that cannot be parsed or, in a single series, sorted values such as Q1, Q2."""
    texts = table[column].cast(pa.string())
    if not _once(table, column, series):
        return False
    trimmed = texts_of(texts)
    if pc.all(like_dates(trimmed)).as_py() or share_of_dates(trimmed) >= MOSTLY:
        return True
    return series is None and texts.to_pylist() == sorted(texts.to_pylist())


def _once(table: Any, column: str, series: str | None) -> bool:
    """True if no value occurs twice within a series."""
    keys = [column] if series is None else [column, series]
    return int(table.select(keys).group_by(keys).aggregate([]).num_rows) == int(table.num_rows)


def _why_not(column: Any, is_index: bool) -> str | None:
    """Return why a column is not read as numbers; None if it is."""
    if is_index:
        return "a row index"
    if _is_numeric(column):
        return None
    kind = column.type
    if pa.types.is_dictionary(kind):
        return "categorical"
    if is_text(kind):
        share = _share_of_numbers(column)
        return "text" if not share else f"text, {share:.0%} of it numeric"
    return "times" if pa.types.is_temporal(kind) else str(kind)[:40]


def _is_numeric(column: Any) -> bool:
    kind = column.type
    if pa.types.is_null(kind):
        return True  # all missing: rejected by row later rather than skipped
    if pa.types.is_dictionary(kind):
        return False
    if is_text(kind):
        return _share_of_numbers(column) >= 0.5  # the rest are errors, rejected by row later
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind) or pa.types.is_boolean(kind))


def _share_of_numbers(column: Any) -> float:
    """Return the fraction of non-empty text cells that hold numbers."""
    texts = pc.drop_null(column.cast(pa.string()))
    filled = texts.filter(pc.not_equal(pc.utf8_trim_whitespace(texts), ""))
    return float(pc.mean(pc.match_substring_regex(filled, A_NUMBER).cast(pa.float64())).as_py() or 0.0)


def second_rows(table: Any, times: Any, roles: Roles) -> str | None:
    """Suggest a fix for repeated times: join a time-of-day column to the days, or name the series by one column, or two.

    `times` are in file order. A suggested naming leaves no time twice within a series.
    """
    others = [column for column in table.column_names if column not in (roles.time, roles.series)]
    clock = next((column for column in others if _is_clock(table[column], column)), None)
    if clock is not None:
        return f"combine columns {quoted(str(roles.time))} and {quoted(clock)} into one, such as 2024-01-31 23:00:00"
    ranks = np.unique(times, return_inverse=True)[1]
    codes = {column: _codes(table[column]) for column in others if _may_name(table[column]) and not _empty_somewhere(table[column])}
    series_codes = None if roles.series is None else _codes(table[roles.series])
    alone: list[tuple[bool, int, tuple[str, ...]]] = []
    pairs: list[tuple[bool, int, tuple[str, ...]]] = []
    for chosen in [*combinations(codes, 1), *combinations(list(codes)[:SHOWN], 2 if series_codes is None else 1)]:
        parts = [codes[column] for column in chosen] if series_codes is None else [series_codes, *(codes[column] for column in chosen)]
        joined = _joined(parts)
        numbers = any(pa.types.is_integer(table[column].type) for column in chosen)
        if len(chosen) < len(others) and _apart(ranks, joined, dense=numbers):  # something must be left to forecast
            # Prefer text, since integers may tell rows apart by chance; then the fewest series.
            (alone if len(parts) == 1 else pairs).append((numbers, int(joined.max(initial=0)), chosen))
    if alone:
        return f"set data.series={quoted(min(alone)[2][0])}"
    if pairs:
        chosen = min(pairs)[2]
        one, two = chosen if series_codes is None else (str(roles.series), chosen[0])
        return f"combine columns {quoted(one)} and {quoted(two)} into one that names each series, and set data.series to it"
    return None


def _empty_somewhere(column: Any) -> bool:
    """True if a column has an empty cell, so that it cannot name the series of every row."""
    return bool(column.null_count or (is_text(column.type) and pc.any(pc.equal(texts_of(column), "")).as_py()))


def _may_name(column: Any) -> bool:
    """True if a column could name series: text, a category, integers or booleans."""
    kind = column.type
    return bool(is_text(kind) or pa.types.is_dictionary(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind))


def _is_clock(column: Any, label: str) -> bool:
    """True if a column holds times of day, separate from the days."""
    if pa.types.is_time(column.type):
        return True
    if is_text(column.type) and not column.null_count:
        return bool(pc.all(pc.match_substring_regex(texts_of(column), A_CLOCK)).as_py())
    if label.strip().lower() not in HOURS or not pa.types.is_integer(column.type) or column.null_count:
        return False
    lowest, highest = pc.min_max(column).as_py().values()
    return lowest is not None and lowest >= 0 and highest <= 24


def _joined(parts: Sequence[Ints]) -> Ints:
    """Return one code for each combination of codes."""
    joined = parts[0]
    for part in parts[1:]:
        joined = np.unique(joined * (int(part.max(initial=0)) + 2) + part, return_inverse=True)[1].astype(np.int64)
    return joined


def _codes(column: Any) -> Ints:
    flat = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    flat = flat.dictionary_decode() if pa.types.is_dictionary(flat.type) else flat
    coded: Ints = pc.fill_null(flat.dictionary_encode().indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    return coded + 1


def _apart(ranks: Ints, codes: Ints, *, dense: bool) -> bool:
    """True if no name has a time twice and names average at least two rows; `dense`: they must also occur at many times on average."""
    times, names = int(ranks.max(initial=0)) + 1, len(np.unique(codes))
    if names * 2 > len(codes) or (dense and names * times * DENSE > len(codes)):
        return False
    return len(np.unique(ranks.astype(np.int64) * (int(codes.max(initial=0)) + 1) + codes)) == len(codes)
