"""Writes predictions as they are made, as JSON lines, CSV or Parquet, to a file or to standard output."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pa_parquet

from carrywave.data.files.rows import Row
from carrywave.errors import UserError
from carrywave.runs import output_file
from carrywave.runs.output_file import OutputFile
from carrywave.runs.watcher import printable

PARQUET = (".parquet", ".pq")
KINDS = ("", ".csv", ".json", ".jsonl", ".ndjson", ".txt", *PARQUET)
TEXT_CHARACTERS = 1 << 20  # that are written at once
GROUP_ROWS = 1 << 16
REMEDY = "write JSON Lines, to a name that ends in .jsonl"


class RowWriter:
    """Formats rows and writes them. `gone` is True once nobody reads them any more."""

    def __init__(self, write: Callable[[str], None], kind: str, parquet: ParquetFile | None = None) -> None:
        self._write, self._csv, self._parquet = write, kind == ".csv", parquet
        self._columns: list[str] | None = None
        self.rows = 0
        self.gone = False

    def add(self, rows: Iterable[Row]) -> None:
        """Write rows, a part at a time."""
        text = io.StringIO()
        for row in rows:
            if self._parquet is not None:
                self._unless_gone(self._parquet.add, flattened(row, lists=True))
            elif self._csv:
                self._add_csv(text, row)
            else:
                text.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
            self.rows += 1
            if text.tell() >= TEXT_CHARACTERS:
                self.say(text.getvalue())
                text = io.StringIO()
        self.say(text.getvalue())

    def say(self, text: str) -> None:
        """Write a text as it is."""
        if text:
            self._unless_gone(self._write, text)

    def _unless_gone(self, write: Callable[[Any], None], what: object) -> None:
        if not self.gone:
            try:
                write(what)
            except BrokenPipeError:
                self.gone = True

    def _add_csv(self, text: io.StringIO, row: Row) -> None:
        flat = flattened(row)
        writer = csv.writer(text, lineterminator="\n")
        if self._columns is None:
            self._columns = list(flat)
            writer.writerow(self._columns)
        writer.writerow([flat.get(column) for column in self._columns])


class ParquetFile:
    """Collects flat rows into groups and writes them; the first group settles the types of the columns."""

    def __init__(self, file: OutputFile) -> None:
        self._path, self._out = file.path, pa.PythonFile(os.fdopen(os.dup(file.fileno()), "wb"), mode="w")
        self._rows: list[Row] = []
        self._written = 0
        self._file: Any = None

    def add(self, row: Row) -> None:
        """Add a row."""
        self._rows.append(row)
        if len(self._rows) == GROUP_ROWS:
            self._write()

    def finish(self) -> None:
        """Write what is left, and the end of the file."""
        if self._rows or self._file is None:
            self._write()
        self._file.close()

    def close(self) -> None:
        """Let go of the file, whatever is in it."""
        with suppress(OSError, pa.ArrowException):
            if self._file is not None:
                self._file.close()  # Arrow writes the end of a file even if there was an error
            self._out.close()

    def _write(self) -> None:
        types = {} if self._file is None else dict(zip(self._file.schema.names, self._file.schema.types, strict=True))
        names = dict.fromkeys(chain.from_iterable(self._rows)) if self._file is None else types
        for number, row in enumerate(self._rows, start=self._written + 1):
            if missing := next((name for name in row if name not in names), None):
                raise UserError(f"{self._path}: row {number} has a column {missing}, which earlier rows have not; {REMEDY}")
        table = pa.table({name: self._column(name, [row.get(name) for row in self._rows], types.get(name)) for name in names})
        if self._file is None:
            self._file = pa_parquet.ParquetWriter(self._out, table.schema)
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


def flattened(row: Row, *, lists: bool = False) -> Row:
    """A row of a table: a column for the probability of each class; other objects as JSON, and lists too, unless the table has `lists`."""
    flat: Row = {}
    for name, value in row.items():
        if name == "probabilities" and isinstance(value, dict):
            for label, share in value.items():
                column = f"probability_{label}"
                if column in row:
                    raise UserError(f"a kept field is named {column}, like the probability of a class; keep it as COLUMN=NAME instead")
                flat[column] = share
        else:
            as_json = isinstance(value, dict) or (isinstance(value, list) and not lists)
            flat[name] = json.dumps(value, ensure_ascii=False, default=str) if as_json else value
    return flat


def check(path: Path | None) -> None:
    """Refuse before the work what could not be written after it."""
    kind = "" if path is None else path.suffix.lower()
    if kind not in KINDS:
        fact = f"{path}: predictions are written as JSON Lines, CSV or Parquet, not as {kind}"
        raise UserError(f"{fact}; use a file name that ends in .jsonl, .csv or .parquet")
    output_file.check(path, wanted=True)


@contextmanager
def writing(path: Path | None, kind: str = "") -> Iterator[RowWriter]:
    """A writer to a file, which appears when the context ends without an error, or to standard output; `kind` is the suffix there."""
    check(path)
    if path is not None:
        kind = kind or path.suffix.lower()
        with OutputFile(path) as file:
            if kind not in PARQUET:
                yield RowWriter(file.write, kind)
                return
            parquet = ParquetFile(file)
            try:
                writer = RowWriter(file.write, kind, parquet)
                yield writer
                if not writer.gone:
                    parquet.finish()
            finally:
                parquet.close()
        return
    writer = RowWriter(_show, kind)
    try:
        yield writer
    finally:
        if writer.gone:
            output_file.hang_up(sys.stdout)


def _show(text: str) -> None:
    """Write to standard output: verbatim for a program, escaped for a terminal."""
    out = sys.stdout
    if out is None:
        raise UserError("standard output is closed, so the result would be lost; open it, or pass a file with -o")
    try:
        out.write(printable(text) if out.isatty() else text)
    except UnicodeEncodeError:  # an encoding that lacks some characters, or an unpaired surrogate
        out.write(text.encode(out.encoding, errors="backslashreplace").decode(out.encoding))
    out.flush()
