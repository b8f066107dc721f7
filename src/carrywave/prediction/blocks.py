"""Reads rows to predict for in blocks, each of which is answered and written before the next, and the columns that are carried through.

Every worker reads them all. Blocks are cut by the rows alone, so that they, and the batches made of them, are the same for any number of
workers.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from carrywave.data import examples
from carrywave.data.codec import Codec
from carrywave.data.files.fields import FIELDS
from carrywave.data.files.rows import Row, Rows
from carrywave.data.files.source import FORMATS, STANDARD_FOLDER
from carrywave.data.formats.recognised import NamedRow, is_empty
from carrywave.data.sequences import Sequences
from carrywave.data.text.tally import Tally
from carrywave.errors import DataError, UserError, option
from carrywave.spec.spec import Spec

PREDICTED: Mapping[str, tuple[str, ...]] = {
    "classification": ("label", "probability", "probabilities"),
    "regression": ("label",),
    "tagging": ("labels", "probabilities"),
    "transcription": ("labels", "probability"),
    "language": ("prompt", "continuation", "text"),
}
MOST_ROWS = 4096
MOST_ELEMENTS = 1 << 20  # numbers, tokens or characters, of rows that are padded to the longest; a row that has more is a block of its own
DASH = "-"  # standard input

Numbered = tuple[int, Row]


def kept_columns(words: Iterable[str], spec: Spec) -> dict[str, str]:
    """The columns to carry through, and their names in the predictions: of words such as `id`, or `label=truth` for another name."""
    pairs = [(word.partition("=")[0], word.partition("=")[2] if "=" in word else word) for word in words]
    if pairs and spec.reads_series:
        raise UserError(f"{option('keep')} is for rows, but predictions for series have their names and times anyway; remove it")
    for column, name in pairs:
        if not column or not name:
            raise UserError(f"{option('keep')} has an empty name; write a column, or COLUMN=NAME for another name")
        if name in PREDICTED[spec.task]:
            fact = f"{option('keep')} {column}: predictions have a field {name} of their own"
            raise UserError(f"{fact}; choose another name, as in {column}=given_{name}")
    return dict(pairs)


@dataclass(frozen=True)
class Block:
    """Rows that follow each other in the input."""

    data: tuple[Sequences, ...]  # those that are not empty, as each run reads them
    carried: Sequence[Row]  # of each row
    empty: frozenset[int]  # which rows have nothing to read


def read_blocks(rows: Rows, codecs: Sequence[Codec], kept: Mapping[str, str], tally: Tally) -> Iterator[Block]:
    """All rows in order, encoded with the codec of each run. `tally` counts what train does not have, and rows with nothing to read."""
    field = codecs[0].field
    for piece in cut(rows, lambda row: elements(row.get(field))):
        empty = {place for place, (_, row) in enumerate(piece) if is_empty(next((row[f] for f in FIELDS if row.get(f) is not None), None))}
        tally.left_out += len(empty)
        full = [numbered for place, numbered in enumerate(piece) if place not in empty]
        some = Rows(rows.name, full, rows.kind, join=False)
        how: dict[str, Any] = {"labelled": False, "join": False, "may_be_empty": True}
        tallies = (tally, *(Tally() for _ in codecs[1:]))
        data = tuple(examples.encode(some, codec, tally=each, **how) for codec, each in zip(codecs, tallies, strict=True))
        yield Block(data, [carried(row, kept, rows.where(number)) for number, row in piece], frozenset(empty))


def cut(rows: Rows, size: Callable[[Row], int], most_rows: int = MOST_ROWS, most_elements: int = MOST_ELEMENTS) -> Iterator[list[Numbered]]:
    """The rows, as many at a time as fit. An input without rows is an error."""
    block, longest, any_row = list[Numbered](), 0, False
    for number, row in rows:
        any_row, longest = True, max(longest, size(row))
        if block and (len(block) == most_rows or longest * (len(block) + 1) > most_elements):
            yield block
            block, longest = [], size(row)
        block.append((number, row))
    if not any_row:
        raise DataError(f"{rows.name} is empty; use data with at least one row")
    yield block


def elements(value: Any) -> int:
    """Roughly how much a row holds; what it is worth is checked when it is encoded."""
    if isinstance(value, np.ndarray):
        return int(value.size)
    if not isinstance(value, list | tuple | str) or not value:
        return 1
    return len(value) * (len(value[0]) if isinstance(value[0], list | tuple | np.ndarray) else 1)


def carried(row: Mapping[str, Any], kept: Mapping[str, str], where: str) -> Row:
    """The fields of a row that are carried through, under the names they have in the input."""
    fields = row.original if isinstance(row, NamedRow) else row
    for column in kept:
        if column not in fields:
            shown = ", ".join(str(each) for each in list(fields)[:8])
            raise DataError(f"{where} has no field {column} (fields: {shown}); name one that every row has with {option('keep')}")
    return {name: fields[column] for column, name in kept.items()}


def is_standard(data: Any) -> bool:
    """True if data is to be read from standard input."""
    return isinstance(data, str | Path) and str(data) == DASH


@contextmanager
def standard_input(spec: Spec) -> Iterator[str]:
    """The name of a temporary file with all of standard input: data is read more than once."""
    stream = None if sys.stdin is None else getattr(sys.stdin, "buffer", None)
    if stream is None:
        raise DataError("standard input is closed; open it, or pass a file instead of -")
    with tempfile.TemporaryDirectory(prefix=STANDARD_FOLDER) as folder:
        path = Path(folder) / f"data.{_format(bytes(stream.peek(64)), spec)}"
        with path.open("wb") as file:
            shutil.copyfileobj(stream, file, 1 << 20)
        yield str(path)


def _format(head: bytes, spec: Spec) -> str:
    """The format that the spec says, or that the first bytes or the run's training file suggest, as the end of a file's name."""
    format = spec.data.format
    if format == "auto":
        begins = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
        of_train = FORMATS.get(Path(spec.data.train or "").suffix.lower())
        if head.startswith(b"PAR1"):
            format = "parquet"
        elif spec.task == "language" or (of_train == "text" and begins not in (b"{", b"[")):
            format = "text"
        elif of_train == "csv" or spec.reads_series:
            format = "jsonl" if begins in (b"{", b"[") else "csv"
        else:
            format = "jsonl"
    return "txt" if format == "text" else format
