"""`Rows` of examples, and those that files, frames and lists hold: JSON lines or an array, lines of text, Arrow tables.

Rows can be iterated repeatedly; each can be located in an error message. JSON lines and lines of text are read one at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow.parquet as pa_parquet

from carrywave.data.files.source import Source
from carrywave.errors import DataError

Row = dict[str, Any]
BATCH_ROWS = 1024
SHOWN = 8  # names in a message
EXAMPLE = '{"steps": [[0.1, 0.2], …], "label": "a"}'
WEIGHT = "(weight)"  # the field of a row that its weight is read from, whatever name it has in the data
ITEM, ROW, LINE = " item ", ": row ", ":"  # what stands between the name of the data and the number of a row


@dataclass(frozen=True)
class Rows:
    """Numbered rows, which `read` gives anew each time; if they `join`, a stream of text runs from one into the next."""

    name: str
    read: Callable[[], Iterable[tuple[int, Row]]]
    kind: str = ITEM
    join: bool = True

    def __iter__(self) -> Iterator[tuple[int, Row]]:
        return iter(self.read())

    def where(self, number: int) -> str:
        """Return name and number."""
        return f"{self.name}{self.kind}{number}"


def listed_rows(name: str, rows: Sequence[Row]) -> Rows:
    """The rows of a file that was read as a whole."""
    return Rows(name, lambda: enumerate(rows, start=1), ROW)


def text_rows(source: Source) -> Rows:
    """Each line that is not blank is a row with the field `text`."""
    return Rows(source.name, lambda: _lines(source, lambda line: {"text": line.decode().removesuffix("\r")}), LINE, join=False)


def json_rows(source: Source) -> Rows:
    """One JSON object per line, or one array of objects."""
    if not source.head().removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        return Rows(source.name, lambda: _lines(source, _an_object), LINE)
    try:
        return listed_rows(source.name, [_an_object(row) for row in json.loads(source.content)])
    except (ValueError, RecursionError) as error:
        raise DataError(f"{source.name} is not JSON ({str(error)[:100]}); write an array of objects: [{EXAMPLE}, …]") from error


def _lines(source: Source, read: Callable[[bytes], Row]) -> Iterator[tuple[int, Row]]:
    for number, line in source.lines():
        if line.strip():
            try:
                row = read(line)
            except (ValueError, RecursionError) as error:  # JSONDecodeError is a ValueError
                fact = f"{source.name}:{number}: the line is not JSON ({str(error)[:100]})"
                raise DataError(f"{fact}; write one object per line: {EXAMPLE}") from error
            yield number, row


def _an_object(written: Any) -> Row:
    row = json.loads(written) if isinstance(written, bytes) else written
    if not isinstance(row, dict):
        raise ValueError("it is not an object")
    return row


def table_rows(tables: Iterable[Any], start: int = 0) -> Iterator[tuple[int, Row]]:
    """The rows of Arrow tables, or of batches of them, one after another."""
    return enumerate((row for table in tables for row in table.to_pylist()), start)


def parquet_rows(source: Source) -> Rows:
    """The rows of a Parquet file."""
    table = source.guard(lambda: pa_parquet.read_table(source.path))
    return Rows(source.name, lambda: table_rows(table.to_batches(max_chunksize=BATCH_ROWS), start=1), ROW)
