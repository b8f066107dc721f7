"""Every way to read a column as times: dates in any usual form, years, months, quarters and weeks, seconds since 1970, or counted steps.

pandas parses; which reading is right is decided where they are compared (`reading`). Each distinct value is parsed once.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

FIRST_YEAR, LAST_YEAR = 1500, 2200  # of numbers that are taken for years
LEAST_READ = 0.995  # of the cells of a column of times
LEAST_BEFORE = 0.85  # of the rows come before the last time
MOSTLY = 0.9  # of the rows have a time that is put together from several columns
SAMPLE = 200
LEAST_YEARS = 5  # consecutive numbers that are years without being called so
SPREADSHEET_DAYS = (20_000, 60_000)  # of 1954 to 2064, which spreadsheets count from 1899-12-30
MOST_EPOCHS = {10: "s", 13: "ms", 16: "us", 19: "ns"}  # digits of the time since 1970, and its unit
COMPACT = {4: "%Y", 6: "%Y%m", 8: "%Y%m%d", 10: "%Y%m%d%H", 12: "%Y%m%d%H%M", 14: "%Y%m%d%H%M%S"}
NAMES = re.compile(  # of columns that may hold times as plain numbers
    r"(ds|t|dt|day|hour|week|month|quarter|period|year|yr|years?|times?|dates?|datum|zeit.*|fecha|data|jahr|monat|ano|año|annee|année|anno"
    r"|.*date(?!a|d|s?et).*|.*time.*|.*(year|yr|epoch)|(year|.*_|iso)_?week|unix.*|valid_from|as_of|index)",
    re.IGNORECASE,
)
COUNTED = re.compile(r"ds|t|time([ _]?(point|idx|index|step))?|step|period|index|year", re.IGNORECASE)
MONTHS = {"jan": 1, "feb": 2, "mar": 3, "apr": 4, "may": 5, "jun": 6, "jul": 7, "aug": 8, "sep": 9, "oct": 10, "nov": 11, "dec": 12}
PARTS = {  # of times, and what columns that hold them are called
    "year": ("year", "yr", "jahr", "yyyy"),
    "month": ("month", "months", "mon", "mo", "mnth", "monat", "mm"),
    "day": ("day", "dy", "tag", "date_of_month", "day_of_month", "dayofmonth", "mday", "dom", "dd", "date"),
    "hour": ("hour", "hr"),
    "minute": ("minute",),
    "second": ("second",),
    "quarter": ("quarter",),
}
HOURS = (*PARTS["hour"], "hours", "hour_of_day", "stunde")
# Jan-02 is no second of January.
MONTHS_OF_YEARS = ["%b-%y", "%b %y", "%b-%Y", "%b %Y", "%B %Y", "%B-%Y", "%y-%b", "%Y-%b", "%Y %b", "%Y %B"]
ISO = r"\d{4}-\d\d-\d\d(?:[ T]\d\d:\d\d(?::\d\d(?:\.\d{1,6})?)?)?"  # which Arrow reads, many times faster than pandas
UNUSUAL = (  # ways to write times, and those that pandas knows
    (r" ?(?:UTC|GMT)$", "+00:00"),
    (r"( \d?\d)\.(\d\d)\.(\d\d)$", r"\1:\2:\3"),
    (r"^(\d{8}):(\d\d)(\d\d)$", r"\1 \2:\3"),  # as archives of photovoltaics and loads have them
)
CLOCK = r"\d{1,2}:\d\d(?::\d\d)?(?: ?[AaPp][Mm])?"
LATEST_OF_TWO_DIGITS = 2050  # a year written with two digits is before
OFFSET = r"(?:[+-]\d\d:?(?:\d\d)?|Z)$"


@dataclass(frozen=True)
class Instants:
    """A column read as times: datetime64 without a zone, NaT where there is none, or numbers of steps."""

    times: pd.Series
    day_first: bool | None = None  # in 1/2/2020; None where that does not matter
    zone: str | None = None  # of times that have one; they are in UTC
    layout: str | None = None  # in which they are written; None: as dates, or dates and times

    @property
    def counted(self) -> bool:
        """True for steps without dates."""
        return bool(self.times.dtype.kind != "M")

    @cached_property
    def repeats(self) -> bool:
        """True if a time comes more than once."""
        known = self.times.dropna()
        values = known.to_numpy()
        return not bool((values[1:] > values[:-1]).all()) and not known.is_unique


def readings(column: pd.Series, *, told: bool = False) -> list[Instants]:
    """Return every way to read a column as times, likeliest first; none if it is not one of times. Of one that is `told` to hold times,
    numbers that are no dates are numbers of steps.
    """
    if not column.notna().any():
        return []
    if isinstance(column.dtype, pd.PeriodDtype):
        return [Instants(column.dt.to_timestamp())]
    if isinstance(column.dtype, pd.DatetimeTZDtype):
        return [Instants(column.dt.tz_convert("UTC").dt.tz_localize(None), zone=str(column.dtype.tz))]
    if column.dtype.kind == "M":
        return [Instants(column)]
    if pd.api.types.is_bool_dtype(column) or column.dtype.kind in "mc":
        return []
    if pd.api.types.is_numeric_dtype(column):
        return _of_numbers(column, str(column.name).strip(), told=told) or ([Instants(column)] if told else [])
    return _of_texts(column)


def _of_numbers(column: pd.Series, name: str, *, told: bool) -> list[Instants]:
    numbers = column.astype(float).where(np.isfinite(column.astype(float)))
    known = numbers.dropna()
    named = told or NAMES.fullmatch(name) is not None  # otherwise only days, as 20240131, and consecutive years are times
    if not len(known) or not (named or (known.iloc[:SAMPLE] % 1 == 0).all()):
        return []
    years = known.between(FIRST_YEAR, LAST_YEAR).all()
    if not (named or years or known.between(FIRST_YEAR * 10_000, LAST_YEAR * 10_000).all()):
        return []
    if (known % 1 != 0).any():
        return _decimal_years(numbers) if named and years else []
    gaps = np.diff(np.unique(known.to_numpy()))
    low, even = known.min(), len(gaps) > 1 and bool((gaps == gaps[0]).all())
    counted = told or (named and COUNTED.fullmatch(name))
    if counted and len(gaps) > 1 and (low in (0, 1) or (even and (low <= 1 or known.max() < FIRST_YEAR))):
        return [Instants(column)]
    codes, values = pd.factorize(numbers)
    texts = pd.Series(values).astype("int64").astype(str)
    width = int(texts.str.len().iloc[0])
    if not (texts.str.len() == width).all() or not (named or width == 8 or (even and len(texts) >= LEAST_YEARS)):
        return []
    if width in COMPACT and texts.str[:4].astype(int).between(FIRST_YEAR, LAST_YEAR).all():
        times = pd.to_datetime(texts, format=COMPACT[width], errors="coerce")
        if times.notna().all():
            return [Instants(_spread(times, codes, column.index), layout=COMPACT[width])]
        weeks = pd.to_datetime(texts + "-1", format="%G%V-%u", errors="coerce")
        if width == 6 and weeks.notna().all():
            return [Instants(_spread(weeks, codes, column.index))]
    if named and len(gaps) and (gaps == 1).mean() > MOSTLY and known.between(*SPREADSHEET_DAYS).all():
        return [Instants(_spread(pd.to_datetime(texts.astype("int64"), unit="D", origin="1899-12-30"), codes, column.index))]
    if named and width in MOST_EPOCHS:
        return [Instants(_spread(pd.to_datetime(texts.astype("int64"), unit=MOST_EPOCHS[width]), codes, column.index))]
    return []


def _decimal_years(numbers: pd.Series) -> list[Instants]:
    """1949.0833 is a month of 1949, and 1949.25 a quarter."""
    gaps = np.unique(np.diff(np.unique(numbers.dropna().to_numpy())).round(6))
    parts = next((parts for parts in (1, 4, 12) if np.isclose(gaps * parts, np.rint(gaps * parts), atol=0.05).all()), None)
    if parts is None:
        return []
    number = (numbers * parts + 0.1).floordiv(1)
    months = pd.DataFrame({"year": number // parts, "month": number % parts * (12 // parts) + 1, "day": 1})
    return [Instants(pd.to_datetime(months, errors="coerce"))]


def _of_texts(column: pd.Series) -> list[Instants]:
    sample = sample_of(column)
    if not sample.str.contains(r"\d").mean() >= 0.9 or not 4 <= sample.str.len().median() <= 40:
        return []
    if sample.str.fullmatch(ISO).all():
        try:
            times = _arrow(column).cast(pa.timestamp("us"))
            return [Instants(pd.Series(times.to_numpy(), column.index))] if pc.year(pc.min(times)).as_py() >= FIRST_YEAR else []
        except pa.ArrowException:
            pass  # some are not written so
    if len(sample) < len(column) and not _of_texts(sample.reset_index(drop=True)):
        return []
    codes, values = pd.factorize(column)
    texts = pd.Series(values, dtype="str")
    texts = texts.str.strip() if (sample != sample.str.strip()).any() else texts
    halves = sample.str.extract(r"^(.*\d) ?[-–/] ?(.*\d)$")
    sizes = halves[0].str.len()
    if sizes.ge(len("1.1.20")).all() and sizes.eq(halves[1].str.len()).all():  # from a time to the next
        texts, sample = texts.str.extract(r"^(.*\d) ?[-–/] ?.*\d$")[0], halves[0]
    parts = _of_parts(texts) if sample.str.contains(r"[QqMmWw]\s*\d").any() else None
    ways = [parts] if parts is not None else _of_dates(texts, sample.str.strip())
    found = [replace(way, times=_spread(way.times, codes, column.index)) for way in ways]
    return [way for way in found if _mostly_times(way.times, column) and way.times.min().year >= FIRST_YEAR]


def _arrow(column: pd.Series) -> Any:
    """A column of texts as Arrow has it."""
    if isinstance(column.dtype, pd.StringDtype) and column.dtype.storage == "pyarrow":
        return pa.chunked_array(column.array.__arrow_array__())
    return pa.array(column, pa.string(), from_pandas=True)


def sample_of(column: pd.Series) -> pd.Series:
    """Some cells of a column, spread over all of it, as texts."""
    some = column.iloc[:: max(1, len(column) // SAMPLE)].dropna()
    return (some if len(some) else column.dropna().iloc[:SAMPLE]).astype(str)


def _mostly_times(times: pd.Series, column: pd.Series) -> bool:
    """True if nearly all cells are times, apart from some after the last: a total, remarks, the title once more."""
    last = int(np.flatnonzero(times.notna().to_numpy())[-1]) + 1 if times.notna().any() else 0
    return last >= LEAST_BEFORE * len(column) and times.count() >= LEAST_READ * column.iloc[:last].count()


def _of_parts(texts: pd.Series) -> Instants | None:
    """Quarters (2020Q1, 2020-Q1, Q1 2020), weeks (2020-W03) and months (2020M01, 2020-01)."""
    texts = texts.str.replace(r"^([Qq][1-4])[-/ ]?(\d{4})$", r"\2\1", regex=True)
    parts = texts.str.extract(r"^(?P<year>\d{4})[-: ]?(?P<unit>[QqMmWw])(?P<number>\d{1,2})$")
    if parts["year"].isna().mean() > 1 - LEAST_READ or parts["unit"].str.upper().nunique() != 1:
        return None
    unit, number = parts["unit"].dropna().iloc[0].upper(), pd.to_numeric(parts["number"])
    if unit == "W":
        written = parts["year"] + "-W" + parts["number"].str.zfill(2) + "-1"
        return Instants(pd.to_datetime(written, format="%G-W%V-%u", errors="coerce"))
    month = number * 3 - 2 if unit == "Q" else number
    return Instants(pd.to_datetime({"year": pd.to_numeric(parts["year"]), "month": month, "day": 1}, errors="coerce"))


def _of_dates(texts: pd.Series, sample: pd.Series) -> list[Instants]:
    for form, usual in UNUSUAL:
        if (changed := sample.str.replace(form, usual, regex=True)).ne(sample).any():
            texts, sample = texts.str.replace(form, usual, regex=True), changed
    late = texts.str.contains(" 24:00", regex=False).fillna(False) if sample.str.contains(":").any() else pd.Series(False, texts.index)
    texts = texts.mask(late, texts.str.replace(" 24:00", " 00:00", regex=False)) if late.any() else texts  # the end of a day
    zone = None
    if sample.str.contains(rf"\d:\d\d.*{OFFSET}").all():
        offsets = texts.str.extract(rf"({OFFSET})")[0].dropna().unique()
        zone = "UTC" if len(offsets) > 1 or offsets[0] in ("Z", "+00:00", "+0000", "+00") else str(offsets[0])
    few = texts.dropna().iloc[:: max(1, len(texts) // 20)].reset_index(drop=True)
    if _parsed(few, day_first=False, utc=zone is not None) is None and _parsed(few, day_first=True, utc=zone is not None) is None:
        return []
    for form in MONTHS_OF_YEARS:
        months = pd.to_datetime(few, format=form, errors="coerce")
        if months.notna().all():
            times = pd.to_datetime(texts, format=form, errors="coerce")
            return [Instants(_in_one_century(times) if "%y" in form else times)]
    layout = "%Y-%m" if sample.str.fullmatch(r"\d{4}-\d\d").all() else None
    ways: list[Instants] = []
    for day_first in (False,) if sample.str.match(r"\d{4}[^\d]").all() else (False, True):
        times = _parsed(texts, day_first=day_first, utc=zone is not None)
        if times is None:
            continue
        times = times + pd.to_timedelta(late.astype(int), unit="D") if late.any() else times
        if not ways or not ways[0].times.equals(times):
            ways.append(Instants(times, day_first, zone, layout))
    return ways if len(ways) > 1 else [replace(way, day_first=None) for way in ways]


def _parsed(texts: pd.Series, *, day_first: bool, utc: bool) -> pd.Series | None:
    """The times of texts, in one form or, if that leaves some out, in several."""
    best: pd.Series | None = None
    for layout in (None, "mixed"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a form that pandas does not know, and of days beyond 12 read as months
            try:
                times = pd.to_datetime(texts, dayfirst=day_first, errors="coerce", format=layout, utc=utc)
            except (ValueError, OverflowError):
                continue
        if times.dtype.kind == "M" and (best is None or times.count() > best.count()):
            best = times
        if best is not None and best.notna().mean() >= LEAST_READ:
            break
    if best is not None:
        best = best.mask(texts.str.fullmatch(CLOCK).fillna(False))  # pandas takes a time of day for one of today
    if best is None or best.notna().mean() < min(LEAST_BEFORE, 1 - 1.5 / max(len(texts), 2)):
        return None
    best = best.dt.tz_localize(None) if utc or best.dt.tz is not None else best
    return best if texts.str.contains(r"\d{4}").any() else _in_one_century(best)


def _in_one_century(times: pd.Series) -> pd.Series:
    """Times whose years had two digits: the widest gap between years, around the clock of a century, lies before the first of them."""
    years = np.unique(times.dropna().dt.year % 100)
    gaps = np.diff(np.append(years, years[0] + 100))
    first = int(years[(gaps.argmax() + 1) % len(years)])
    later = (times.dt.year - first) % 100
    century = 2000 if first + later.max() + 2000 < LATEST_OF_TWO_DIGITS else 1900
    moved = first + later + century - times.dt.year
    for by in moved[moved.notna() & moved.ne(0)].unique():
        times = times.mask(moved.eq(by), times + pd.DateOffset(years=int(by)))
    return times


def _spread(values: pd.Series, codes: Any, index: pd.Index) -> pd.Series:
    """Values of the distinct ones as those of all rows; NaT where a code is -1."""
    array = np.append(values.to_numpy("datetime64[us]"), np.datetime64("NaT", "us"))
    return pd.Series(array[codes], index)


def calendar_parts(frame: pd.DataFrame) -> tuple[pd.Series, list[str]] | None:
    """Put times together from columns of their parts, and name these: year, month, day, hour; a date and an hour; Date and Time."""
    if (made := _of_year_and(frame, digits=4)) is not None:
        return made
    clock = next(((name, since) for name in frame if (since := _clock(frame[name])) is not None), None)
    for name in frame.columns if clock is not None else ():
        dates = [] if pd.api.types.is_numeric_dtype(frame[name]) else readings(frame[name])
        ways = [way for way in dates if (way.times.dropna() == way.times.dropna().dt.normalize()).all()]
        if clock is not None and ways and ways[0].times.dropna().duplicated().any():
            return most_regular([Instants(way.times + clock[1]) for way in ways]).times, [name, str(clock[0])]
    return _of_year_and(frame, digits=2)


def _clock(column: pd.Series) -> pd.Series | None:
    """The time of day in each cell (14:30, 14.30, 2:30 PM, or from one hour to the next: 14 - 15), or the hour if the column is called so;
    None if that is not what they hold.
    """
    if pd.api.types.is_numeric_dtype(column):
        hours = str(column.name).lower() in HOURS and pd.api.types.is_integer_dtype(column) and column.between(0, 24).all()
        return pd.to_timedelta(column, unit="h") if hours else None
    if len(column) > 2 * SAMPLE and _clock(sample_of(column)) is None:
        return None
    cells = column.astype("str").str.strip().str.replace(r"^(\d\d)(\d\d)(?: ?(?:UTC|GMT))?$", r"\1:\2", regex=True)
    parts = cells.str.extract(
        r"^(?P<hour>\d{1,2})(?:[:.h](?P<minute>\d\d)(?:[:.](?P<second>\d\d))?)?\s*(?P<half>[AaPp][Mm])?(?:\s*[-–]\s*\d{1,2}(?:[:.h]\d\d)?)?$"
    )
    written = cells.str.contains(r"[:.h-]|[AaPp][Mm]", regex=True)
    if parts["hour"].isna().mean() > 1 - LEAST_READ or not written[parts["hour"].notna()].all():
        return None
    hour = pd.to_numeric(parts["hour"])
    half = parts["half"].str.lower()
    hour = hour.where(half.isna(), hour % 12 + 12 * (half == "pm"))
    seconds = hour * 3600 + pd.to_numeric(parts["minute"]).fillna(0) * 60 + pd.to_numeric(parts["second"]).fillna(0)
    return pd.to_timedelta(seconds, unit="s") if hour.dropna().le(24).all() else None


def _of_year_and(frame: pd.DataFrame, *, digits: int) -> tuple[pd.Series, list[str]] | None:
    """Times from a year, written with so many digits, and a month or quarter, and whatever parts there are beside these."""
    named = {
        part: name
        for name in frame.columns[::-1]  # the first of several
        for part, usual in PARTS.items()
        if (lower := str(name).strip().lower()) in usual and (lower != "date" or pd.api.types.is_integer_dtype(frame[name]))
    }
    used = [part for part in PARTS if part in named and part != "quarter"] if "month" in named else ["year", "quarter"]
    if not {*used} <= named.keys() or "year" not in named:
        return None
    values: dict[str, Any] = {part: _numbers(frame[named[part]]) for part in used}
    if not values["year"].dropna().between(*((FIRST_YEAR, LAST_YEAR) if digits == 4 else (0, 99))).all():
        return None
    values["year"] = values["year"] if digits == 4 else values["year"] + 1900
    if "quarter" in values:
        values["month"] = values.pop("quarter") * 3 - 2
    times = pd.to_datetime(pd.DataFrame({"day": 1, **values}), errors="coerce")
    times = times if digits == 4 else _in_one_century(times)
    return (times, [named[part] for part in used]) if times.notna().mean() > MOSTLY else None


def _numbers(column: pd.Series) -> pd.Series:
    """The numbers of years, months, days, … in a column: 3, Q3, March."""
    if pd.api.types.is_numeric_dtype(column):
        return column
    texts = column.astype("str").str.strip()
    return pd.to_numeric(texts.str.lstrip("Qq"), errors="coerce").fillna(texts.str[:3].str.lower().map(MONTHS))


def most_regular(ways: list[Instants]) -> Instants:
    """The way in which most steps from one time to the next are equal: of day-first and month-first dates, the right one."""

    def regular(way: Instants) -> float:
        gaps = np.diff(np.unique(way.times.dropna().to_numpy()))
        return float((gaps == np.median(gaps)).mean()) if len(gaps) else 0.0

    return max(ways, key=regular)
