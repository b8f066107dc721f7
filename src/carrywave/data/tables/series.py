"""Forecasting data: time series split chronologically into train, valid and test, all of them parts of one flat array.

A part that follows another in its series starts `warm` rows earlier; those rows bring the carry up to date and are not scored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carrywave.data.codec import Codec
from carrywave.data.files.arrays import NewArray
from carrywave.data.files.cache import Entry
from carrywave.data.files.fields import steps_of
from carrywave.data.files.rows import Rows
from carrywave.data.sequences import Ints, Sequences
from carrywave.data.tables.moments import Moments, own_scale, standardise
from carrywave.data.tables.table import Table
from carrywave.errors import DataError, SpecError
from carrywave.spec.spec import Spec

BLOCK_ROWS = 1 << 16
PARTS = ("train", "valid", "test")


@dataclass(frozen=True)
class SeriesPart:
    """One part of each series: rows `starts … starts + lengths - 1` of the table; the first `warm` of them only warm up the carry."""

    starts: Ints
    lengths: Ints
    warm: Ints


def spans(table: Table, spec: Spec, *, valid_file: bool, test_file: bool) -> dict[str, SeriesPart]:
    """Split a training table by `data.split`; without it, the last share becomes valid unless there is a file for it."""
    data = spec.data
    if data.split is not None:
        if valid_file or (test_file and len(data.split) == 3):
            raise SpecError(
                "data.split takes valid and test from the training file, but separate files are set for them too; use one or the other"
            )
        bounds = np.array(
            [_bounds(int(length), data.split, name, table.name) for length, name in zip(table.lengths, table.names, strict=True)], np.int64
        )
    elif data.share > 0 and not valid_file:
        held = np.maximum(np.floor(table.lengths * data.share + 1e-9).astype(np.int64), data.horizon)
        bounds = np.stack([np.maximum(table.lengths - held, 0), table.lengths], axis=1)
    else:
        bounds = table.lengths[:, None]
    context = data.context or max(10 * data.season, 4 * spec.steps)
    found: dict[str, SeriesPart] = {}
    before = np.zeros_like(table.lengths)
    for place, part in enumerate(PARTS[: bounds.shape[1]]):
        warm = np.minimum(before, context)
        found[part] = SeriesPart(table.starts + before - warm, bounds[:, place] - before + warm, warm)
        before = bounds[:, place]
    return found


def _bounds(rows: int, split: tuple[float, ...], series: str, name: str) -> list[int]:
    """Return where the parts of one series end."""
    sums = np.cumsum(split)
    if any(part < 1 for part in split):
        return [int(np.floor(rows * total + 1e-9)) for total in sums]
    if sums[-1] > rows:
        raise DataError(
            f"{name}: series {series} has {rows} row{'s' * (rows != 1)}, but data.split asks for {int(sums[-1])}; "
            "use fewer, or shares below 1"
        )
    return [int(total) for total in sums]


def whole(table: Table) -> SeriesPart:
    """Return all rows of every series, with no warm-up."""
    return SeriesPart(table.starts, table.lengths, np.zeros_like(table.lengths))


def check(span: SeriesPart, table: Table, part: str, horizon: int) -> None:
    """Reject a part in which some series is too short for a single forecast over the whole horizon."""
    own = span.lengths - span.warm
    short = own < np.where(span.warm > 0, horizon, horizon + 1)
    if short.any():
        place = int(np.argmax(short))
        raise DataError(
            f"{table.name}: series {table.names[place]} has {int(own[place])} row{'s' * (int(own[place]) != 1)} in {part}, "
            f"but a horizon of {horizon} needs {horizon + (span.warm[place] == 0)}; "
            f"reduce data.horizon, add rows to {part}, or remove the series"
        )


def learn(table: Table, train: SeriesPart, spec: Spec) -> Codec:
    """Learn the codec of a training table: columns, and their scale over the rows that are trained on."""
    targets = spec.data.targets or table.columns
    for target in targets:
        if target not in table.columns:
            raise DataError(
                f"{table.name}: data.targets names {target!r}, which is not among the columns read "
                f"({', '.join(table.columns[:8])}); include it in data.columns"
            )
    moments = Moments()
    for start, length in zip(train.starts, train.lengths, strict=True):
        moments.add(table.values[int(start) : int(start + length)])
    scaled, by_series = spec.data.standardize, spec.data.standardize == "sequence"
    mean, std = moments.scale(wanted=bool(scaled), columns=len(table.columns))
    own = _own_scales(table, train) if scaled and (by_series or len(table.names) > 1) else {}
    places = tuple(table.columns.index(target) for target in targets)
    return Codec(
        spec.task,
        "columns",
        columns=table.columns,
        targets=places,
        mean=mean,
        std=std,
        target_mean=tuple(mean[place] for place in places),
        target_std=tuple(std[place] for place in places),
        time=table.time,
        series=table.series,
        frequency=spec.data.rhythm or table.frequency,
        own_scale=by_series,
        **own,
    )


def _own_scales(table: Table, train: SeriesPart) -> dict[str, Any]:
    """Return the mean and standard deviation of every series: one may count in thousands, another in units."""
    scales = [own_scale(table.values[start : start + length]) for start, length in zip(train.starts, train.lengths, strict=True)]
    return {"names": table.names, "means": tuple(mean for mean, _ in scales), "stds": tuple(std for _, std in scales)}


def scales(table: Table, codec: Codec) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    """Return the (mean, std) by which each series of a table is standardised.

    All series share one scale unless the codec holds a scale per series, as it does if train has several. Then each series uses
    the scale of its rows in train or, if train does not contain it, of its rows here.
    """
    if not codec.names:
        return [(codec.mean, codec.std)] * len(table.names)
    known = dict(zip(codec.names, zip(codec.means, codec.stds, strict=True), strict=True))
    return [
        known[name] if name in known else own_scale(table.values[start : start + length])
        for name, start, length in zip(table.names, table.starts, table.lengths, strict=True)
    ]


def unseen_series(where: str, names: Sequence[str], codec: Codec) -> tuple[str, ...]:
    """Return a line about series that train does not contain, if every series has its own scale."""
    known = set(codec.names)
    new = [] if not known or codec.own_scale else [name for name in names if name not in known]  # own_scale asks for this
    if not new:
        return ()
    many = f"series {new[0]} is" if len(new) == 1 else f"{len(new):,} series ({', '.join(new[:3])}{', …' if len(new) > 3 else ''}) are"
    return (f"{where}: {many} not in the training data; the scale is computed from the rows given here, so pass enough of them",)


def encode(table: Table, codec: Codec, new: NewArray) -> NDArray[Any]:
    """Standardise all rows of a table."""
    inputs = new(np.float32, len(codec.columns))
    for start, length, (mean, std) in zip(table.starts, table.lengths, scales(table, codec), strict=True):
        for first in range(int(start), int(start + length), BLOCK_ROWS):
            inputs.append(standardise(table.values[first : min(first + BLOCK_ROWS, int(start + length))], mean, std, table.name))
    return inputs.close()


def sequences(inputs: NDArray[Any], span: SeriesPart, table: Table) -> Sequences:
    """Return one part of every series as sequences."""
    return Sequences(inputs, span.starts, span.lengths, warm=span.warm if span.warm.any() else None, names=table.names)


def build(tables: dict[str, Callable[[Codec | None], Table]], spec: Spec, new: NewArray, *, codec: Codec | None) -> Entry:
    """Build all parts of the data: those cut from train's table, and one for each separate file."""
    table = tables["train"](codec)
    cut = spans(table, spec, valid_file="valid" in tables, test_file="test" in tables)
    for part, span in cut.items():
        check(span, table, part, spec.data.horizon)
    codec = codec or learn(table, cut["train"], spec)
    inputs = encode(table, codec, new)
    parts = {part: sequences(inputs, span, table) for part, span in cut.items()}
    notes = list(table.notes)
    for part, open_table in tables.items():
        if part != "train":
            other = open_table(codec)
            notes += other.notes[1:]  # the first note, about columns, is already given for train
            parts[part] = read(other, codec, spec, new, part=part, labelled=True)
    return Entry(parts, codec, tuple(notes))


def read(table: Table, codec: Codec, spec: Spec, new: NewArray, *, part: str, labelled: bool) -> Sequences:
    """Read a separate table with the codec of the training data."""
    if labelled:
        check(whole(table), table, part, spec.data.horizon)
    notes = table.notes[1:]  # which columns are read was reported in training
    return replace(sequences(encode(table, codec, new), whole(table), table), notes=notes)


def from_rows(rows: Rows) -> Table:
    """Make a table from rows with `steps`, one series each."""
    matrices: list[NDArray[np.float64]] = []
    for number, row in rows:
        matrices.append(steps_of(row, rows.where(number), matrices[0].shape[1] if matrices else None))
    if not matrices:
        raise DataError(f"{rows.name} is empty; use data with at least one series")
    return from_matrices(matrices, rows.name)


def from_matrices(matrices: list[NDArray[np.float64]], name: str) -> Table:
    """Make a table from matrices [rows, columns], one series each."""
    lengths = np.array([len(matrix) for matrix in matrices], np.int64)
    return Table(
        name,
        tuple(str(place) for place in range(matrices[0].shape[1])),
        np.concatenate(matrices),
        np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)[:-1]]),
        lengths,
        tuple(f"{name} item {place}" for place in range(len(matrices))) if len(matrices) > 1 else (name,),
        None,
        None,
    )


def choose_columns(table: Table, columns: tuple[str, ...] | None) -> Table:
    """Return the table restricted to some of its columns."""
    if columns is None or columns == table.columns:
        return table
    missing = [column for column in columns if column not in table.columns]
    if missing:
        raise DataError(f"{table.name} has no column {missing[0]!r} (data.columns); its columns are {', '.join(table.columns[:8])}")
    return replace(table, columns=columns, values=table.values[:, [table.columns.index(column) for column in columns]])
