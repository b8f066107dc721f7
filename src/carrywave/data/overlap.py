"""Tells if what a model is judged by is also what it is trained on: sequences, passages of a stream, rows or times of series; and if rows
of series are in no part.

Nothing is refused: equal rows may be right, as with short texts. Only part of very large data is looked at.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from carrywave.data.sequences import Sequences
from carrywave.data.tables.table import Table
from carrywave.data.tables.times import Times

if TYPE_CHECKING:
    from carrywave.data.tables.parts import SeriesPart

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
    unused = (table.starts + table.lengths - last.starts - last.lengths)[in_train]
    if unused.any():
        rows, total = int(unused.sum()), int(table.lengths[in_train].sum())
        whose = f"the last {rows:,} of {total:,} rows" if len(unused) == 1 else f"{rows:,} of {total:,} rows, at the ends of series,"
        yield f"{table.name}: data.split leaves {whose} unused; use larger parts if they should be used"
    train = cut["train"].only(in_train)
    for part, span in cut.items():
        begins = (span.starts + span.warm)[kept[part]]
        if part != "train" and table.times is not None and _comparable(table.times, table.times):
            yield from _meanwhile(table.times, train.starts + train.lengths - 1, table.times.keys[begins], part)


def _meanwhile(train: Times, ends: NDArray[np.int64], begins: NDArray[np.generic], part: str) -> Iterator[str]:
    """A line about series of a part that begin while others are trained on; `ends` are the last rows of series in train."""
    last = int(ends[np.argmax(train.keys[ends])])
    count = int((begins <= train.keys[last]).sum())
    if count:
        of = f"{_many(count, len(begins))} series begin{'s' * (count == 1)}" if len(begins) > 1 else "its series begins"
        until = train.written(slice(last, last + 1))[0]
        fact = f"{of} before train of other series ends ({until}), so the model is trained on times that it is judged by"
        yield f"{part}: {fact}; to cut all series at one time, use separate files for train, valid and test"


def notes_on_series(train: Table, trained: SeriesPart, other: Table, part: str) -> Iterator[str]:
    """Lines about the rows of a part that are also `trained` on, and about series that begin before train ends."""
    starts, lengths = trained.starts, trained.lengths
    if not _comparable(train.times, other.times):
        rows = np.concatenate([train.values[low : low + count] for low, count in zip(starts, lengths, strict=True)])
        repeated, looked = _passages(rows, other.values, ROWS) if train.columns == other.columns else (0, 0)
        if repeated >= max(1, ENOUGH * looked):
            yield f"{part}: {_many(repeated, looked)} passages looked at are also in train, {BETTER}"
        return
    assert train.times is not None
    assert other.times is not None
    alone = not train.series and not other.series  # names are then those of the files
    places = {name: place for place, name in enumerate(train.names)}
    twice = shared = 0
    early: list[str] = []
    for place, name in enumerate(other.names):
        number = 0 if alone else places.get(name)
        if number is None or not lengths[number]:
            continue
        before = train.times.keys[starts[number] : starts[number] + lengths[number]]
        keys = other.times.keys[other.starts[place] : other.starts[place] + other.lengths[place]]
        twice, shared = twice + int(np.isin(keys, before).sum()), shared + len(keys)
        if keys[0] < before[-1]:
            early.append(name)
    if twice:
        yield f"{part}: {_many(twice, shared)} rows are also in train, {BETTER}"
    elif early:
        of = f"series {early[0]} begins" if len(early) == 1 else f"{len(early):,} of {len(other.names):,} series begin"
        what = "it begins" if alone else of
        yield f"{part}: {what} before train ends, so the model is trained on later rows than it is judged by; use rows that follow train"
    elif lengths.any():
        yield from _meanwhile(train.times, (starts + lengths - 1)[lengths > 0], other.times.keys[other.starts], part)


def _comparable(times: Times | None, other: Times | None) -> bool:
    """True if times of one can be compared with times of the other."""
    return times is not None and other is not None and times.counted == other.counted


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
