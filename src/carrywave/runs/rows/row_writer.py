"""Writes predictions as they are made, as JSON lines, CSV or Parquet, to a file or to standard output."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from carrywave.data.files.rows import Row
from carrywave.errors import UserError
from carrywave.runs import output_file
from carrywave.runs.output_file import OutputFile
from carrywave.runs.rows.parquet_writer import ParquetWriter
from carrywave.runs.watcher import printable

PARQUET = (".parquet", ".pq")
KINDS = ("", ".csv", ".json", ".jsonl", ".ndjson", ".txt", *PARQUET)
TEXT_CHARACTERS = 1 << 20  # that are written at once


class RowWriter:
    """Formats rows and writes them. `gone` is True once nobody reads them any more."""

    def __init__(self, write: Callable[[str], None], kind: str, parquet: ParquetWriter | None = None) -> None:
        self._write, self._csv, self._parquet = write, kind == ".csv", parquet
        self._columns: list[str] | None = None
        self.rows = 0
        self.gone = False

    def add(self, rows: Iterable[Row]) -> None:
        """Write rows, a part at a time."""
        text = io.StringIO()
        for row in rows:
            if self._parquet is not None:
                self._add_parquet(self._parquet, row)
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
        if self.gone or not text:
            return
        try:
            self._write(text)
        except BrokenPipeError:
            self.gone = True

    def _add_parquet(self, parquet: ParquetWriter, row: Row) -> None:
        if not self.gone:
            try:
                parquet.add(flattened(row, lists=True))
            except BrokenPipeError:
                self.gone = True

    def _add_csv(self, text: io.StringIO, row: Row) -> None:
        flat = flattened(row)
        writer = csv.writer(text, lineterminator="\n")
        if self._columns is None:
            self._columns = list(flat)
            writer.writerow(self._columns)
        writer.writerow([flat.get(column) for column in self._columns])


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
            parquet = ParquetWriter(file.write_bytes, path)
            try:
                writer = RowWriter(file.write, kind, parquet)
                yield writer
                if not writer.gone:
                    parquet.close()
            finally:
                parquet.abandon()
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
