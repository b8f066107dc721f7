"""Writes predictions as they are made, as JSON lines, CSV or Parquet, to a file or to standard output."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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


class RowWriter:
    """Formats rows and writes them. `gone` is True once nobody reads them any more."""

    def __init__(self, write: Callable[[str], None], kind: str = "") -> None:
        self._write, self._csv = write, kind == ".csv"
        self._columns: list[str] | None = None
        self.rows = 0
        self.gone = False

    def add(self, rows: Iterable[Row]) -> None:
        """Write rows, a part at a time."""
        text = io.StringIO()
        for row in rows:
            if self._csv:
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
        if text and not self.gone:
            try:
                self._write(text)
            except BrokenPipeError:
                self.gone = True

    def _add_csv(self, text: io.StringIO, row: Row) -> None:
        flat = flattened(row)
        writer = csv.writer(text, lineterminator="\n")
        if self._columns is None:
            self._columns = list(flat)
            writer.writerow(self._columns)
        writer.writerow([flat.get(column) for column in self._columns])


class ParquetRows(RowWriter):
    """Collects rows, since the types of columns follow from all of them."""

    def __init__(self, path: Path) -> None:
        super().__init__(lambda text: None)
        self._path, self._flat = path, list[Row]()

    def add(self, rows: Iterable[Row]) -> None:
        """Keep rows."""
        self._flat += [flattened(row, lists=True) for row in rows]
        self.rows = len(self._flat)

    def content(self) -> bytes:
        """The bytes of the file."""
        buffer = io.BytesIO()
        try:
            pa_parquet.write_table(pa.Table.from_pylist(self._flat), buffer)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"{self._path}: a column is not of one kind ({reason}); write JSON Lines, to a name that ends in .jsonl"
            ) from error
        return buffer.getvalue()


def flattened(row: Row, *, lists: bool = False) -> Row:
    """A row whose probabilities are columns of their own, and whose further values are text if they are nested; lists stay with `lists`."""
    flat: Row = {}
    for name, value in row.items():
        if name == "probabilities" and isinstance(value, dict):
            flat |= {f"probability_{label}": share for label, share in value.items()}
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
def writing(path: Path | None) -> Iterator[RowWriter]:
    """A writer to a file, which appears when the context ends without an error, or to standard output."""
    check(path)
    if path is not None:
        kind = path.suffix.lower()
        with OutputFile(path) as file:
            if kind in PARQUET:
                rows = ParquetRows(path)
                yield rows
                file.write_bytes(rows.content())
            else:
                yield RowWriter(file.write, kind)
        return
    writer = RowWriter(_show)
    try:
        yield writer
    finally:
        if writer.gone:
            output_file.hang_up(sys.stdout)


def _show(text: str) -> None:
    """Write to standard output: verbatim for a program, escaped for a terminal."""
    out: Any = sys.stdout
    if out is None:
        raise UserError("standard output is closed, so the result would be lost; open it, or pass a file with -o")
    try:
        out.write(printable(text) if out.isatty() else text)
    except UnicodeEncodeError:  # an encoding that lacks some characters, or an unpaired surrogate
        out.write(text.encode(out.encoding, errors="backslashreplace").decode(out.encoding))
    out.flush()
