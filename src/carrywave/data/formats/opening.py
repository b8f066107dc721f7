"""Opens a file of examples as rows: by its format or, of text, by how its field writes labels."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd

from carrywave.data.files.frame_file import read_frame
from carrywave.data.files.rows import Rows, json_rows, listed_rows, parquet_rows, text_rows
from carrywave.data.files.source import Source, find
from carrywave.data.formats.field_formats import LABELLED, TAGGED, Asked, Read, companions, paired
from carrywave.data.formats.recognised import NOTHING, Known, NamedRows, named_rows
from carrywave.data.formats.series_formats import arff, series_of_frame, ts
from carrywave.errors import DataError
from carrywave.spec.spec import Spec

NUMBERS = re.compile(r"\s*-?[\d.]+([eE][-+]?\d+)?(\s*[,\s]\s*(-?[\d.]+([eE][-+]?\d+)?|NaN|\?)){3,}[,\s]*")


def open_rows(source: Source, spec: Spec, *, labelled: bool = True, known: Known = NOTHING) -> NamedRows:
    """The rows of a file, with the fields that tasks read; if not `labelled`, targets may be missing and are not read.

    `known` is what the training data has told of its columns and labels.
    """
    rows, notes, named = _rows(source, spec, labelled, known)
    if not named:  # what the spec says of its labels has been heeded
        spec = spec.model_copy(update={"data": spec.data.model_copy(update={"text": None, "label": None})})
    return named_rows(rows, spec, labelled, known, notes)


def labels_beside(source: Source, spec: Spec) -> list[Path]:
    """The files that may have the labels of one that is read as text."""
    text = source.format == "text" and source.path is not None and spec.task in ("classification", "tagging", "regression")
    return companions(source.path) if text and source.path is not None else []


def _rows(source: Source, spec: Spec, labelled: bool, known: Known) -> tuple[Rows, tuple[str, ...], bool]:
    """The rows, lines about how they were read, and whether their fields have names that the data gave them."""
    if source.format == "jsonl":
        return json_rows(source), (), True
    if source.format == "parquet":
        return parquet_rows(source), (), True
    text = source.format == "text"
    if text and spec.task == "language":
        return text_rows(source), (), False
    if not text and spec.task != "tagging":
        return _of_table(source, spec)
    read = _read(source, spec, labelled, known)
    if read is not None:
        return listed_rows(source.name, read.rows), (f"{source.name}: {read.how}",), False
    if not text or _is_table(source):
        return _of_table(source, spec)
    if labelled:
        raise DataError(f"{source.name} is text, and no labels are found in it or in a file beside it; use a .jsonl or .csv file")
    return text_rows(source), (), False


def _read(source: Source, spec: Spec, labelled: bool, known: Known) -> Read | None:
    """The rows of a text that its field has a form for."""
    text, tagging = source.text, spec.task == "tagging"
    asked = Asked(spec.data.label, known.labels, spec.data.multi_label)
    for other in labels_beside(source, spec) if labelled else []:
        labels = find(str(other), field="labels", format="text", encoding=spec.data.encoding).text
        if (rows := paired(text, labels, tagging=tagging)) is not None:
            return Read(rows, f"labels are read from {other.name}, line by line")
    if tagging:
        return next((read for reader in TAGGED if (read := reader(text, asked)) is not None), None)
    if (series := ts(text) or arff(text)) is not None:
        return series
    first = text[:100_000].split("\n")[:5]
    if all(NUMBERS.fullmatch(line) for line in first if line.strip()):
        cells = [re.split(r"[,\s]+", line.strip(" ,\r")) for line in text.split("\n") if line.strip()]
        return series_of_frame(pd.DataFrame(cells).fillna(""), spec.data.label)
    if _is_table(source):
        return None
    return next((read for reader in LABELLED if (read := reader(text, asked)) is not None), None)


def _is_table(source: Source) -> bool:
    """True if nearly every line of a text has columns that are separated by tabs."""
    lines = [line for line in source.text[: 1 << 20].split("\n")[:1000] if line.strip()]
    return bool(lines) and sum("\t" in line.strip() for line in lines) > 0.9 * len(lines)


def _of_table(source: Source, spec: Spec) -> tuple[Rows, tuple[str, ...], bool]:
    frame, notes = read_frame(source, spec.data, as_text=True)
    if spec.task != "language" and (read := series_of_frame(frame, spec.data.label)) is not None:
        return listed_rows(source.name, read.rows), (*notes, f"{source.name}: {read.how}"), False
    rows = frame.to_dict("records")
    return listed_rows(source.name, [{str(name): value for name, value in row.items()} for row in rows]), tuple(notes), True
