"""`NamedRows`: rows in which content, target and weight stand in the fields that tasks read, whatever names the data has for them.

Names that the spec gives come first, then those of the training data, then text, tokens, steps, label and labels. If none of these is there
and the values leave one sensible reading, it is taken: the long texts are the text, the short values that recur are the label.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from carrywave.data.files.fields import FIELDS
from carrywave.data.files.rows import WEIGHT, Row, Rows
from carrywave.data.tables.choice import listed, missing_column
from carrywave.errors import DataError
from carrywave.spec.spec import Spec

TARGETS = ("label", "labels")
USUAL = ("label", "labels", "class", "category", "target", "sentiment", "intent", "polarity", "topic", "tags", "tag", "y", "score")
HEAD = 1000  # rows that are looked at
CLEARLY = 1.5  # how many times as long as others texts are on average
MOST_LABEL = 60  # characters of a label on average, at most
FRACTION = re.compile(r"[-+]?\d*\.\d*[1-9]\d*")
DECIMAL_COMMA = re.compile(r"\s*[-+]?\d+,(\d{1,2}|\d{4,})\s*")


class Known(NamedTuple):
    """The columns with the text and the label, None for the fields that tasks read anyway; and the labels of training data."""

    text: str | None = None
    label: str | None = None
    labels: tuple[str, ...] = ()


NOTHING = Known()


class NamedRow(Row):
    """A row with the fields that tasks read, made of one that has others."""

    original: Row


@dataclass(frozen=True)
class NamedRows(Rows):
    """Rows with the fields that tasks read."""

    known: Known = NOTHING  # the names of the fields that are read, where the data has names of its own for them
    notes: tuple[str, ...] = ()  # lines about the columns that are read and those that are not, if that is not plain
    left_out: int = 0  # rows without a content or a target
    given: tuple[str, ...] = ()  # the fields of the first row


def named_rows(rows: Rows, spec: Spec, labelled: bool, known: Known = NOTHING, notes: tuple[str, ...] = ()) -> NamedRows:
    """Rows with the fields that tasks read; if `labelled`, without those that lack a content or a target."""
    head = [row for _, row in rows.rows[:HEAD]]
    reader = _Reader(rows, spec, labelled, known)
    names = reader.names(head)
    named = [(number, reader.named(row, names, number)) for number, row in rows]
    streams = not labelled or (spec.task == "language" and spec.streams)
    kept = named if streams else [(number, row) for number, row in named if not reader.lacks(row)]
    notes = reader.notes(head[0] if head else {}, names, notes)
    return NamedRows(rows.name, kept, rows.kind, rows.join, names, notes, len(named) - len(kept), tuple(map(str, head[0] if head else ())))


@dataclass(frozen=True)
class _Reader:
    """How the fields of some rows are found."""

    rows: Rows
    spec: Spec
    labelled: bool
    known: Known

    @property
    def target(self) -> str:
        """The field that the task reads its target from."""
        return target_field(self.spec)

    @property
    def targeted(self) -> bool:
        """True if rows have targets."""
        return self.labelled and self.spec.task not in ("language", "forecasting")

    def lacks(self, row: Row) -> bool:
        """True for a row without a content or a target."""
        content = next((row[field] for field in FIELDS if row.get(field) is not None), None)
        words = isinstance(content, str) and self.spec.data.tokens == "word"  # of which a line end is one
        least = 2 if self.spec.task == "language" and not words else 1
        return is_empty(content, least) or (self.targeted and _is_missing(row.get(self.target), self.spec.data.multi_label))

    def notes(self, first: Row, names: Known, notes: tuple[str, ...]) -> tuple[str, ...]:
        """A line about the columns that are read and those that are not, if that is not plain, after others."""
        series = (self.spec.data.series or ()) if self.spec.each_step else ()
        content = names.text or next((field for field in FIELDS if first.get(field) is not None), "nothing")
        target = (names.label or self.target) if self.targeted else None
        others = [str(name) for name in first if name not in (content, target, self.spec.data.weight, "resets", WEIGHT, *series)]
        if not others and names == NOTHING:
            return notes
        told = [content if names.text is None else f"{content} as text"]
        told += [] if target is None else [target if names.label is None else f"{target} as {self.target}"]
        return (*notes, f"{self.rows.name}: reading {' and '.join(told)}{f'; ignored: {listed(others)}' if others else ''}")

    def names(self, head: Sequence[Row]) -> Known:
        """The names of the fields that are read, where the data has names of its own for them."""
        data, columns = self.spec.data, dict.fromkeys(chain(*head))
        there = {name for row in head for name, value in row.items() if value is not None}
        if self.labelled and self.known is NOTHING and head and data.weight is not None and data.weight not in columns:
            raise DataError(missing_column(self.rows.name, data.weight, list(head[0]), "data.weight"))
        text, label = data.text or (self.known.text if self.known.text in there else None), None
        if self.targeted:
            found = next((name for name in (self.known.label, self.target, *TARGETS) if name in there), None)
            label = data.label or (None if found == self.target else found)
        if text is None and there and not there & {*FIELDS}:
            text = self._text([name for name in columns if name not in (label, data.weight)], head)
        if self.targeted and data.label is None and found is None:
            content = text or next((field for field in FIELDS if field in there), None)
            label = self._label([name for name in columns if name not in (content, data.weight)], head, content)
        return Known(text, label)

    def _text(self, names: Sequence[str], head: Sequence[Row]) -> str | None:
        """The column with texts that are clearly longer than those of all others, or the only one with lists."""
        values = {name: [row[name] for row in head if row.get(name) not in (None, "")] for name in names}
        sizes = {name: sum(map(len, each)) / len(head) for name, each in values.items() if each and all(isinstance(x, str) for x in each)}
        lists = [name for name, each in values.items() if each and all(hasattr(x, "__len__") and not isinstance(x, str) for x in each)]
        if lists:
            return lists[0] if len(lists) == 1 else None
        worded = {name: size for name, size in sizes.items() if any(" " in each.strip() for each in values[name])}
        sizes = worded or sizes  # addresses of pages are long, too
        long = [name for name in sorted(sizes, key=lambda name: -sizes[name]) if CLEARLY * sizes[name] > max(sizes.values())]
        return self._only(long, "text")

    def _only(self, names: Sequence[str], what: str) -> str | None:
        if len(names) > 1:
            raise DataError(f"{self.rows.name}: which column has the {what} is not clear ({listed(names)}); set data.{what} to its name")
        return names[0] if names else None

    def _label(self, names: Sequence[str], head: Sequence[Row], content: str | None) -> str | None:
        """The column with values that may be targets, if there is one, or one with a usual name."""
        fits = {"regression": _are_numbers, "tagging": _are_tags, "transcription": _are_transcripts}.get(self.spec.task, _recur)
        some = [name for name in names if fits([row.get(name) for row in head], [row.get(content or "") for row in head])]
        varied = [name for name in some if len({repr(row.get(name)) for row in head}) > 1]
        some = varied or some
        usual = [name for name in some if name.lower() in USUAL] or [name for name in some if {*re.split(r"\W|_", name.lower())} & {*USUAL}]
        return self._only(usual if len(usual) == 1 else some, "label")

    def named(self, row: Row, names: Known, number: int) -> NamedRow:
        """A row with the fields that tasks read."""
        data, named = self.spec.data, NamedRow(row)
        named.original = row
        if names.text is not None:
            content = self._take(named, names.text, "data.text", number)
            for field in FIELDS:
                named.pop(field, None)
            named["text" if isinstance(content, str) or content is None else "tokens" if _is_tokens(content) else "steps"] = content
        if names.label is not None:
            named[self.target] = self._take(named, names.label, "data.label", number)
        if self.labelled and data.weight is not None and data.weight in named:  # a row without a weight has 1
            named[WEIGHT] = self._number(named.pop(data.weight))
        if self.targeted and self.spec.task == "regression" and isinstance(named.get(self.target), str):
            named[self.target] = self._number(named[self.target])
        if self.spec.task == "tagging" and not self.labelled and isinstance(named.get("text"), str):
            named["tokens"] = named.pop("text").split()
        return named

    def _number(self, value: Any) -> Any:
        """A cell of a table as a number, if it is one; None if it is empty."""
        if not isinstance(value, str):
            return value
        if not value.strip():
            return None
        told = self.spec.data.told.get("decimal")
        comma = told == "," or (told is None and DECIMAL_COMMA.fullmatch(value) is not None)
        try:
            return float(value.replace(",", ".") if comma else value)
        except ValueError:
            return value

    def _take(self, row: Row, name: str, setting: str, number: int) -> Any:
        if name not in row:
            raise DataError(missing_column(self.rows.where(number), name, list(row), setting if self.labelled else None))
        return row.pop(name) if self.labelled else row[name]  # what a prediction does not read may be carried through to it


def target_field(spec: Spec) -> str:
    """The field of a row that holds its target, or those of its steps."""
    return "labels" if spec.each_step or spec.task in ("tagging", "transcription") else "label"


def is_empty(content: Any, least: int = 1) -> bool:
    """True if there is nothing to read, or less than `least` tokens."""
    if isinstance(content, str):
        return not content.strip() or len(content) < least
    return content is None or (hasattr(content, "__len__") and len(content) < least)


def _is_missing(target: Any, several: bool) -> bool:
    """True if a row has no target: nothing, an empty cell, NaN, or -100."""
    if isinstance(target, str):
        return not target.strip()
    if target is None or hasattr(target, "__len__"):
        return target is None
    number = target.item() if hasattr(target, "item") and getattr(target, "ndim", 1) == 0 else target
    return not several and isinstance(number, int | float) and (number == -100 or number != number)


def _is_tokens(content: Any) -> bool:
    """True for words and for whole numbers, one for each step; anything else is a list of numeric steps."""
    first = content[0] if hasattr(content, "__len__") and len(content) and hasattr(content, "__getitem__") else None
    return isinstance(first, str) or (hasattr(first, "__index__") and not isinstance(first, bool) and not getattr(first, "ndim", 0))


def _recur(values: Sequence[Any], _: Sequence[Any]) -> bool:
    """True for short values that come again, of which hardly one is missing."""
    there = [str(value) for value in values if value is not None and value != "" and not isinstance(value, float | list | dict)]
    if any(FRACTION.fullmatch(value) for value in there):
        return False
    different = len(set(there))
    return (
        len(there) > 0.9 * len(values)
        and different <= max(2, len(there) // 2)
        and sum(map(len, there)) <= MOST_LABEL * len(there)
        and (different > 1 or len(values) < 2)
    )


def _are_numbers(values: Sequence[Any], _: Sequence[Any]) -> bool:
    def number(value: Any) -> bool:
        try:
            return value is None or value == "" or float(value) is not None
        except (TypeError, ValueError):
            return isinstance(value, str) and DECIMAL_COMMA.fullmatch(value) is not None

    return any(value not in (None, "") for value in values) and all(map(number, values))


def _are_tags(values: Sequence[Any], contents: Sequence[Any]) -> bool:
    pairs = [(value, content) for value, content in zip(values, contents, strict=True) if value is not None and content is not None]
    return bool(pairs) and all(hasattr(v, "__len__") and not isinstance(v, str) and len(v) == len(c) for v, c in pairs)


def _are_transcripts(values: Sequence[Any], _: Sequence[Any]) -> bool:
    return all(value is None or isinstance(value, str | list) for value in values)
