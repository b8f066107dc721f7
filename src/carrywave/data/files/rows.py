"""`Rows` of examples, and those that files hold: JSON lines or an array, lines of text, Arrow tables. Each can be located in a message."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow.parquet as pa_parquet

from carrywave.data.files.source import HEAD_BYTES, Source
from carrywave.errors import DataError

Row = dict[str, Any]
BLANKS = b"\xef\xbb\xbf \t\r\n"
SHOWN = 8  # names in a message
EXAMPLE = '{"steps": [[0.1, 0.2], …], "label": "a"}'
WEIGHT = "(weight)"  # the field of a row that its weight is read from, whatever name it has in the data
ITEM, ROW, LINE = " item ", ": row ", ":"  # what stands between the name of the data and the number of a row


@dataclass(frozen=True)
class Rows:
    """Numbered rows; if they `join`, a stream of text runs from one into the next."""

    name: str
    rows: Sequence[tuple[int, Row]]
    kind: str = ITEM
    join: bool = True

    def __iter__(self) -> Iterator[tuple[int, Row]]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, number: int) -> str:
        """Return name and number."""
        return f"{self.name}{self.kind}{number}"


def listed_rows(name: str, rows: Iterable[Row]) -> Rows:
    """The rows of a file, numbered from 1."""
    return Rows(name, list(enumerate(rows, start=1)), ROW)


def text_rows(source: Source) -> Rows:
    """Each line that is not blank is a row with the field `text`."""
    rows = [(number, {"text": line.decode().removesuffix("\r")}) for number, line in source.lines() if line.strip()]
    return Rows(source.name, rows, LINE, join=False)


def json_rows(source: Source) -> Rows:
    """One JSON object per line, or one array of objects."""
    content, where, form = source.content, source.name, f"an array of objects: [{EXAMPLE}, …]"
    try:
        if content[:HEAD_BYTES].lstrip(BLANKS).startswith(b"["):
            return listed_rows(source.name, map(_an_object, json.loads(content)))
        form, rows = f"one object per line: {EXAMPLE}", []
        for number, line in source.lines():
            where = f"{source.name}{LINE}{number}: the line"
            if line.strip():
                rows.append((number, _an_object(json.loads(line))))
    except (ValueError, RecursionError) as error:  # JSONDecodeError is a ValueError
        raise DataError(f"{where} is not JSON ({str(error)[:100]}); write {form}") from error
    return Rows(source.name, rows, LINE)


def _an_object(row: Any) -> Row:
    if not isinstance(row, dict):
        raise ValueError("it is not an object")
    return row


def parquet_rows(source: Source) -> Rows:
    """The rows of a Parquet file."""
    return listed_rows(source.name, source.guard(lambda: pa_parquet.read_table(source.path)).to_pylist())
