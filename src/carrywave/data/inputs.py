"""An `Input` is one part of the data, a file or an object of Python, as what a task reads: a text, rows, or a table of series.

Objects are arrays, tensors, lists of sequences, texts, frames and map-style Datasets. They are recognised by duck typing, so that nothing
here imports torch, polars or datasets, and are validated like files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from carrywave.data.codec import Codec
from carrywave.data.files import cache, hub_datasets
from carrywave.data.files.fields import FIELDS, as_plain
from carrywave.data.files.frame_file import read_frame
from carrywave.data.files.frames import as_table, columns_of, is_column, is_frame, plain_column, rows_of, to_pandas
from carrywave.data.files.remote import is_address
from carrywave.data.files.rows import ITEM, WEIGHT, Row, Rows
from carrywave.data.files.source import COMPRESSIONS, FORMATS, Source, find
from carrywave.data.formats.opening import labels_beside, open_rows
from carrywave.data.formats.recognised import NOTHING, Known, NamedRows, named_rows, target_field
from carrywave.data.formats.series_formats import tsf
from carrywave.data.tables.series_rows import choice_of, table_of_rows
from carrywave.data.tables.table import Table, arrange
from carrywave.errors import DataError
from carrywave.spec.spec import Spec

IS_TSF = re.compile(r"(?im)^@attribute\s[^@]*(?s:.)*^@data\s*$")
LONGEST_NAME = 4096  # maximum length of a file name, in characters


@dataclass(frozen=True)
class Input:
    """A file, which has a source, or an object."""

    name: str  # as the user wrote it, or the part that an object is
    spec: Spec
    source: Source | None = None
    data: Any = None

    @staticmethod
    def of(data: Any, spec: Spec, part: str = "data", field: str | None = None) -> Input:
        """The input that a file's name, a path or an object is; `field` is the key of the spec that names it."""
        name = str(data) if field is not None else file_of(data, spec)
        if name is None:
            return Input(part, spec, data=data)
        asked, place = spec.data, cache.folder(spec.data.cache)
        any_bytes = spec.task == "language" and asked.tokens == "byte" and spec.streams
        source = find(name, field=field or part, format=asked.format, any_bytes=any_bytes, cache=place, encoding=asked.encoding)
        if source.format == "text" and asked.weight is not None and spec.task == "language":
            fact = f"{source.name} is read as plain text, which has no field {asked.weight} (data.weight)"
            raise DataError(f"{fact}; use .jsonl, or remove it")
        return Input(source.name, spec, source)

    @property
    def stream(self) -> Source | None:
        """The file, if its text is one stream."""
        text = self.source is not None and self.source.format == "text"
        return self.source if text and self.spec.task == "language" and self.spec.streams else None

    @property
    def files(self) -> list[Path]:
        """The file, and those beside it that may have its labels."""
        source = self.source
        return [] if source is None or source.path is None else [source.path, *labels_beside(source, self.spec)]

    def rows(self, codec: Codec | None, *, labelled: bool) -> NamedRows:
        """Its rows, with the fields that tasks read."""
        if self.source is not None:
            return open_rows(self.source, self.spec, labelled=labelled, known=told_by(codec))
        return named_rows(_rows(self.data, self.name, self.spec), self.spec, labelled, told_by(codec))

    def table(self, codec: Codec | None, *, labelled: bool = True) -> Table:
        """Its series, as the spec says or, given a codec, as the training data was read; with or without their targets."""
        if isinstance(self.data, Table):  # read already
            return self.data
        if self._frame is None:
            return table_of_rows(self.rows(codec, labelled=labelled), self.spec, codec, labelled=labelled)
        frame, notes = self._frame
        return arrange(frame, self.name, choice_of(self.spec.data, codec, self.name, labelled=labelled), notes=notes)

    @cached_property
    def _frame(self) -> tuple[pd.DataFrame, tuple[str, ...]] | None:
        """The table that it is, and lines on how it was read; None for rows with `steps`, and for lists of numbers."""
        source = self.source
        if source is None:
            frame = to_pandas(self.data, self.name)
            return None if frame is None or "steps" in frame.columns else (frame, ())
        if source.format == "jsonl" and '"steps"' in source.text[: 1 << 20]:
            return None
        if source.format == "text" and IS_TSF.search(source.text):
            return tsf(source.text), source.notes()
        return read_frame(source, self.spec.data)


def told_by(codec: Codec | None) -> Known:
    """What a codec tells of the columns and labels of other data."""
    return NOTHING if codec is None else Known(codec.text_column, codec.label_column, codec.labels)


def file_of(value: Any, spec: Spec) -> str | None:
    """Return the file a value names, or None. A Path is always a file; so is a string, unless the task is language.

    For language, a string may be a text. It is a file if one of that name exists, or if it is a single word with the suffix of a data file,
    or an address.
    """
    if isinstance(value, Path):
        return str(value)
    if not isinstance(value, str):
        return None
    if spec.task != "language":
        return value
    if len(value) > LONGEST_NAME or "\n" in value:
        return None
    suffixes = [suffix.lower() for suffix in Path(value).suffixes if suffix.lower() not in COMPRESSIONS]
    a_word = not any(letter.isspace() for letter in value)
    if a_word and (is_address(value) or (suffixes and suffixes[-1] in FORMATS)):
        return value
    return value if value.startswith(("builtin:", hub_datasets.PREFIX)) or os.path.isfile(value) else None


def _rows(data: Any, part: str, spec: Spec) -> Rows:
    """Convert any object to rows with the fields of a JSON line."""
    if isinstance(data, str):
        texts = [data] if spec.streams else [line for line in data.split("\n") if line.strip()]
        return Rows(part, list(enumerate({spec.data.text or "text": text} for text in texts)), join=spec.streams)
    if hub_datasets.is_dataset(data):
        return Rows(part, list(enumerate(row for table in hub_datasets.tables_of(data) for row in table.to_pylist())))
    if isinstance(data, pd.DataFrame):
        return Rows(part, list(enumerate(rows_of(data))))
    if not is_column(data) and (table := as_table(data, part)) is not None:
        return Rows(part, list(enumerate(table.to_pylist())))
    if isinstance(data, tuple):
        return _pairs(data, part, spec)
    plain = as_plain(data)
    if (isinstance(plain, np.ndarray) and plain.ndim < (3 if spec.task == "forecasting" else 2)) or _is_flat(plain):
        plain = [plain]  # one stream or series, not many sequences of one token
    if not hasattr(plain, "__len__") or not hasattr(plain, "__getitem__"):
        fact = f"{part} is a {type(data).__name__}, which has no length or cannot be indexed"
        raise DataError(f"{fact}; pass a list, an array, a frame or a map-style Dataset (of a DataLoader, loader.dataset)")
    named = len(plain) > 0 and isinstance(plain[0], (Mapping, str))
    return _items(part, (plain[number] for number in range(len(plain))), spec, join=named)


def _items(part: str, items: Iterable[Any], spec: Spec, *, join: bool = False) -> Rows:
    return Rows(part, [(number, _row(item, f"{part}{ITEM}{number}", spec)) for number, item in enumerate(items)], join=join)


def _is_flat(plain: Any) -> bool:
    return isinstance(plain, list) and bool(plain) and isinstance(plain[0], (int, float, np.number)) and not isinstance(plain[0], bool)


def _pairs(data: tuple[Any, ...], part: str, spec: Spec) -> Rows:
    sides = [_side(value) for value in data]
    sizes = [len(value) if hasattr(value, "__len__") else type(value).__name__ for value in sides]
    if len(sides) not in (2, 3) or len({*sizes}) > 1 or isinstance(sizes[0], str):
        remedy = "pass (inputs, targets) or (inputs, targets, weights) with as many of each, or a list of sequences"
        raise DataError(f"{part} is a tuple of {', '.join(map(str, sizes)) or 'nothing'} items; {remedy}")
    return _items(part, zip(*sides, strict=True), spec)


def _side(value: Any) -> Any:
    """Return the items of one side of a pair: the column of a one-column frame; a row of numbers per item if there are several columns."""
    columns = dict(columns_of(value)) if is_frame(value) else {}
    content = next((name for name in FIELDS if name in columns), None)
    if len(columns) == 1 or content:
        return plain_column(columns[content or next(iter(columns))])
    return as_plain(value)


def _row(item: Any, where: str, spec: Spec) -> Row:
    """Convert one item to a row: a dict as it is, a pair (content, target), with a weight or without, or content alone."""
    if isinstance(item, Mapping):
        return dict(item)
    if isinstance(item, tuple) and len(item) in (2, 3):
        if spec.task in ("language", "forecasting"):
            fact = f"{where} is a pair, but {spec.task} takes its targets from the data itself"
            raise DataError(f"{fact}; pass only the inputs, or set task to that of your targets, such as classification")
        weight = {spec.data.weight or WEIGHT: item[2]} if len(item) == 3 else {}
        return {**_content(item[0], spec), spec.data.label or target_field(spec): item[1], **weight}
    return _content(item, spec)


def _content(item: Any, spec: Spec) -> Row:
    """Determine the content of a sequence: a text, tokens (a flat list of integers or of strings), or numeric steps."""
    if spec.data.text is not None:
        return {spec.data.text: item if isinstance(item, str) else as_plain(item)}  # `NamedRows` determines it
    if isinstance(item, str):
        return {"text": item}
    plain = as_plain(item)
    if isinstance(plain, list) and plain and all(isinstance(token, str) for token in plain):
        return {"tokens": plain}
    try:
        array: NDArray[Any] = np.asarray(plain)
    except ValueError:  # ragged: the validation of steps reports where
        return {"steps": plain}
    flat_tokens = array.ndim == 1 and array.dtype.kind in "iu" and not spec.reads_series
    return {"tokens": array} if flat_tokens or spec.task == "language" else {"steps": plain}
