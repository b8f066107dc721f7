"""Dates written as text: those with the year first are parsed, and those with the year last if it can be told which number is the day.

Other formats are recognised so that none is mistaken for plain text.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

A_MONTH = r"^\d{4}-\d{2}$"
YEAR_FIRST = (  # normalise 2024/1/31 and 2024.01.31 to 2024-01-31, step by step
    (r"^(\d{4})[/.-](\d{1,2})[/.-](\d{1,2})\b", r"\1-\2-\3"),
    (r"^(\d{4})-(\d)-", r"\1-0\2-"),
    (r"^(\d{4}-\d{2})-(\d)($|[ T])", r"\1-0\2\3"),
)
YEAR_LAST = r"^\d{1,2}[/.-]\d{1,2}[/.-]\d{4}([ T]\d{1,2}:.*)?$"
WITH_DOTS = r"^\d{1,2}\.\d{1,2}\.\d{4}"
PARTS = r"^(?P<first>\d{1,2})[/.-](?P<second>\d{1,2})[/.-](?P<year>\d{4})"
LIKE_ISO = r"^\d{4}[/.-]\d{1,2}([/.-]\d{1,2}([ T]\d{1,2}:.*)?)?$"
MONTHS = r"(?i)\b(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\b"
LIKE_A_DATE = (
    r"^\d{1,4}[./-]\d{1,2}[./-]\d{1,4}\b",  # 31/01/2024, 01-31-24, 31.1.2024 23:00
    r"^\d{4}[./]\d{1,2}$|^\d{1,2}[./-]\d{4}$",  # 2024/01, 01.2024
    r"^(19|20)\d{2}(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])([ T_]?\d{4}.*)?$",  # 20240131
    r"(?i)^q[1-4]\W*\d{2,4}$",  # Q1 2024: as text it would sort before Q2 2023
)
OFFSET = r"(?P<sign>[+-])(?P<hours>\d{2}):?(?P<minutes>\d{2})?$"  # at the end of a time: +01:00, +0100 or +01; otherwise it is UTC
MOST = 0.5  # if more than this fraction of rows are dates, the others are errors
SOME = 100  # about this many rows are sampled

Order = Literal["day", "month"]  # which comes first, where the year comes last
DateShape = Literal["date", "month", "datetime"]
WRITE = "write dates as 2024-01-31 or 2024-01-31 23:00:00"


class Dates(NamedTuple):
    """Dates as Arrow timestamps in microseconds."""

    moments: Any
    shape: DateShape


def is_text(kind: Any) -> bool:
    """True if an Arrow type holds text."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def texts_of(column: Any) -> Any:
    """Return a text column as one array of strings, with surrounding white space removed."""
    flat = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    flat = flat.dictionary_decode() if pa.types.is_dictionary(flat.type) else flat
    return pc.utf8_trim_whitespace(flat.cast(pa.string()))


def read_dates(texts: Any, order: str | None = None) -> Dates | None:
    """Parse trimmed texts as dates; None unless every one is a date, and all are in one format.

    `order` is what comes first where the year comes last, if the texts do not tell.
    """
    first = first_in(texts, order)
    return _read_year_first(texts if first is None else _year_first(texts, first))


def _read_year_first(texts: Any) -> Dates | None:
    dates = _cast(texts)
    if dates is None and pc.all(pc.match_substring_regex(texts, LIKE_ISO)).as_py():
        for pattern, written in YEAR_FIRST:
            texts = pc.replace_substring_regex(texts, pattern, written)
        dates = _cast(texts)
    return dates


def first_in(texts: Any, order: str | None = None) -> Order | None:
    """Return what comes first in dates with the year last; None if that cannot be told, or if not all are such dates.

    A number above 12 is a day. Dates with dots have the day first wherever they are usual; in 01/02/2024 it could be either, unless it is
    known from other dates of the same origin (`order`).
    """
    if not len(texts) or not pc.all(pc.match_substring_regex(texts, YEAR_LAST)).as_py():
        return None
    numbers = pc.extract_regex(texts, PARTS)
    first, second = (pc.max(pc.struct_field(numbers, name).cast(pa.int64())).as_py() for name in ("first", "second"))
    dots = pc.all(pc.match_substring_regex(texts, WITH_DOTS)).as_py()
    if first > 12 or (dots and second <= 12):
        return "day" if second <= 12 else None
    if second > 12:
        return "month"
    return "day" if order == "day" else "month" if order == "month" else None


def _year_first(texts: Any, first: Order) -> Any:
    """Return dates with the year last as 2024-1-31."""
    return pc.replace_substring_regex(texts, r"^(\d{1,2})[/.-](\d{1,2})[/.-](\d{4})", r"\3-\2-\1" if first == "day" else r"\3-\1-\2")


def _cast(texts: Any) -> Dates | None:
    months = pc.all(pc.match_substring_regex(texts, A_MONTH)).as_py()
    whole = pc.binary_join_element_wise(texts, "01", "-") if months else texts
    for kind in (pa.timestamp("us"), pa.timestamp("us", "UTC")):
        try:
            moments = whole.cast(kind)
        except pa.ArrowInvalid:
            continue
        only_days = kind.tz is None and (pc.max(pc.utf8_length(texts)).as_py() or 0) <= len("2024-01-31")
        return Dates(moments, "month" if months else "date" if only_days else "datetime")
    return None


def offsets_of(texts: Any) -> tuple[str, ...]:
    """Return the different offsets from UTC of trimmed texts, all of them times with one: `+01:00`; `+00:00` is also that of Z."""
    parts = pc.extract_regex(texts, OFFSET)
    sign, hours, minutes = (pc.struct_field(parts, name) for name in ("sign", "hours", "minutes"))
    written = pc.binary_join_element_wise(
        pc.binary_join_element_wise(sign, hours, ""), pc.if_else(pc.equal(minutes, ""), "00", minutes), ":"
    )
    return tuple(sorted({"+00:00" if offset in (None, "-00:00") else offset for offset in pc.unique(written).to_pylist()}))


def is_dates(column: Any) -> bool:
    """True if every row of a text column is a date that can be parsed."""
    return read_dates(texts_of(column)) is not None


def like_dates(texts: Any) -> Any:
    """Return a mask of the trimmed texts that look like dates in any format."""
    mask = pc.and_(pc.match_substring_regex(texts, MONTHS), pc.match_substring_regex(texts, r"\d"))
    for pattern in (LIKE_ISO, *LIKE_A_DATE):
        mask = pc.or_(mask, pc.match_substring_regex(texts, pattern))
    return mask


def share_of_dates(texts: Any) -> float:
    """Return the fraction of texts that look like dates with the year first."""
    return _share(pc.match_substring_regex(texts, LIKE_ISO))


def problem(texts: Any, label: str, *, counted: bool, order: str | None = None) -> str | None:
    """Explain what is wrong with texts that seem to be meant as dates: a row that is not a date, or the format of all of them.

    The format does not matter if rows are merely `counted`. `order` is that of dates with the year last.
    """
    if share_of_dates(texts) > MOST and _mostly_read(texts):
        row = _first_broken(texts)
        fact = f"row {row + 1}, column {label} is {texts[row].as_py()!r:.40}, which is not a date, or not in the format of the others"
        return f"{fact}; correct it or remove the row"
    alike = like_dates(texts)
    last = pc.match_substring_regex(texts, YEAR_LAST)
    if _share(last) > MOST and not counted:
        return _problem_with_year_last(texts, last, label, order)
    if _share(alike) > MOST and not counted:
        shown = texts[int(pc.index(alike, True).as_py())].as_py()
        fact = f"column {label} contains {shown!r:.40}, a date in an unsupported format"
        return f"{fact}; {WRITE}, or set data.frequency=none to keep rows in file order"
    return None


def _problem_with_year_last(texts: Any, last: Any, label: str, order: str | None) -> str:
    """Explain what is wrong with dates of which most have the year last: one that is no such date, or that all can be read in two ways."""
    first = first_in(texts.filter(last), order)
    if first is None:
        shown = texts[int(pc.index(last, True).as_py())].as_py()
        fact = f"column {label} contains {shown!r:.40}, and it cannot be told whether the day or the month comes first"
        return f"{fact}; {WRITE}"
    others = pc.index(last, False).as_py()
    row = _first_broken(_year_first(texts, first)) if others < 0 else int(others)
    fact = f"row {row + 1}, column {label} is {texts[row].as_py()!r:.40}, which is not a date, or not in the format of the others"
    return f"{fact}; correct it or remove the row"


def _mostly_read(texts: Any) -> bool:
    """True if most texts are dates that can be parsed, judged by a sample."""
    rows = range(0, len(texts), -(-len(texts) // SOME))
    return sum(_read_year_first(texts[row : row + 1]) is not None for row in rows) > MOST * len(rows)


def _share(mask: Any) -> float:
    return float(pc.mean(mask.cast(pa.float64())).as_py() or 0.0)


def _first_broken(texts: Any) -> int:
    """Return the first row that cannot be parsed together with the rows before it, by bisection."""
    good, bad = 0, len(texts)  # the first `good` rows can be parsed together, the first `bad` cannot
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if _read_year_first(texts[:middle]) is not None else (good, middle)
    return bad - 1
