"""A common `Rows` interface to files of examples: JSON lines or a JSON array, lines of text, CSV and Parquet.

Rows are read one at a time and can be iterated repeatedly; each can be located in an error message.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow.parquet as pa_parquet

from carrywave.data.files import json_array
from carrywave.data.files.frame_file import read_frame
from carrywave.data.files.source import Source
from carrywave.errors import DataError
from carrywave.spec.data_spec import DataSpec

Row = dict[str, Any]
SHOWN = 8  # column names in a message, at most
BATCH_ROWS = 1024
A_NUMBER = r"^\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*$"
A_WHOLE = r"\s*[-+]?\d{1,40}\s*"  # exact as an int: one beyond 2**53 is refused where numbers are read
EXAMPLE = '{"steps": [[0.1, 0.2], …], "label": "a"}'


WEIGHT, NO_WEIGHT = "weight", "none"  # the field that weights are read from, and what data.weight says if they are not read


class Rows(Protocol):
    """Numbered rows that can be iterated several times."""

    @property
    def name(self) -> str:
        """Name of the whole in error messages."""

    @property
    def join(self) -> bool:
        """True if texts may be concatenated, so that a stream runs from one row into the next."""

    def __iter__(self) -> Iterator[tuple[int, Row]]: ...

    def count(self) -> int:
        """Count the rows, without parsing them if possible."""

    def where(self, number: int) -> str:
        """Return the location of a row for error messages."""


@dataclass(frozen=True)
class _FileRows:
    """Rows of one file."""

    source: Source

    @property
    def name(self) -> str:
        """The file name."""
        return self.source.name


@dataclass(frozen=True)
class _Lines(_FileRows):
    """Rows that are lines; blank ones do not count."""

    def count(self) -> int:
        """Count the non-blank lines."""
        return sum(1 for _, line in self.source.lines() if line.strip())

    def where(self, number: int) -> str:
        """Return file and line number."""
        return f"{self.name}:{number}"


@dataclass(frozen=True)
class _TableRows(_FileRows):
    """Rows of a table."""

    def where(self, number: int) -> str:
        """Return file and row number."""
        return f"{self.name}: row {number}"


@dataclass(frozen=True)
class JsonRows(_Lines):
    """One JSON object per line; blank lines are skipped."""

    join: bool = True

    def __iter__(self) -> Iterator[tuple[int, Row]]:
        for number, line in self.source.lines():
            if line.strip():
                yield number, self._parse(number, line)

    def _parse(self, number: int, line: bytes) -> Row:
        try:
            row = json_array.PARSER.decode(line.decode())
        except UnicodeDecodeError as error:
            raise DataError(f"{self.where(number)}: byte {error.start} of the line is not valid utf-8; set data.encoding") from error
        except json_array.GivenTwice as error:
            raise DataError(f"{self.where(number)}: {error}") from None
        except (ValueError, RecursionError) as error:  # JSONDecodeError is a ValueError
            raise DataError(
                f"{self.where(number)}: the line is not JSON ({str(error)[:100]}); write one object per line: {EXAMPLE}"
            ) from error
        if not isinstance(row, dict):
            raise DataError(
                f"{self.where(number)}: the line is a JSON {_json_type(row)}, not an object; write one object per line: {EXAMPLE}"
            )
        return row


@dataclass(frozen=True)
class JsonArrayRows(_TableRows):
    """The objects of one JSON array."""

    join: bool = True

    def __iter__(self) -> Iterator[tuple[int, Row]]:
        return enumerate(json_array.objects(self.source, self.where), start=1)

    def count(self) -> int:
        """Count the objects."""
        return sum(1 for _ in self)


@dataclass(frozen=True)
class LineRows(_Lines):
    """Each non-blank line of a text file is a row with the field `text`."""

    join: bool = False

    def __iter__(self) -> Iterator[tuple[int, Row]]:
        for number, line in self.source.lines():
            if line.strip():
                try:
                    yield number, {"text": line.decode().rstrip("\r")}
                except UnicodeDecodeError as error:
                    raise DataError(
                        f"{self.where(number)}: byte {error.start} of the line is not valid utf-8; set data.encoding"
                    ) from error


@dataclass(frozen=True)
class ParquetRows(_TableRows):
    """Rows of a Parquet file."""

    join: bool = True

    def _open(self) -> Any:
        return self.source.guard(lambda: pa_parquet.ParquetFile(self.source.path, memory_map=True))

    def __iter__(self) -> Iterator[tuple[int, Row]]:
        with self._open() as file:
            yield from _batches(file.iter_batches(batch_size=BATCH_ROWS), self.source)

    def count(self) -> int:
        """Return the row count from the file's metadata."""
        with self._open() as file:
            return int(file.metadata.num_rows)


@dataclass(frozen=True)
class CsvRows(_TableRows):
    """Rows of a CSV file, whose columns all stay strings; only a label may be a number, and a weight must be one."""

    numeric_label: bool
    data: DataSpec
    text: str = "text"
    label: str = "label"
    weight: str | None = WEIGHT
    decimal: str = "auto"
    join: bool = True
    as_text: tuple[str, ...] = ()  # columns that stay as they are, even if the label is among them

    def __iter__(self) -> Iterator[tuple[int, Row]]:
        frame, _ = read_frame(self.source, self.data, as_text=True)
        for number, values in enumerate(zip(*(frame[name].tolist() for name in frame.columns), strict=True), start=1):
            row: Row = dict(zip(frame.columns, values, strict=True))
            if self.weight in row and self.weight not in self.as_text:
                row[self.weight] = self._number(number, self.weight, row[self.weight])
            if self.numeric_label and self.label in row:
                row[self.label] = self._number(number, self.label, row[self.label])
            elif self.label in row and self.label not in self.as_text and not (row[self.label] or "").strip():
                row[self.label] = None  # an empty cell means no label, and is not a class
            yield number, row

    def _number(self, number: int, column: str, label: str | None) -> int | float | None:
        """Parse a regression label or a weight; an empty cell is None."""
        if label is None or not label.strip():
            return None
        try:
            written = label.replace(",", ".") if self.decimal == "," and "." not in label else label
            if re.fullmatch(A_NUMBER, written, re.ASCII) is None or (
                self.decimal == "," and "." in label
            ):  # float() also reads 1_000, and other digits
                raise ValueError(label)
            return int(written) if re.fullmatch(A_WHOLE, written) else float(written)
        except ValueError:
            remedy = "set data.decimal=, if that is its decimal mark" if "," in label and self.decimal == "auto" else "correct it"
            fact = f"column {column} is {label!r:.40}, which is text, not a number"
            raise DataError(f"{self.where(number)}, {fact}; {remedy} or remove the row") from None

    def count(self) -> int:
        """Count the rows."""
        return sum(1 for _ in self)


def _batches(batches: Iterator[Any], source: Source) -> Iterator[tuple[int, Row]]:
    number = 0
    while (batch := source.guard(lambda: next(batches, None))) is not None:
        names = batch.schema.names
        if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
            raise DataError(f"{source.name}: duplicate column {twice}; give every column a unique name")
        for row in batch.to_pylist():
            number += 1
            yield number, row


class RenamedRow(Row):
    """A row with the fields that tasks read, made of one that has others."""

    original: Row


@dataclass(frozen=True)
class RenamedRows:
    """Rows whose text, target and weight stand in fields with other names."""

    rows: Rows
    text: str | None
    label: str | None
    target: str  # the field that the task reads: label or labels
    labelled: bool
    weight: str | None = None

    @property
    def name(self) -> str:
        """The name of the rows."""
        return self.rows.name

    @property
    def join(self) -> bool:
        """As the rows themselves."""
        return self.rows.join

    def count(self) -> int:
        """Count the rows."""
        return self.rows.count()

    def where(self, number: int) -> str:
        """Return the location of a row."""
        return self.rows.where(number)

    def __iter__(self) -> Iterator[tuple[int, Row]]:
        for number, row in self.rows:
            renamed = RenamedRow(self._renamed(row, number))
            renamed.original = row
            yield number, renamed

    def _renamed(self, row: Row, number: int) -> Row:
        renamed = dict(row)
        if self.text is not None:
            content = self._take(renamed, self.text, "data.text", number, row)
            renamed = {name: value for name, value in renamed.items() if name not in ("text", "tokens", "steps")}
            renamed["text" if isinstance(content, str) or content is None else "tokens" if _is_tokens(content) else "steps"] = content
        if self.label is not None and self.labelled:
            renamed[self.target] = self._take(renamed, self.label, "data.label", number, row)
        if self.weight == NO_WEIGHT and self.labelled:
            renamed.pop(WEIGHT, None)
        elif self.weight is not None and self.labelled:
            renamed[WEIGHT] = self._take(renamed, self.weight, "data.weight", number, row)
        return renamed

    def _take(self, row: Row, name: str, setting: str, number: int, original: Row) -> Any:
        if name not in row:
            raise DataError(missing_column(self.where(number), name, list(original), setting if self.labelled else None))
        return row.pop(name) if self.labelled else row[name]  # what a prediction does not read may be carried through to it


def _is_tokens(content: Any) -> bool:
    """True for words and for whole numbers, one for each step; anything else is a list of numeric steps."""
    first = content[0] if hasattr(content, "__len__") and len(content) and hasattr(content, "__getitem__") else None
    return isinstance(first, str) or (hasattr(first, "__index__") and not isinstance(first, bool) and not getattr(first, "ndim", 0))


def renamed(rows: Rows, data: DataSpec, *, target: str, labelled: bool) -> Rows:
    """Return the rows with the fields that tasks read, where the spec says that others hold them; `target` is that of the label."""
    if data.text is None and data.label is None and data.weight is None:
        return rows
    return RenamedRows(rows, data.text, data.label, target, labelled, data.weight)


def open_rows(
    source: Source,
    *,
    numeric_label: bool,
    data: DataSpec | None = None,
    target: str = "label",
    labelled: bool = True,
    as_text: tuple[str, ...] = (),
) -> Rows:
    """Open a file as rows, according to its format and to how the spec says it is written.

    If not `labelled`, the column of the target may be missing. Columns of `as_text` stay text in CSV: 007 is not 7.
    """
    data = data or DataSpec()
    rows: Rows
    if source.format == "jsonl":
        rows = JsonArrayRows(source) if json_array.is_array(source) else JsonRows(source)
    elif source.format == "parquet":
        rows = ParquetRows(source)
    elif source.format == "csv":
        weight = (None if data.weight == NO_WEIGHT else data.weight or WEIGHT) if labelled else None
        rows = CsvRows(source, numeric_label, data, data.text or "text", data.label or "label", weight, data.decimal, as_text=as_text)
    else:
        rows = LineRows(source)
    return renamed(rows, data, target=target, labelled=labelled)


def _json_type(value: Any) -> str:
    names = {list: "list", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}
    return names[type(value)]


def missing_column(where: str, column: str, names: Sequence[str], setting: str | None) -> str:
    """Return the message; `setting` is the key that names the column, None if the training data had it."""
    fact = f"{where} has no column {column!r}" + (f" ({setting})" if setting else ", which the training data has")
    near = difflib.get_close_matches(column, names, n=1, cutoff=0.6) or [name for name in names if name.lower() == column.lower()]
    if near:
        return f"{fact}; did you mean {quoted(near[0])}?" if setting else f"{fact}; if it is {quoted(near[0])}, rename that"
    shown = ", ".join(map(quoted, names[:SHOWN])) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    return f"{fact}; use one of {shown}" if setting else f"{fact} (here there are {shown}); add it"


def quoted(column: str) -> str:
    """Return a name as it is, or in quotes if it would not be seen."""
    return column if column.strip() else repr(column)
