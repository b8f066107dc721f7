"""Read data from Python objects: arrays, tensors, lists of sequences, texts, frames and map-style Datasets, validated like files.

Nothing here imports torch, pandas, polars or datasets: objects are recognised by duck typing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from carrywave.data.codec import Codec
from carrywave.data.files import cache, hub_datasets
from carrywave.data.files.arrays import MemoryAppender
from carrywave.data.files.fields import FIELDS, as_plain
from carrywave.data.files.frames import as_table, columns_of, is_column, is_frame, plain_column, rows_of, to_pandas
from carrywave.data.files.remote import is_address
from carrywave.data.files.rows import BATCH_ROWS, ITEM, WEIGHT, Row, Rows, table_rows
from carrywave.data.files.source import COMPRESSIONS, FORMATS
from carrywave.data.formats.recognised import NamedRows, target_field
from carrywave.data.prepare import FileInput, Frame, Input, Prepared, build, bundle, check_codec, encode, key_of, opener, prepare, told_by
from carrywave.data.sequences import Sequences
from carrywave.data.tables.table import Open, Table
from carrywave.errors import DataError, SpecError
from carrywave.spec.spec import Spec

LONGEST_NAME = 4096  # maximum length of a file name, in characters
PARTS = {"train": "train", "valid": "valid", "validation": "valid", "test": "test"}


def from_python(data: Any, spec: Spec, *, codec: Codec | None = None) -> Prepared:
    """Prepare data for training. `data` is train, or a dict of train, valid and test; each part may be

    - a Path, or a string that names a file (see `file_of`): all parts must then be files;
    - a text (language); an array or tensor of tokens, one stream or [sequences, steps]; a list of sequences of any length;
    - a pair (inputs, targets), or (inputs, targets, weights); a list of such pairs, or of dicts with the fields of a JSON line;
    - a frame (pandas, polars, Arrow): series for forecasting, else rows with the fields of a JSON line;
    - a map-style Dataset of dicts or pairs; a Dataset of Hugging Face's library, streamed or not;
    - an array [rows, columns], or a list of them, for forecasting.

    With `codec`, it is read as the data of another run was read.
    """
    check_codec(codec, spec)
    by_part = _by_part(data)
    named = naming(data, spec)
    if named.data.train is not None:
        return prepare(named, codec=codec)
    inputs = {part: ObjectInput(value, part, spec) for part, value in by_part.items()}
    if not spec.reads_series and all(map(hub_datasets.is_dataset, by_part.values())):  # it may be larger than memory
        key = key_of({part: hub_datasets.key(value) for part, value in by_part.items()}, spec, codec)
        return bundle(cache.fetch(cache.folder(spec.data.cache), key, lambda new: build(inputs, spec, new, codec)))
    return bundle(build(inputs, spec, MemoryAppender, codec).fingerprinted())


def naming(data: Any, spec: Spec) -> Spec:
    """Return the spec with the files that `data` names in place of its own, or with `data.train` None if `data` holds objects.

    Beside a file to train on, the spec's own `data.valid` and `data.test` stay; beside objects they are refused unless replaced there.
    """
    by_part = _by_part(data)
    files = {part: file for part, value in by_part.items() if (file := file_of(value, spec)) is not None}
    if files and len(files) < len(by_part):
        raise DataError(f"data mixes files ({', '.join(files)}) and objects; pass all parts as files or all as objects")
    from_spec = {part: file for part in ("valid", "test") if part not in by_part and (file := getattr(spec.data, part)) is not None}
    if from_spec and not files:
        fact = " and ".join(f"data.{part}" for part in from_spec)
        wanted = ", ".join(f"'{part}': …" for part in ("train", "valid", "test") if part in from_spec or part in by_part)
        raise SpecError(f"the spec names {fact}, but the data was passed as an object, not as a file; pass {{{wanted}}}, or remove {fact}")
    named = {"train": None, "valid": None, "test": None, **from_spec, **files}
    return spec.model_copy(update={"data": spec.data.model_copy(update=named)})


def read_python(data: Any, codec: Codec, spec: Spec, *, labelled: bool = True, part: str = "data") -> Sequences:
    """Read one more part, a file or an object, with the codec of a run; if not `labelled`, labels may be missing and are not read."""
    return encode(_input(data, spec, part), codec, spec, MemoryAppender, labelled=labelled, part=part)


def rows_for(data: Any, spec: Spec, codec: Codec | None = None, *, part: str = "data") -> Rows:
    """Return the rows of a file or an object, to be read one at a time without their labels, as the training data was read."""
    return _input(data, spec, part).rows(codec, labelled=False)


def series_of(data: Any, codec: Codec | None, spec: Spec, *, labelled: bool = False) -> Table:
    """Return the series in a file or an object, in their original units; if `labelled`, with the weights of targets."""
    return series_opener(data, spec)(codec, labelled)


def series_opener(data: Any, spec: Spec) -> Open:
    """Return a function that reads the series in a file or an object, given the codec of a run, and whether they have targets."""
    return opener(_input(data, spec, "data"))


def _input(data: Any, spec: Spec, part: str) -> Input:
    file = file_of(data, spec)
    return ObjectInput(data, part, spec) if file is None else FileInput.of(file, spec, part)


@dataclass(frozen=True)
class ObjectInput:
    """An object of Python."""

    data: Any
    name: str
    spec: Spec
    stream: None = None

    def rows(self, codec: Codec | None, *, labelled: bool) -> NamedRows:
        """Its rows, with the fields that tasks read."""
        return NamedRows(_rows(self.data, self.name, self.spec), self.spec, labelled, told_by(codec))

    def frame(self) -> Frame | Table | None:
        """The table that it is; None for lists of numbers, and for rows with `steps`."""
        if isinstance(self.data, Table):  # read already, as the spec says
            return self.data
        frame = to_pandas(self.data, self.name)
        return None if frame is None or "steps" in frame.columns else (frame, ())


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


def _by_part(data: Any) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        return {"train": data}
    unknown = [name for name in data if name not in PARTS]
    if unknown or "train" not in data:
        raise DataError(f"data is a dict with keys {', '.join(map(str, data)) or 'none'}; use train and, optionally, valid and test")
    return {PARTS[name]: value for name, value in data.items() if value is not None}


def _rows(data: Any, part: str, spec: Spec) -> Rows:
    """Convert any object to rows with the fields of a JSON line."""
    if isinstance(data, str):
        texts = [data] if spec.streams else [line for line in data.split("\n") if line.strip()]
        return Rows(part, lambda: enumerate({spec.data.text or "text": text} for text in texts), join=spec.streams)
    if hub_datasets.is_dataset(data):
        return Rows(part, lambda: table_rows(hub_datasets.tables_of(data)))
    if isinstance(data, pd.DataFrame):
        listed = rows_of(data)
        return Rows(part, lambda: enumerate(listed))
    if not is_column(data) and (table := as_table(data, part)) is not None:
        return Rows(part, lambda: table_rows(table.to_batches(max_chunksize=BATCH_ROWS)))
    if isinstance(data, tuple):
        return _pairs(data, part, spec)
    plain = as_plain(data)
    if (isinstance(plain, np.ndarray) and plain.ndim < (3 if spec.task == "forecasting" else 2)) or _is_flat(plain):
        plain = [plain]  # one stream or series, not many sequences of one token
    if not hasattr(plain, "__len__") or not hasattr(plain, "__getitem__"):
        fact = f"{part} is a {type(data).__name__}, which has no length or cannot be indexed"
        raise DataError(f"{fact}; pass a list, an array, a frame or a map-style Dataset (of a DataLoader, loader.dataset)")
    named = len(plain) > 0 and isinstance(plain[0], (Mapping, str))
    return _items(part, lambda: (plain[number] for number in range(len(plain))), spec, join=named)


def _items(part: str, items: Callable[[], Iterable[Any]], spec: Spec, *, join: bool = False) -> Rows:
    return Rows(part, lambda: ((number, _row(item, f"{part}{ITEM}{number}", spec)) for number, item in enumerate(items())), join=join)


def _is_flat(plain: Any) -> bool:
    return isinstance(plain, list) and bool(plain) and isinstance(plain[0], (int, float, np.number)) and not isinstance(plain[0], bool)


def _pairs(data: tuple[Any, ...], part: str, spec: Spec) -> Rows:
    sides = [_side(value) for value in data]
    sizes = [len(value) if hasattr(value, "__len__") else type(value).__name__ for value in sides]
    if len(sides) not in (2, 3) or len({*sizes}) > 1 or isinstance(sizes[0], str):
        remedy = "pass (inputs, targets) or (inputs, targets, weights) with as many of each, or a list of sequences"
        raise DataError(f"{part} is a tuple of {', '.join(map(str, sizes)) or 'nothing'} items; {remedy}")
    return _items(part, lambda: zip(*sides, strict=True), spec)


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
