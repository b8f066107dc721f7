"""A common `Rows` interface to examples, and the rows that files hold: JSON lines or an array, lines of text, Parquet, or a list in memory.

Rows can be iterated repeatedly; each can be located in an error message. JSON lines and lines of text are read one at a time.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow.parquet as pa_parquet

from carrywave.data.files.source import Source
from carrywave.errors import DataError

Row = dict[str, Any]
BATCH_ROWS = 1024
SHOWN = 8  # names in a message
EXAMPLE = '{"steps": [[0.1, 0.2], …], "label": "a"}'
WEIGHT = "(weight)"  # the field of a row that its weight is read from, whatever name it has in the data


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
        """Count the rows."""

    def where(self, number: int) -> str:
        """Return the location of a row for error messages."""


@dataclass(frozen=True)
class ListRows:
    """Rows in memory."""

    name: str
    rows: Sequence[Row]
    join: bool = True

    def __iter__(self) -> Iterator[tuple[int, Row]]:
        return enumerate(self.rows, start=1)

    def count(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    def where(self, number: int) -> str:
        """Return file and row number."""
        return f"{self.name}: row {number}"


@dataclass(frozen=True)
class LineRows:
    """Rows that are lines of a file, of which blank ones do not count: each a row with the field `text`."""

    source: Source
    join: bool = False

    @property
    def name(self) -> str:
        """The file name."""
        return self.source.name

    def __iter__(self) -> Iterator[tuple[int, Row]]:
        for number, line in self.source.lines():
            if line.strip():
                try:
                    text = line.decode()
                except UnicodeDecodeError as error:
                    raise DataError(
                        f"{self.where(number)}: byte {error.start} of the line is not valid utf-8; set data.encoding"
                    ) from error
                yield number, self._row(number, text)

    def _row(self, number: int, line: str) -> Row:
        return {"text": line.rstrip("\r")}

    def count(self) -> int:
        """Count the lines."""
        return sum(1 for _, line in self.source.lines() if line.strip())

    def where(self, number: int) -> str:
        """Return file and line number."""
        return f"{self.name}:{number}"


@dataclass(frozen=True)
class JsonRows(LineRows):
    """One JSON object per line."""

    join: bool = True

    def _row(self, number: int, line: str) -> Row:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # JSONDecodeError is a ValueError
            fact = f"{self.where(number)}: the line is not JSON ({str(error)[:100]})"
            raise DataError(f"{fact}; write one object per line: {EXAMPLE}") from error
        if not isinstance(row, dict):
            raise DataError(f"{self.where(number)}: the line is not a JSON object; write one object per line: {EXAMPLE}")
        return row


@dataclass(frozen=True)
class ParquetRows:
    """Rows of a Parquet file."""

    source: Source
    join: bool = True

    @property
    def name(self) -> str:
        """The file name."""
        return self.source.name

    def _open(self) -> Any:
        return self.source.guard(lambda: pa_parquet.ParquetFile(self.source.path, memory_map=True))

    def __iter__(self) -> Iterator[tuple[int, Row]]:
        number = 0
        with self._open() as file:
            batches = file.iter_batches(batch_size=BATCH_ROWS)
            while (batch := self.source.guard(lambda: next(batches, None))) is not None:
                for row in batch.to_pylist():
                    number += 1
                    yield number, row

    def count(self) -> int:
        """Return the row count from the file's metadata."""
        with self._open() as file:
            return int(file.metadata.num_rows)

    def where(self, number: int) -> str:
        """Return file and row number."""
        return f"{self.name}: row {number}"


def json_rows(source: Source) -> Rows:
    """One JSON object per line, or one array of objects."""
    if not source.head().removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        return JsonRows(source)
    try:
        rows = json.loads(b"".join(source.blocks()))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{source.name} is not JSON ({str(error)[:100]}); write an array of objects, or one object per line") from error
    if not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{source.name} is a JSON array with something else than objects; write an array of objects: [{EXAMPLE}, …]")
    return ListRows(source.name, rows)


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
