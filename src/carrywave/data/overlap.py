"""Tells if what a model is judged by is also what it is trained on: sequences, passages of a stream, rows or times of series; and if rows
of series are in no part.

Nothing is refused: equal rows may be right, as with short texts. Only part of very large data is looked at.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from carrywave.data.sequences import Sequences
from carrywave.data.tables.parts import SeriesPart, whole
from carrywave.data.tables.table import Table
from carrywave.data.tables.times import Times

MOST_JUDGED, MOST_TRAINED = 4096, 1 << 18  # sequences that are looked at
MOST_BYTES = 1 << 28  # of a stream
PASSAGES, TOKENS, ROWS = 64, 256, 32  # how many passages are looked for, and how long they are
ENOUGH = 0.01  # share of sequences or passages that is worth a line
BETTER = "so the figures look better than they are; keep them in only one of the two"


def notes(parts: Mapping[str, Sequences], separate: Collection[str]) -> Iterator[str]:
    """A line for each part of which much is in train, too; `separate` names the parts that were not cut from it."""
    train = parts["train"]
    for name in ("valid", "test"):
        other = parts.get(name)
        if other is None:
            continue
        if len(train) > 1 or len(other) > 1:
            repeated, looked, what = *_sequences(train, other), "sequences"
        elif name in separate:  # within one text, passages may well come again
            repeated, looked, what = *_passages(_rows_of(train), _rows_of(other), TOKENS), "passages looked at"
        else:
            continue
        if repeated >= max(1, ENOUGH * looked):
            yield f"{name}: {_many(repeated, looked)} {what} are also in train, {BETTER}"


def notes_on_cut(table: Table, cut: Mapping[str, SeriesPart], kept: Mapping[str, NDArray[np.bool_]]) -> Iterator[str]:
    """Lines about series that were cut into parts: rows at their ends that are in no part, and parts that begin while others still train.

    `kept` are the series that are in each part.
    """
    last, in_train = list(cut.values())[-1], kept["train"]
    unused, total = (int(rows[in_train].sum()) for rows in (table.starts + table.lengths - last.starts - last.lengths, table.lengths))
    if unused:
        yield f"{table.name}: data.split leaves {unused:,} of {total:,} rows, at the ends of series, unused; use larger parts to use them"
    for part, span in cut.items():
        if part != "train" and table.times is not None:
            yield from _early(table.times, cut["train"].only(in_train), table.times.keys[span.only(kept[part]).scored.starts], part)


def notes_on_series(train: Table, trained: SeriesPart, other: Table, part: str) -> Iterator[str]:
    """Lines about the rows of a part that are also `trained` on, or else about series that begin before train ends."""
    times = train.times
    if times is None or other.times is None or times.counted != other.times.counted:
        alike, what = train.columns == other.columns, "passages looked at"
        repeated, looked = _passages(np.concatenate(trained.of(train.values)), other.values, ROWS) if alike else (0, 0)
    else:
        alone, repeated, looked, what = not train.series and not other.series, 0, 0, "rows"  # names are then those of the files
        seen = dict(zip([part] if alone else train.names, trained.of(times.keys), strict=True))
        for name, keys in zip([part] if alone else other.names, whole(other).of(other.times.keys), strict=True):
            if name in seen:
                repeated, looked = repeated + int(np.isin(keys, seen[name]).sum()), looked + len(keys)
    if repeated >= max(1, ENOUGH * looked):
        yield f"{part}: {_many(repeated, looked)} {what} are also in train, {BETTER}"
    elif times is not None and other.times is not None and what == "rows":
        yield from _early(times, trained, other.times.keys[other.starts], part)


def _early(train: Times, trained: SeriesPart, begins: NDArray[np.generic], part: str) -> Iterator[str]:
    """A line about series of a part that begin before what is `trained` on ends."""
    ends = (trained.starts + trained.lengths - 1)[trained.lengths > 0]
    if not len(ends):
        return
    last = int(ends[np.argmax(train.keys[ends])])
    if count := int((begins <= train.keys[last]).sum()):
        fact = f"{_many(count, len(begins))} series begin before train ends ({train.written(slice(last, last + 1))[0]})"
        yield f"{part}: {fact}, so the model is trained on times that it is judged by; files for each part can be cut at one time"


def _many(repeated: int, looked: int) -> str:
    return f"all {looked:,}" if repeated == looked else f"{repeated:,} of {looked:,}"


def _rows_of(stream: Sequences) -> NDArray[np.generic]:
    rows: NDArray[np.generic] = stream.inputs[int(stream.starts[0]) : int(stream.starts[0] + stream.lengths[0])]
    return rows


def _sequences(train: Sequences, other: Sequences) -> tuple[int, int]:
    """How many sequences of a part, of those looked at, are in train as well."""
    looked = np.unique(np.linspace(0, len(other) - 1, min(len(other), MOST_JUDGED)).astype(np.int64))
    wanted = {_content(other, int(number)) for number in looked}
    lengths = set(other.lengths[looked].tolist())
    seen: set[bytes] = set()
    for number in np.unique(np.linspace(0, len(train) - 1, min(len(train), MOST_TRAINED)).astype(np.int64)):
        if int(train.lengths[number]) in lengths and (content := _content(train, int(number))) in wanted:
            seen.add(content)
    return sum(_content(other, int(number)) in seen for number in looked), len(looked)


def _content(data: Sequences, number: int) -> bytes:
    start = int(data.starts[number])
    return np.ascontiguousarray(data.inputs[start : start + int(data.lengths[number])]).tobytes()


def _passages(train: NDArray[np.generic], other: NDArray[np.generic], length: int) -> tuple[int, int]:
    """How many passages of a stream, evenly spaced and not constant, are in train as well."""
    if train.dtype != other.dtype or not len(train):
        return 0, 0
    length = min(length, len(other))
    row_bytes = train[:1].nbytes
    whole = np.ascontiguousarray(train[: MOST_BYTES // row_bytes]).tobytes()
    repeated = looked = 0
    for start in np.unique(np.linspace(0, len(other) - length, PASSAGES).astype(np.int64)):
        passage = np.ascontiguousarray(other[int(start) : int(start) + length])
        if (passage == passage[:1]).all():
            continue
        looked += 1
        content, at = passage.tobytes(), -1
        while (at := whole.find(content, at + 1)) >= 0:
            if at % row_bytes == 0:
                repeated += 1
                break
    return repeated, looked
