"""A common `Rows` interface to files of examples: JSON lines, lines of text, CSV and Parquet.

Rows are read one at a time and can be iterated repeatedly; each can be located in an error message.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pa_parquet

from carrywave.data.files.quotes import check_quotes
from carrywave.data.files.source import Source, to_utf8
from carrywave.errors import DataError

Row = dict[str, Any]
BATCH_ROWS = 1024
EXAMPLE = '{"steps": [[0.1, 0.2], …], "label": "a"}'


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
            row = json.loads(line.decode())
        except UnicodeDecodeError as error:
            raise DataError(f"{self.where(number)}: byte {error.start} of the line is not valid utf-8; {to_utf8(self.name)}") from error
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
                        f"{self.where(number)}: byte {error.start} of the line is not valid utf-8; {to_utf8(self.name)}"
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
    """Rows of a CSV file; the columns text and label stay strings."""

    numeric_label: bool
    join: bool = True
    as_text: tuple[str, ...] = ()  # further columns that stay strings

    def __iter__(self) -> Iterator[tuple[int, Row]]:
        # Read both columns as strings: inferring types from the first block would turn "007" into 7 and could be wrong for the next.
        types = {"text": pa.string(), "label": pa.string()} | dict.fromkeys(self.as_text, pa.string())
        delimiter = self.source.separator()
        self.source.check_utf8()
        check_quotes(self.source, delimiter)
        with self.source.open() as stream:
            reader = self.source.guard(
                lambda: pa_csv.open_csv(
                    stream,
                    parse_options=pa_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
                    convert_options=pa_csv.ConvertOptions(column_types=types),
                )
            )
            for number, row in _batches(iter(reader), self.source):
                if self.numeric_label and "label" in row:
                    row["label"] = self._number(number, row["label"])
                elif not (row.get("label") or "").strip() and "label" not in self.as_text:
                    row.pop("label", None)  # an empty cell means no label, and is not a class
                yield number, row

    def _number(self, number: int, label: str | None) -> float | None:
        """Parse a regression label; an empty cell is None."""
        if label is None or not label.strip():
            return None
        try:
            return float(label)
        except ValueError:
            raise DataError(
                f"{self.where(number)}, column label is {label!r:.40}, which is text, not a number; correct it or remove the row"
            ) from None

    def count(self) -> int:
        """Count the rows."""
        return sum(1 for _ in self)


def _batches(batches: Iterator[Any], source: Source) -> Iterator[tuple[int, Row]]:
    number = 0
    while (batch := source.guard(lambda: next(batches, None))) is not None:
        for row in batch.to_pylist():
            number += 1
            yield number, row


def open_rows(source: Source, *, numeric_label: bool, as_text: tuple[str, ...] = ()) -> Rows:
    """Open a file as rows, according to its format; columns of `as_text` stay text in CSV: 007 is not 7."""
    if source.format == "jsonl":
        return JsonRows(source)
    if source.format == "parquet":
        return ParquetRows(source)
    if source.format == "csv":
        return CsvRows(source, numeric_label, as_text=as_text)
    return LineRows(source)


def _json_type(value: Any) -> str:
    names = {list: "list", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}
    return names[type(value)]
