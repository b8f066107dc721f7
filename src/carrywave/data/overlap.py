"""Tells if what a model is judged by is also what it is trained on: sequences, passages of a stream or rows of a series.

Nothing is refused: equal rows may be right, as with short texts. Only part of very large data is looked at.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from carrywave.data.sequences import Sequences
from carrywave.data.tables.table import Table
from carrywave.data.tables.times import Times

MOST_JUDGED, MOST_TRAINED = 4096, 1 << 18  # sequences that are looked at
MOST_BYTES = 1 << 28  # of a stream
PASSAGES, TOKENS, ROWS = 64, 256, 32  # how many passages are looked for, and how long they are
ENOUGH = 0.01  # share of sequences or passages that is worth a line
BETTER = "so the figures look better than they are; keep them in only one of the two"


def notes(parts: Mapping[str, Sequences], given: Collection[str]) -> Iterator[str]:
    """A line for each part of which much is in train, too; `given` names the parts that were not cut from it."""
    train = parts["train"]
    for name in ("valid", "test"):
        other = parts.get(name)
        if other is None:
            continue
        if len(train) > 1 or len(other) > 1:
            found, looked, what = *_sequences(train, other), "sequences"
        elif name in given:  # within one text, passages may well come again
            found, looked, what = *_passages(_rows_of(train), _rows_of(other), TOKENS), "passages looked at"
        else:
            continue
        if found >= max(1, ENOUGH * looked):
            yield f"{name}: {_many(found, looked)} {what} are also in train, {BETTER}"


def told_of_series(train: Table, starts: NDArray[np.int64], lengths: NDArray[np.int64], other: Table, part: str) -> Iterator[str]:
    """Lines about the rows of a part that train has too, and about series that begin before train ends. `starts` and `lengths` are the
    rows of each series in train.
    """
    if not _comparable(train.times) or not _comparable(other.times):
        rows = np.concatenate([train.values[low : low + count] for low, count in zip(starts, lengths, strict=True)])
        found, looked = _passages(rows, other.values, ROWS) if train.columns == other.columns else (0, 0)
        if found >= max(1, ENOUGH * looked):
            yield f"{part}: {_many(found, looked)} passages looked at are also in train, {BETTER}"
        return
    assert train.times is not None
    assert other.times is not None
    alone = train.series is None and other.series is None  # names are then those of the files
    places = {name: place for place, name in enumerate(train.names)}
    twice = shared = 0
    early: list[str] = []
    for place, name in enumerate(other.names):
        own = 0 if alone else places.get(name)
        if own is None or not lengths[own]:
            continue
        before = train.times.keys[starts[own] : starts[own] + lengths[own]]
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


def _comparable(times: Times | None) -> bool:
    return times is not None and not times.in_words


def _many(found: int, looked: int) -> str:
    return f"all {looked:,}" if found == looked else f"{found:,} of {looked:,}"


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
    found = looked = 0
    for start in np.unique(np.linspace(0, len(other) - length, PASSAGES).astype(np.int64)):
        passage = np.ascontiguousarray(other[int(start) : int(start) + length])
        if (passage == passage[:1]).all():
            continue
        looked += 1
        content, at = passage.tobytes(), -1
        while (at := whole.find(content, at + 1)) >= 0:
            if at % row_bytes == 0:
                found += 1
                break
    return found, looked
