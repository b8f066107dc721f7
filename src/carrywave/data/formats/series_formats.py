"""Sequences of numbers as their archives write them: UCR tables, .ts and .arff with a label each; and .tsf, series to forecast.

Values that are missing at the end of a sequence are not there: series of unequal length are filled up so. Those within are interpolated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from carrywave.data.files.rows import Row
from carrywave.data.formats.field_formats import Read
from carrywave.errors import DataError

Values = NDArray[np.float64]
MISSING = ["", "?", "NaN", "nan", "NA"]
SHOWN = 5  # labels in a line
LEAST_COLUMNS = 4  # of a table of numbers, from which its rows are sequences
OFFSETS: dict[str, pd.DateOffset] = {
    "yearly": pd.DateOffset(years=1),
    "quarterly": pd.DateOffset(months=3),
    "monthly": pd.DateOffset(months=1),
    "weekly": pd.DateOffset(weeks=1),
    "daily": pd.DateOffset(days=1),
    "hourly": pd.DateOffset(hours=1),
    "half_hourly": pd.DateOffset(minutes=30),
    "minutely": pd.DateOffset(minutes=1),
    "secondly": pd.DateOffset(seconds=1),
}
TIMED = re.compile(r"\([^(),]*,([^()]*)\)")  # a value with its time
MARK = re.compile(r"^\s*@(\w+)[ \t]*(.*?)\s*$", re.MULTILINE)


def series_of_frame(frame: pd.DataFrame, label: str | None) -> Read | None:
    """A table of nothing but numbers, as in the UCR archive: a sequence in each row, beside a label that recurs, in the first column."""
    named = [name for name in frame.columns if str(name).lower() in ("label", "labels", "class", "target")]
    column = label if label is not None else named[0] if len(named) == 1 else next(iter(frame.columns), None)
    if len(frame.columns) < LEAST_COLUMNS or not len(frame) or column not in frame.columns:
        return None
    written = frame.drop(columns=[column])
    steps = written.apply(pd.to_numeric, errors="coerce")
    if (steps.isna() & ~written.isin(MISSING)).any(axis=None):
        return None
    labels = [_whole(code) for code in frame[column].astype(str)]
    rows: list[Row] = [{"steps": _filled([row]), "label": label} for row, label in zip(steps.to_numpy(np.float64), labels, strict=True)]
    some = sorted(set(labels))
    shown = ", ".join([*some[:SHOWN], *(["…"] if len(some) > SHOWN else [])])
    return Read(rows, f"each row is a sequence of numbers; labels are column {column} ({shown})")


def ts(text: str) -> Read | None:
    """The .ts files of UEA: dimensions separated by colons, the label last."""
    marks = {name.lower(): value for name, value in MARK.findall(text.partition("@data")[0])}
    if "problemname" not in marks or not (body := re.split(r"(?im)^@data\s*$", text, maxsplit=1)[1:]):
        return None
    labelled = any(marks.get(name, "false").lower().startswith("true") for name in ("classlabel", "targetlabel"))
    rows: list[Row] = []
    for line in _rows_of(TIMED.sub(r"\1", body[0])):
        dimensions, target = (line.split(":")[:-1], line.split(":")[-1].strip()) if labelled else (line.split(":"), None)
        rows.append({"steps": _filled([_numbers(each) for each in dimensions]), "label": target})
    return Read(rows, "a sequence of numbers on each line (.ts), its label last")


def arff(text: str) -> Read | None:
    """The .arff files of UCR and UEA, whose dimensions are lines of a relation; the label is the last attribute."""
    head, *body = re.split(r"(?im)^\s*@data\s*$", text, maxsplit=1)
    if not body or "relation" not in [name.lower() for name, _ in MARK.findall(head)]:
        return None
    rows: list[Row] = []
    for line in _rows_of(body[0], comment="%"):
        relation = re.match(r"""(['"])(.*)\1\s*,(.*)$""", line)
        content, target = (relation[2], relation[3]) if relation else line.rsplit(",", 1)
        dimensions = content.split("\\n") if relation else [content]
        rows.append({"steps": _filled([_numbers(each) for each in dimensions]), "label": target.strip().strip("'\"")})
    return Read(rows, "a sequence of numbers on each line (.arff), its label last")


def tsf(text: str) -> pd.DataFrame:
    """The .tsf files of the Monash archive in long format: the columns of their text attributes (series_name), time and value.

    Times are dates if series have a start and a frequency, or else count from 0.
    """
    head, *body = re.split(r"(?im)^@data\s*$", text, maxsplit=1)
    marks = MARK.findall(head)
    frequency = next((value for name, value in marks if name.lower() == "frequency"), "")
    attributes = [value.split() for name, value in marks if name.lower() == "attribute"]
    parts: list[pd.DataFrame] = []
    for line in _rows_of(body[0]):
        *given, values = line.split(":")
        each = {name: value for (name, _), value in zip(attributes, given, strict=True)}
        numbers = _numbers(values)
        start = next((each.pop(name) for name, kind in attributes if kind == "date"), None)
        parts.append(pd.DataFrame({**each, "time": _times(start, frequency, len(numbers)), "value": numbers}))
    return pd.concat(parts, ignore_index=True)


def _times(start: str | None, frequency: str, count: int) -> pd.Index:
    """Times from a start such as 1979-01-01 00-00-00 at a frequency such as monthly or 10_minutes; numbers from 0 if one is not known."""
    many, _, unit = frequency.partition("_")
    offset = OFFSETS.get(frequency) or (pd.DateOffset(**{unit: int(many)}) if many.isdecimal() else None)
    if start is None or offset is None:
        return pd.RangeIndex(count)
    day, _, time = start.partition(" ")
    return pd.date_range(f"{day} {time.replace('-', ':')}", periods=count, freq=offset)


def _rows_of(body: str, comment: str = "#") -> list[str]:
    return [line.strip() for line in body.replace("\r", "").split("\n") if line.strip() and not line.startswith(comment)]


def _numbers(text: str) -> Values:
    cells = (cell.strip() for cell in text.split(","))
    try:
        return np.array([np.nan if cell in MISSING else float(cell) for cell in cells])
    except ValueError as error:
        raise DataError(f"a sequence of numbers has something else ({error}); check that the file is complete") from None


def _filled(dimensions: Sequence[Values]) -> Values:
    """Dimensions side by side [steps, dimensions], without the steps at the end in which all are missing."""
    longest = max(map(len, dimensions))
    steps = np.column_stack([np.pad(each, (0, longest - len(each)), constant_values=np.nan) for each in dimensions])
    ends = np.flatnonzero(np.isfinite(steps).any(axis=1)).max(initial=-1) + 1
    return np.asarray(pd.DataFrame(steps[:ends]).interpolate(limit_direction="both").fillna(0.0), np.float64)


def _whole(text: str) -> str:
    """A label that is written as a number, without decimals that say nothing: 1.0000000e+00 is 1."""
    number = pd.to_numeric(text, errors="coerce")
    return str(int(number)) if number == number // 1 else text
