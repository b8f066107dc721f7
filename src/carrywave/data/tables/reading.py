"""Which columns of a table hold times, name series and are values.

One rule decides: the reading under which series and time name each row, and the times of a series are regular, is the right one; of several
such readings the one whose series take the fewest columns. What was told is never guessed over, and what was found is said in a line.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from carrywave.data.files.frames import different_names
from carrywave.data.files.numbers import as_numbers, is_code
from carrywave.data.sequences import Ints
from carrywave.data.tables.choice import ColumnChoice, counted, quoted, require
from carrywave.data.tables.frequency import infer
from carrywave.data.tables.instants import FIRST_YEAR, LAST_YEAR, NAMES, Instants, calendar_parts, most_regular, readings
from carrywave.errors import DataError

SERIES_NAME = "unique_id"  # what others' forecasters call it: a name of series even where there is only one
TIME = "time"  # the name of times that are put together from several columns, or from the headers of a wide table
COUNTERS = re.compile(r"unnamed: 0|rownames?|row([ _]?(id|no|number))?|id|index|instant|no\.?|nr\.?|obs|observation|#|", re.IGNORECASE)
CALENDAR = re.compile(r"(year|yr|month|mnth|quarter|week|day|hour|hr|minute|season|holiday|weekday|dayofweek).*", re.IGNORECASE)
MOST_SERIES_COLUMNS = 3
MOST_REPEATS = 0.01  # of the rows of series may have the time of another: a mistake in the file
LEAST_OF_SERIES = 3  # rows of a series on average; fewer tell nothing of its times, and any list of things would be one of series
MOST_TRIED = 8  # columns that may name series
MOST_NUMBERED = 2000  # series named by numbers
MOST_SPARSE = 8  # combinations of values and times for each row
LEAST_WIDE = 8  # headers that are times
MOST_NAMES = 6  # columns beside these
LEAST_COUNTED = 20  # headers that are numbers of steps


@dataclass(frozen=True)
class TableReading:
    """The rows of a table that are read, and the role of each column."""

    frame: pd.DataFrame
    time: str | None = None
    instants: Instants | None = None  # of the rows
    series: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()  # columns of numbers
    left: dict[str, str] = field(default_factory=dict)  # columns that are not read, and why
    notes: tuple[str, ...] = ()
    columns: _Columns = field(default_factory=lambda: _Columns())
    order: Ints | None = None  # of the rows by series and time, if it is known


@dataclass(frozen=True)
class _Way:
    """One reading of the times and the series."""

    name: str
    instants: Instants
    series: tuple[str, ...]
    regular: bool
    full: float
    told_apart: bool = False  # it is known that no time repeats in a series
    order: Ints | None = None  # of the rows by series and time, if it is known

    @property
    def score(self) -> tuple[Any, ...]:
        named = bool(NAMES.fullmatch(self.name.strip()))
        return self.regular, round(self.full, 6), -len(self.series), named


class _Columns:
    """What is found in each column of a table, once: its times, and codes of its distinct values."""

    def __init__(self) -> None:
        self._ways: dict[str, list[Instants]] = {}
        self._codes: dict[str, tuple[Ints, Any]] = {}

    def ways(self, frame: pd.DataFrame, name: str) -> list[Instants]:
        """The ways to read a column as times."""
        if name not in self._ways:
            self._ways[name] = readings(frame[name])
        return self._ways[name]

    def forget(self, name: str) -> None:
        """Forget the ways of a column in whose place another one comes."""
        self._ways.pop(name, None)

    def codes(self, frame: pd.DataFrame, name: str) -> tuple[Ints, Any]:
        """The place of each row's value among the distinct values, and these."""
        if name not in self._codes:
            codes, values = pd.factorize(frame[name], use_na_sentinel=False)
            self._codes[name] = codes.astype(np.int64), values
        return self._codes[name]

    def series(self, frame: pd.DataFrame, names: Sequence[str]) -> Ints:
        """The series of each row, numbered as they first appear."""
        if not names:
            return np.zeros(len(frame), np.int64)
        joined = self.joined(frame, names)
        return joined if len(names) == 1 else pd.factorize(joined)[0].astype(np.int64)

    def joined(self, frame: pd.DataFrame, names: Sequence[str]) -> Ints:
        """One code for each combination of the values of some columns."""
        first, *rest = names
        joined = self.codes(frame, first)[0]
        for name in rest:
            codes, values = self.codes(frame, name)
            joined = joined * len(values) + codes
        return joined


def read(frame: pd.DataFrame, name: str, choice: ColumnChoice) -> TableReading:
    """Find the roles of the columns of a frame; `name` is that of the file in messages."""
    notes: list[str] = []
    frame = _of_numbers(frame.set_axis(different_names(frame), axis=1))
    timeless = choice.in_order or (choice.trained and choice.time is None)
    if not timeless and (choice.time is None or choice.time not in frame.columns):
        frame = _turned(frame, name, notes, choice)
    if choice.series is None and SERIES_NAME in frame.columns:
        choice = replace(choice, series=(SERIES_NAME,))
    columns = _Columns()
    frame = frame if timeless else _with_time(frame, name, notes, choice, columns)
    for wanted, key in (((choice.time,) if choice.time else (), "data.time"), (choice.series or (), "data.series")):
        require(list(frame.columns), wanted, name, None if choice.trained else key)
    way = None if timeless else _best(frame, name, choice, columns)
    every = len(frame)
    if way is not None:
        frame, way = _without_repeats(frame, way, name, choice, notes, columns)
        lost = way.instants.times.isna()
        if lost.any():
            notes.append(f"{name}: {counted(int(lost.sum()), 'row without a time is', 'rows without a time are')} left out")
            frame, way = frame[~lost], replace(way, order=None, instants=replace(way.instants, times=way.instants.times[~lost]))
    columns = columns if len(frame) == every else _Columns()
    series = way.series if way is not None else choice.series or ()
    used = {*series, *(() if way is None else (way.name,))}
    frame = _written(frame, {*used, *choice.categorical, *choice.static})
    numbers, left = _values(frame, used, choice, None if way is None else way.instants.times)
    reading = TableReading(
        frame, None if way is None else way.name, None if way is None else way.instants, series, numbers, left, tuple(notes), columns
    )
    reading = replace(reading, order=None if way is None else way.order)
    still = {} if choice.trained or choice.each_step else _still(reading, choice.asked)
    if still.keys() < set(numbers):
        told = {column: still[column] for column in numbers if column in still}
        reading = replace(reading, numbers=tuple(column for column in numbers if column not in still), left=left | told)
    if way is not None and way.instants.day_first is not None and not choice.trained:
        first = "day" if way.instants.day_first else "month"
        shown = frame[way.name].dropna().iloc[0]
        reading = replace(reading, notes=(*reading.notes, f"{name}: column {way.name} contains {shown!r:.40}, read with the {first} first"))
    return reading


def _of_numbers(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with columns of Python's own numbers, such as the Decimals of databases and Parquet, as columns of numbers."""
    kinds = ("decimal", "integer", "floating", "mixed-integer-float")
    found = {str(name): column for name, column in frame.items() if column.dtype == object}
    return frame.assign(**{name: pd.to_numeric(column) for name, column in found.items() if pd.api.types.infer_dtype(column) in kinds})


def _written(frame: pd.DataFrame, used: set[str]) -> pd.DataFrame:
    """The frame with texts that are numbers as such, as frames and JSON hold them; in a CSV they are found before."""
    texts = [column for column in frame.columns if column not in used and pd.api.types.is_string_dtype(frame[column])]
    found = {column: as_numbers(frame[column])[0] for column in texts if not is_code(frame[column])}
    return frame.assign(**{column: numbers for column, numbers in found.items() if numbers is not None})


def _with_time(frame: pd.DataFrame, name: str, notes: list[str], choice: ColumnChoice, columns: _Columns) -> pd.DataFrame:
    """The frame with a column of times, if these are in several columns, or in an unnamed one."""
    if choice.time is not None and (choice.time in frame.columns or choice.time != TIME):
        return frame
    texts = [column for column in frame.columns if not pd.api.types.is_numeric_dtype(frame[column])]
    dated = any(ways and not ways[0].repeats for ways in (columns.ways(frame, column) for column in texts))
    if not dated and (made := calendar_parts(frame)) is not None:
        times, used = made
        notes.append(f"{name}: times are put together from {' and '.join(map(quoted, used))}")
        label = TIME if TIME not in frame.columns or TIME in used else f"{TIME}_"
        columns.forget(label)
        rest = frame.drop(columns=[column for column in used if column not in (choice.targets or ())])
        rest.insert(0, label, times)
        return rest
    first = frame.columns[0]
    if first == "Unnamed: 0" and pd.api.types.is_integer_dtype(frame[first]) and frame[first].iloc[0] not in (0, 1):
        years = frame[first].between(FIRST_YEAR, LAST_YEAR).all()
        return frame.rename(columns={first: "year" if years and "year" not in frame.columns else TIME})
    return frame


def _best(frame: pd.DataFrame, name: str, choice: ColumnChoice, columns: _Columns) -> _Way | None:
    """The reading of times and series that is right; None if there are no times."""
    if choice.time is not None:
        found = [(choice.time, way) for way in readings(frame[choice.time], told=True)]
    else:
        found = [(column, way) for column in frame.columns for way in columns.ways(frame, column)]
    if choice.day_first is not None:
        found = [(column, way) for column, way in found if way.day_first in (None, choice.day_first)] or found
    if choice.time is not None and not found and choice.frequency != "none":
        shown = frame[choice.time].dropna().iloc[0] if frame[choice.time].notna().any() else "nothing"
        remedy = "name another column in data.time, or set data.frequency=none to count rows"
        raise DataError(f"{name}: column {choice.time} contains {shown!r:.40}, which is no time; {remedy}")
    labels = [column for column in frame.columns if not pd.api.types.is_float_dtype(frame[column]) and column not in (choice.targets or ())]
    best: _Way | None = None
    again: _Way | None = None
    uneven: _Way | None = None  # texts, or numbers in the order of the rows, tell rows apart, but leave the times irregular
    for column, instants in found:
        if choice.series is not None or choice.trained:
            tries = [(choice.series or (), -1)]
        else:
            tries = _series(frame, column, instants, labels, columns)
        for series, repeats in tries:
            regular, full = _regularity(frame, instants, series, columns)
            way = _Way(column, instants, tuple(series), regular, full, told_apart=repeats == 0)
            if series and choice.series is None and not regular:  # what tells rows apart so may be values
                if repeats == 0 and len(series) == 1 and _stands_together(frame[series[0]]):
                    uneven = uneven or way
                continue
            if repeats > 0:
                again = way if again is None or way.score > again.score else again
            else:
                best = way if best is None or way.score > best.score else best
    best = best or again or uneven
    if best is None and found:  # repeated times, which `_without_repeats` deals with
        column = found[0][0]
        instants = most_regular([way for other, way in found if other == column])
        best = _Way(column, instants, choice.series or (), False, 0.0)
    return best


def _stands_together(column: pd.Series) -> bool:
    """True for texts, and for numbers of which each stands in one block of rows, as those of a series do."""
    return not pd.api.types.is_numeric_dtype(column) or int((column != column.shift()).sum()) == column.nunique(dropna=False)


def _regularity(frame: pd.DataFrame, instants: Instants, series: Sequence[str], columns: _Columns) -> tuple[bool, float]:
    """Whether the times of the longest series are regular, and how much of their grid is there."""
    times = instants.times
    if series:
        codes = columns.series(frame, series)
        times = times[codes == np.bincount(codes).argmax()]
    found, full = infer(times.dropna().to_numpy())
    return found is not None, full


def in_order(times: Any, codes: Ints) -> Ints:
    """The order of rows by series and time."""
    steps = np.diff(codes)
    if ((steps > 0) | ((steps == 0) & (times[1:] >= times[:-1]))).all():
        return np.arange(len(codes))
    return np.lexsort((times, codes))


def codes_of(reading: TableReading) -> tuple[Ints, list[tuple[Any, ...]]]:
    """The series of each row, numbered as they first appear, and their names, a value of each column."""
    frame, names = reading.frame, list(reading.series)
    if not names:
        return np.zeros(len(frame), np.int64), [()]
    codes = reading.columns.series(frame, names)
    first = np.flatnonzero(np.diff(np.maximum.accumulate(codes), prepend=-1))
    return codes, list(frame[names].iloc[first].itertuples(index=False, name=None))


def _series(
    frame: pd.DataFrame, time: str, instants: Instants, labels: Sequence[str], columns: _Columns
) -> list[tuple[tuple[str, ...], int]]:
    """The fewest columns that, with the time, name each row, and those that name all but a few, each with how many they do not.

    A column of names recurs.
    """
    times = instants.times
    present = times.notna().to_numpy()
    if not present.any() or not instants.repeats:
        return [((), 0)]
    moments = pd.factorize(times[present])[0].astype(np.int64)
    rows = len(moments)
    able: dict[str, Ints] = {}
    for column in labels:
        number = pd.api.types.is_numeric_dtype(frame[column])
        if column == time or (CALENDAR.fullmatch(column.strip()) if number else columns.ways(frame, column)):
            continue  # other times name no series
        codes, values = columns.codes(frame, column)
        if 1 < len(values) <= rows / LEAST_OF_SERIES and not (number and len(values) > MOST_NUMBERED):
            able[column] = codes if present.all() else codes[present]
    place = {column: number for number, column in enumerate(frame.columns)}
    order = sorted(able, key=lambda column: (pd.api.types.is_numeric_dtype(frame[column]), place[column]))[:MOST_TRIED]
    nearly: list[tuple[tuple[str, ...], int]] = []
    for size in range(1, MOST_SERIES_COLUMNS + 1):
        for chosen in itertools.combinations(order, size):
            joined = moments
            if len(chosen) > 1 and pd.Series(columns.joined(frame, chosen)).nunique() > len(frame) / LEAST_OF_SERIES:
                continue
            for column in chosen:
                joined = joined * len(columns.codes(frame, column)[1]) + able[column]
            few = int(joined.max()) <= MOST_SPARSE * rows  # then counting is faster than hashing
            repeats = rows - int(np.count_nonzero(np.bincount(joined))) if few else int(pd.Index(joined).duplicated().sum())
            if not repeats:
                return [(chosen, 0), *nearly]
            if repeats <= MOST_REPEATS * rows and not nearly:
                nearly.append((chosen, repeats))
    return nearly


def _without_repeats(
    frame: pd.DataFrame, way: _Way, name: str, choice: ColumnChoice, notes: list[str], columns: _Columns
) -> tuple[pd.DataFrame, _Way]:
    """The rows with each time once in each series: identical rows are read once, others as `data.repeats` says."""
    times = way.instants.times.to_numpy()
    codes = columns.series(frame, way.series)
    if choice.frequency == "none" or way.told_apart:
        return frame, way
    order = in_order(times, codes)
    if not ((np.diff(codes[order]) == 0) & (times[order][1:] == times[order][:-1])).any():
        return frame, replace(way, order=order)
    keys = [*way.series, "\0"]
    whole = frame.assign(**{"\0": way.instants.times})
    repeated = whole.duplicated(keys) & way.instants.times.notna()
    same = frame.duplicated() & repeated if repeated.any() else repeated
    if same.any():
        notes.append(f"{name}: {counted(int(same.sum()), 'row that stands there twice is', 'rows that stand there twice are')} read once")
        whole, repeated = whole[~same], repeated[~same]
    if repeated.any():
        if choice.repeats is None:
            row = whole.index[repeated][0]
            label = "/".join(str(frame.loc[row, column]) for column in way.series)
            why = f" in series {label}; set" if way.series else ", and no column tells the series apart; set data.series,"
            remedy = "data.repeats=mean, first or last, or data.frequency=none, which takes rows in their order"
            raise DataError(f"{name}: row {int(row) + 1}, column {way.name} repeats {frame.loc[row, way.name]}{why} {remedy}")
        notes.append(f"{name}: {int(repeated.sum())} repeated times are read once (data.repeats={choice.repeats})")
        how = {column: choice.repeats for column in frame.columns if column not in keys}
        if choice.repeats == "mean":
            how = {column: "mean" if pd.api.types.is_numeric_dtype(frame[column]) else "first" for column in how}
        whole = whole.groupby(keys, sort=False, dropna=False).agg(how).reset_index()
    return whole[list(frame.columns)], replace(way, instants=replace(way.instants, times=whole["\0"]))


def _values(frame: pd.DataFrame, used: set[str], choice: ColumnChoice, times: pd.Series | None) -> tuple[tuple[str, ...], dict[str, str]]:
    """The columns of numbers, and why others are not read."""
    why = {column: _why_not(frame[column], column, times, asked=column in choice.asked) for column in frame.columns if column not in used}
    return tuple(column for column, reason in why.items() if not reason), {column: reason for column, reason in why.items() if reason}


def _why_not(values: pd.Series, column: str, times: pd.Series | None, *, asked: bool) -> str:
    """Why a column is none of numbers, or none of the data, such as a counter of rows, unless it was asked for."""
    if not asked and values.isna().all():
        return "empty"
    if not pd.api.types.is_numeric_dtype(values):
        return "times" if values.dtype.kind in "mM" else "text"
    if asked:
        return ""
    if pd.api.types.is_bool_dtype(values):
        return "truth values"
    if COUNTERS.fullmatch(column.strip()) and _counts(values, unnamed=column == "Unnamed: 0"):
        return "counts the rows"
    if times is not None:
        return "the same times" if _same_times(values, times) else ""
    return "only orders the rows" if NAMES.fullmatch(column.strip()) and values.is_monotonic_increasing and values.is_unique else ""


def _still(reading: TableReading, asked: frozenset[str]) -> dict[str, str]:
    """The columns that nobody asked for and that never change, or only between series, as areas of countries do; and why they are left."""
    codes, _ = codes_of(reading)
    starts = np.flatnonzero(np.diff(np.maximum.accumulate(codes), prepend=-1))  # series are numbered as they first appear
    still: dict[str, str] = {}
    for column in [column for column in reading.numbers if column not in asked] if len(starts) < len(codes) else []:
        values = reading.frame[column].to_numpy(np.float64, na_value=np.nan)
        if (values == values[0]).all():
            still[column] = "one value throughout"
        elif len(starts) > 1 and (values[starts] != values[0]).any() and not (values != values[starts][codes]).any():
            still[column] = "one value in each series; data.static"
    return still


def _counts(values: pd.Series, *, unnamed: bool) -> bool:
    """True if a column numbers the rows; what has no name does so in any order."""
    in_turn = unnamed or bool((values.diff().dropna() == 1).all())
    return pd.api.types.is_integer_dtype(values) and in_turn


def _same_times(values: pd.Series, times: pd.Series) -> bool:
    """True if a column has the times once more, as numbers: seconds since 1970, say."""
    for rows in (slice(200), slice(None)):  # few tell most columns
        ways = [way for way in readings(values[rows], told=True) if not way.counted]
        if not ways or ways[0].times.isna().any() or times.dtype.kind != "M":
            return False
        if (ways[0].times.dt.year != times[rows].dt.year).mean() > MOST_REPEATS:
            return False
    return bool(pd.DataFrame({"a": times, "b": values}).drop_duplicates().apply(lambda column: column.is_unique).all())


def _turned(frame: pd.DataFrame, name: str, notes: list[str], choice: ColumnChoice) -> pd.DataFrame:
    """A table with a series a row, and times (or V1, V2, …) for headers, as one with a row for each series and time."""
    heads = pd.Series(frame.columns, dtype="str")
    numeric = np.array([pd.api.types.is_numeric_dtype(frame[column]) or frame[column].isna().all() for column in frame.columns])
    counted = heads.str.fullmatch(r"[A-Za-z]{0,2}_?\d+").to_numpy(bool) & numeric
    years = heads.str.fullmatch(r"[Xx]?(1[5-9]|20)\d\d").to_numpy(bool)
    maybe = heads.where(heads.str.contains(r"\d") & ~counted & ~years)
    dated = np.zeros(len(heads), bool)
    if maybe.notna().sum() >= LEAST_WIDE:
        ways = readings(maybe.dropna().reset_index(drop=True).rename(TIME))
        dated[np.flatnonzero(maybe.notna())] = bool(ways)
        if not ways:
            dated = pd.to_datetime(maybe, errors="coerce", format="mixed").notna().to_numpy(bool)
    for mask, what in ((dated, "times"), (years, "years"), (counted & (counted.sum() > LEAST_COUNTED), "steps")):
        rest = [column for column, chosen in zip(frame.columns, mask, strict=True) if not chosen]
        if mask.sum() < LEAST_WIDE or len(rest) > MOST_NAMES or not numeric[mask].all() or choice.asked & set(heads[mask]):
            continue
        names = [column for column in rest if not pd.api.types.is_float_dtype(frame[column])]
        texts = [column for column in names if not pd.api.types.is_numeric_dtype(frame[column]) and frame[column].is_unique]
        if what == "steps" and not texts:
            continue  # columns of measurements are numbered, too
        if not names:
            frame, names = frame.assign(series=range(len(frame))), ["series"]
        new = [*range(int(mask.sum()))] if what == "steps" else [*heads[mask].str.lstrip("Xx" if what == "years" else "")]
        long = frame.rename(columns=dict(zip(heads[mask], new, strict=True))).melt(names, new, TIME, "value").dropna(subset="value")
        long[TIME] = pd.to_numeric(long[TIME]) if what != "times" else long[TIME].astype("str")
        notes.append(f"{name}: a series a row, with {what} as headers: {len(frame):,} series")
        return long.reset_index(drop=True)
    return frame
