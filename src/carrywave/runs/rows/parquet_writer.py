"""Writes predictions as Parquet, a group of rows at a time. The first group settles the types of the columns."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pa_parquet

from carrywave.errors import UserError

GROUP_ROWS = 1 << 16
REMEDY = "write JSON Lines, to a name that ends in .jsonl"


class ParquetWriter:
    """Collects flat rows into groups, and passes the bytes of the file on in order; complete once `close` was called."""

    def __init__(self, write: Callable[[bytes], None], path: Path) -> None:
        self._out, self._path = _Out(write), path
        self._rows: list[dict[str, Any]] = []
        self._written = 0
        self._file: Any = None

    def add(self, row: dict[str, Any]) -> None:
        """Add a row."""
        self._rows.append(row)
        if len(self._rows) == GROUP_ROWS:
            self._write()

    def close(self) -> None:
        """Write what is left, and the end of the file."""
        if self._rows or self._file is None:
            self._write()
        self._file.close()

    def abandon(self) -> None:
        """Pass nothing on any more: Arrow writes the end of a file even if there was an error."""
        self._out.abandoned = True

    def _write(self) -> None:
        types = {} if self._file is None else dict(zip(self._file.schema.names, self._file.schema.types, strict=True))
        names = dict.fromkeys(chain.from_iterable(self._rows)) if self._file is None else types
        for number, row in enumerate(self._rows, start=self._written + 1):
            if missing := next((name for name in row if name not in names), None):
                raise UserError(f"{self._path}: row {number} has a column {missing}, which earlier rows have not; {REMEDY}")
        columns = {name: self._column(name, [row.get(name) for row in self._rows], types.get(name)) for name in names}
        table = pa.table(columns)
        if self._file is None:
            self._file = pa_parquet.ParquetWriter(pa.PythonFile(self._out, mode="w"), table.schema)
        self._file.write_table(table)
        self._written += len(self._rows)
        self._rows = []

    def _column(self, name: str, values: list[Any], type_before: Any) -> Any:
        try:
            column = pa.array(values, type=type_before)
        except UnicodeEncodeError:  # unpaired surrogates, which JSON can hold and UTF-8 cannot
            return self._column(name, [_encodable(value) for value in values], type_before)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            kind = "of one kind" if type_before is None else f"{type_before}, as in the rows before"
            last = self._written + len(values)
            raise UserError(f"{self._path}: the values of {name} up to row {last} are not {kind}; {REMEDY}") from error
        return column.cast(_settled_type(column.type))


def _settled_type(kind: Any) -> Any:
    """The type, with text where no row shows one: in rows without a value, and in lists that are all empty."""
    if pa.types.is_list(kind):
        return pa.list_(_settled_type(kind.value_type))
    return pa.string() if pa.types.is_null(kind) else kind


def _encodable(value: Any) -> Any:
    if isinstance(value, list):
        return [_encodable(each) for each in value]
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


class _Out:
    """What Arrow takes for a file."""

    closed = abandoned = False

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write, self._bytes = write, 0

    def write(self, data: Any) -> int:
        """Pass bytes on."""
        if not self.abandoned:
            self._write(bytes(data))
        self._bytes += len(data)
        return len(data)

    def tell(self) -> int:
        """How many there were."""
        return self._bytes

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """The file itself is somebody else's to close."""
