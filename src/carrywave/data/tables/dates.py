"""Dates that are written as text: those with the year first are read, others are known by their look, so that none is taken for a word."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

A_MONTH = r"^\d{4}-\d{2}$"
YEAR_FIRST = (  # 2024/1/31 and 2024.01.31, step by step as 2024-01-31
    (r"^(\d{4})[/.-](\d{1,2})[/.-](\d{1,2})\b", r"\1-\2-\3"),
    (r"^(\d{4})-(\d)-", r"\1-0\2-"),
    (r"^(\d{4}-\d{2})-(\d)($|[ T])", r"\1-0\2\3"),
)
LIKE_ISO = r"^\d{4}[/.-]\d{1,2}([/.-]\d{1,2}([ T]\d{1,2}:.*)?)?$"
MONTHS = r"(?i)\b(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\b"
LIKE_A_DATE = (
    r"^\d{1,4}[./-]\d{1,2}[./-]\d{1,4}\b",  # 31/01/2024, 01-31-24, 31.1.2024 23:00
    r"^\d{4}[./]\d{1,2}$|^\d{1,2}[./-]\d{4}$",  # 2024/01, 01.2024
    r"^(19|20)\d{2}(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])([ T_]?\d{4}.*)?$",  # 20240131
    r"(?i)^q[1-4]\W*\d{2,4}$",  # Q1 2024: as text it comes before Q2 2023
)
MOST = 0.5  # share of dates among the rows from which the others are mistakes
SOME = 100  # rows

DateShape = Literal["date", "month", "datetime"]
WRITE = "write 2024-01-31 or 2024-01-31 23:00:00"


class Dates(NamedTuple):
    """Dates as Arrow timestamps of microseconds."""

    moments: Any
    shape: DateShape


def is_text(kind: Any) -> bool:
    """Whether an Arrow type holds text."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def texts_of(column: Any) -> Any:
    """A column of text as one array of strings without white space around them."""
    flat = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    flat = flat.dictionary_decode() if pa.types.is_dictionary(flat.type) else flat
    return pc.utf8_trim_whitespace(flat.cast(pa.string()))


def read_dates(texts: Any) -> Dates | None:
    """The dates in trimmed texts; None unless every one is such."""
    found = _cast(texts)
    if found is None and pc.all(pc.match_substring_regex(texts, LIKE_ISO)).as_py():
        for pattern, written in YEAR_FIRST:
            texts = pc.replace_substring_regex(texts, pattern, written)
        found = _cast(texts)
    return found


def _cast(texts: Any) -> Dates | None:
    months = pc.all(pc.match_substring_regex(texts, A_MONTH)).as_py()
    whole = pc.binary_join_element_wise(texts, "01", "-") if months else texts
    for kind in (pa.timestamp("us"), pa.timestamp("us", "UTC")):
        try:
            found = whole.cast(kind)
        except pa.ArrowInvalid:
            continue
        only_days = kind.tz is None and (pc.max(pc.utf8_length(texts)).as_py() or 0) <= len("2024-01-31")
        return Dates(found, "month" if months else "date" if only_days else "datetime")
    return None


def is_dates(column: Any) -> bool:
    """Whether a column of text holds dates that can be read, in every row."""
    return read_dates(texts_of(column)) is not None


def like_dates(texts: Any) -> Any:
    """Which trimmed texts look like dates of any form."""
    found = pc.and_(pc.match_substring_regex(texts, MONTHS), pc.match_substring_regex(texts, r"\d"))
    for pattern in (LIKE_ISO, *LIKE_A_DATE):
        found = pc.or_(found, pc.match_substring_regex(texts, pattern))
    return found


def share_of_dates(texts: Any) -> float:
    """The share of texts that look like dates with the year first."""
    return _share(pc.match_substring_regex(texts, LIKE_ISO))


def problem(texts: Any, label: str, *, counted: bool) -> str | None:
    """What is wrong with texts that are not all dates, where they seem to be meant as dates: a row that is none, or the form of all.

    The form does not matter where rows are `counted`.
    """
    if share_of_dates(texts) > MOST and _mostly_read(texts):
        row = _first_broken(texts)
        fact = f"row {row + 1}, column {label} is {texts[row].as_py()!r:.40}, which is no date, or not written as those before it"
        return f"{fact}; correct it, or remove the row"
    alike = like_dates(texts)
    if _share(alike) > MOST and not counted:
        shown = texts[int(pc.index(alike, True).as_py())].as_py()
        fact = f"column {label} holds {shown!r:.40}, a date in a form that is not read"
        return f"{fact}; {WRITE}, or set data.frequency=none to take the rows in the order of the file"
    return None


def _mostly_read(texts: Any) -> bool:
    """Whether most texts are dates that can be read, judged by some of them."""
    rows = range(0, len(texts), -(-len(texts) // SOME))
    return sum(read_dates(texts[row : row + 1]) is not None for row in rows) > MOST * len(rows)


def _share(mask: Any) -> float:
    return float(pc.mean(mask.cast(pa.float64())).as_py() or 0.0)


def _first_broken(texts: Any) -> int:
    """The first row that the rows before it cannot be read together with."""
    good, bad = 0, len(texts)  # so many rows from the first can be read together, and so many cannot
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if read_dates(texts[:middle]) is not None else (good, middle)
    return bad - 1
