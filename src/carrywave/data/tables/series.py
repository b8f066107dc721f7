"""Forecasting data: time series split chronologically into train, valid and test, all of them parts of one flat array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carrywave.data.codec import Codec
from carrywave.data.files.arrays import NewArray
from carrywave.data.files.cache import Entry
from carrywave.data.files.fields import check_largest_weight, refuse_resets, steps_of, take, weight_of
from carrywave.data.files.rows import WEIGHT, Rows
from carrywave.data.overlap import notes_on_cut, notes_on_series
from carrywave.data.sequences import Ints, Sequences
from carrywave.data.tables.calendar import calendar_columns
from carrywave.data.tables.channels import TargetReading
from carrywave.data.tables.choice import COVARIATES, ColumnChoice
from carrywave.data.tables.moments import Moments, moments_of, of_present, own_scale, standardise, with_counts
from carrywave.data.tables.parts import SeriesPart, long_enough, spans, whole
from carrywave.data.tables.table import Table
from carrywave.data.tables.transform import LEAST
from carrywave.errors import DataError
from carrywave.spec.spec import Spec

BLOCK_ROWS = 1 << 16


def check(kept: NDArray[np.bool_], span: SeriesPart, table: Table, spec: Spec, part: str) -> tuple[str, ...]:
    """Return a line about series that are too short and left out of a part, with their names; reject it if all of them are."""
    data, short = spec.data, np.flatnonzero(~kept)
    if not len(short):
        return ()
    num_rows = span.lengths - span.warm
    rows = None if data.split is None or any(share < 1 for share in data.split) or part != "train" else int(sum(data.split))
    if len(short) == len(kept):
        place = int(np.argmax(num_rows))
        short_of_split = rows is not None and int(table.lengths[place]) < rows
        count = int(table.lengths[place] if short_of_split else num_rows[place])
        many = f"series {table.names[place]} has {count} row{'s' * (count != 1)}"
        others = ", and no series has enough" if len(kept) > 1 else ""
        if short_of_split:
            raise DataError(f"{table.name}: {many}, but data.split asks for {rows}{others}; use fewer, or shares below 1")
        needs = f"a horizon of {data.horizon} needs {data.horizon + int(span.warm[place] == 0)}"
        raise DataError(f"{table.name}: {many} in {part}, but {needs}{others}; reduce data.horizon, or add rows to {part}")
    counted = [(table.names[place], int(table.lengths[place])) for place in short[:8]]
    shown = ", ".join(f"{name} ({count:,} row{'s' * (count != 1)})" for name, count in counted)
    shown += f" and {len(short) - 8:,} more" if len(short) > 8 else ""
    needs = f"a horizon of {data.horizon}" if rows is None else f"data.split and a horizon of {data.horizon}"
    are = "is" if len(short) == 1 else "are"
    return (f"{table.name}: {len(short):,} of {len(kept):,} series {are} too short for {needs} and left out of {part}: {shown}",)


def learn(table: Table, train: SeriesPart, spec: Spec, reading: TargetReading, names: tuple[str, ...]) -> Codec:
    """Learn the codec of a training table that was read as `reading` says: columns, and their scale over the rows that are trained on;
    `names` are those of its series.
    """
    choice = table.choice
    moments = Moments()
    for name, start, length in zip(names, train.starts, train.lengths, strict=True):
        moments.add(rows := table.values[int(start) : int(start + length)])
        if not spec.data.standardize:
            moments_of(rows).check_unscaled(table.columns, table.name if len(names) == 1 else f"{table.name}: series {name}")
    scaled, by_series = spec.data.standardize, spec.data.standardize == "sequence"
    mean, std = moments.scale(wanted=bool(scaled), columns=len(table.columns))
    gaps = _gaps(table)
    if gaps is not None and scaled:
        rows = np.concatenate([np.arange(start, start + length) for start, length in zip(train.starts, train.lengths, strict=True)])
        mean, std = of_present(table.values[rows], gaps[rows], (mean, std))
    places = tuple(table.columns.index(target) for target in ((table.value,) if reading.channels else reading.targets))
    counted = places if spec.data.counts else ()
    if counted and scaled:
        sums = [np.abs(table.values[start : start + length]).sum(axis=0) for start, length in zip(train.starts, train.lengths, strict=True)]
        mean, std = with_counts((mean, std), counted, np.sum(sums, axis=0) / max(int(train.lengths.sum()), 1))
    positions = len(calendar_columns(choice.calendar))  # which need no scale, and come last
    if positions:
        mean, std = (*mean[:-positions], *(0.0,) * positions), (*std[:-positions], *(1.0,) * positions)
    fixed = {*choice.static, *calendar_columns(choice.calendar)}
    shared = tuple(place for place, column in enumerate(table.columns) if column in fixed - set(choice.known))
    # A single series shares its scale with any other, so those of its channels are named after these alone.
    names = reading.channels if reading.channels and len(table.names) == reading.many else names
    season = spec.data.season if scales_by_change(spec, table) and not counted else 0
    several = scaled and (by_series or len(table.names) > 1)
    scales = _own_scales(table, train, names, shared, (mean, std), season, counted) if several else {}
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
        frequency=spec.data.frequency_text or table.frequency,
        day_first=None if table.times is None else table.times.day_first,
        own_scale=by_series,
        scale_season=season if scales else 0,
        known=choice.known,
        calendar=choice.calendar,
        static=choice.static,
        categorical=table.categorical,
        categories=_categories(table, train),
        channels=reading.channels,
        transform=reading.transform,
        distribution=reading.distribution,
        **scales,
    )


def _categories(table: Table, train: SeriesPart) -> tuple[tuple[str, ...], ...]:
    """Return the values of each categorical column in the rows that are trained on."""
    if table.codes is None:
        return ()
    rows = np.concatenate([np.arange(start, start + length) for start, length in zip(train.starts, train.lengths, strict=True)])
    occurring = [np.unique(table.codes[rows, place]) for place in range(len(table.categorical))]
    return tuple(tuple(values[code] for code in codes if code >= 0) for values, codes in zip(table.categories, occurring, strict=True))


Scale = tuple[tuple[float, ...], tuple[float, ...]]


def scales_by_change(spec: Spec, table: Table) -> bool:
    """True if series are scaled by their mean absolute seasonal change, as errors of many series are compared."""
    return spec.data.scale == "change" or (spec.data.scale == "auto" and bool(table.series))


def _own_scales(
    table: Table,
    train: SeriesPart,
    names: tuple[str, ...],
    shared: tuple[int, ...],
    all_series: Scale,
    season: int,
    counted: tuple[int, ...] = (),
) -> dict[str, Any]:
    """Return the mean and standard deviation of every series: one may count in thousands, another in units."""
    gaps = _gaps(table)
    scales = [
        with_shared(_own_scale(table, gaps, int(start), int(length), season, counted), shared, all_series)
        for start, length in zip(train.starts, train.lengths, strict=True)
    ]
    return {"names": names, "means": tuple(mean for mean, _ in scales), "stds": tuple(std for _, std in scales)}


def _gaps(table: Table) -> NDArray[np.bool_] | None:
    """Where the numbers of a table were missing, [rows, measured columns]; None if nothing was."""
    return table.missing(range(len(table.columns) - len(calendar_columns(table.choice.calendar))))


def _own_scale(table: Table, gaps: NDArray[np.bool_] | None, start: int, length: int, season: int, counted: tuple[int, ...]) -> Scale:
    rows = slice(start, start + length)
    return own_scale(table.values[rows], season, counted, None if gaps is None else gaps[rows])


def with_shared(scale: Scale, shared: tuple[int, ...], all_series: Scale) -> Scale:
    """Return a series' own scale, but that of all series in columns that are constant within a series, or have a scale by nature."""
    mean, std = (
        tuple(every[place] if place in shared else value for place, value in enumerate(values))
        for values, every in zip(scale, all_series, strict=True)
    )
    return mean, std


def scales(table: Table, codec: Codec) -> list[Scale]:
    """Return the (mean, std) by which each series that a model reads of a table is standardised: in the order of `encoded`.

    All series share one scale unless the codec holds a scale per series, as it does if train has several. Then each series uses
    the scale of its rows in train or, if train does not contain it, of its rows here.
    """
    return _scales(TargetReading.of(codec)(table), codec)


def _scales(table: Table, codec: Codec) -> list[Scale]:
    learned = codec.scale_of
    if not learned:
        return [(codec.mean, codec.std)] * len(table.names)
    shared = tuple(place for place, column in enumerate(codec.columns) if column in codec.fixed)
    scales, gaps = [], _gaps(table)
    for number, (name, start, length) in enumerate(zip(table.names, table.starts, table.lengths, strict=True)):
        scale = learned.get(name) or learned.get(codec.channels[number % len(codec.channels)] if codec.channels else name)
        if scale is None:
            scale = _own_scale(table, gaps, int(start), int(length), codec.scale_season, codec.counted)
            scale = with_shared(scale, shared, (codec.mean, codec.std))
        scales.append(scale)
    return scales


def unseen_series(where: str, names: Sequence[str], codec: Codec) -> tuple[str, ...]:
    """Return a line about series that train does not contain, if every series has its own scale; names are those in the file."""
    new = [] if codec.own_scale else [name for name in names if not codec.knows_scale(name)]  # own_scale asks for this
    if not new:
        return ()
    many = f"series {new[0]} is" if len(new) == 1 else f"{len(new):,} series ({', '.join(new[:3])}{', …' if len(new) > 3 else ''}) are"
    return (f"{where}: {many} not in the training data; the scale is computed from the rows given here, so pass enough of them",)


def _encode(table: Table, codec: Codec, new: NewArray) -> NDArray[Any]:
    """Encode all rows of a table as a model reads it: numbers, standardised, and the codes of categories, 0 for a value that train does not
    contain.
    """
    inputs = new(np.float32, len(codec.columns) + len(codec.categorical))
    codes = known_codes(table, codec)
    for start, total, (mean, std) in zip(table.starts, table.totals, _scales(table, codec), strict=True):
        for first in range(int(start), int(start + total), BLOCK_ROWS):
            rows = slice(first, min(first + BLOCK_ROWS, int(start + total)))
            numbers = standardise(table.values[rows], mean, std, table.name)
            inputs.append(numbers if codes is None else np.concatenate([numbers, codes[rows].astype(np.float32)], axis=1))
    return inputs.close()


def known_codes(table: Table, codec: Codec) -> Ints | None:
    """Return the codes of a table's categories in the training data; None if there are none."""
    if table.codes is None:
        return None
    codes = np.zeros_like(table.codes)
    for place, (values, learned) in enumerate(zip(table.categories, codec.categories, strict=True)):
        number = {value: code for code, value in enumerate(learned, start=1)}
        of_place = np.array([*(number.get(value, 0) for value in values), 0], np.int64)  # the last is that of no value, -1
        codes[:, place] = of_place[table.codes[:, place]]
    return codes


def unseen_values(where: str, table: Table, codec: Codec, span: SeriesPart | None = None) -> tuple[str, ...]:
    """Return a line for each categorical column with values that train does not contain."""
    codes = known_codes(table, codec)
    if codes is None or table.codes is None:
        return ()
    span = whole(table) if span is None else span
    rows = np.concatenate(
        [np.arange(low + warm, low + count) for low, count, warm in zip(span.starts, span.lengths, span.warm, strict=True)]
    )
    lines = []
    for place, column in enumerate(table.categorical):
        unknown = rows[(codes[rows, place] == 0) & (table.codes[rows, place] >= 0)]
        if len(unknown):
            new = [table.categories[place][code] for code in np.unique(table.codes[unknown, place])]
            values = f"value {new[0]!r}" if len(new) == 1 else f"{len(new):,} values ({', '.join(new[:5])}{', …' if len(new) > 5 else ''})"
            many = f"{len(unknown):,} row{'s' * (len(unknown) != 1)}"
            lines.append(f"{where}: column {column} has {values} in {many} that train does not contain; counted as unknown")
    return tuple(lines)


def _sequences(inputs: NDArray[Any], span: SeriesPart, kept: NDArray[np.bool_], table: Table, codec: Codec) -> Sequences:
    """Return one part of the series that are kept, of a table as a model reads it, as sequences."""
    kept_span, names = span.only(kept), _named(table, kept)
    shape = len(table.names), 2, len(codec.columns)
    means, units = np.moveaxis(np.array(_scales(table, codec), np.float64).reshape(shape)[kept], 1, 0).copy()
    warm, absolute = kept_span.warm if kept_span.warm.any() else None, codec.transform in LEAST or codec.distribution != "none"
    means = means if absolute else None
    return Sequences(
        inputs,
        kept_span.starts,
        kept_span.lengths,
        step_weights=table.weights,
        missing=table.missing([table.columns.index(codec.columns[target]) for target in codec.targets]),
        warm=warm,
        units=units,
        means=means,
        names=names,
    )


def _named(table: Table, kept: NDArray[np.bool_]) -> tuple[str, ...]:
    return tuple(name for name, is_kept in zip(table.names, kept, strict=True) if is_kept)


def build(tables: dict[str, Callable[[Codec | None], Table]], spec: Spec, new: NewArray, *, codec: Codec | None) -> Entry:
    """Build all parts of the data: those cut from train's table, and one for each separate file."""
    table = tables["train"](codec)
    cut = spans(table, spec, valid_file="valid" in tables, test_file="test" in tables)
    # A series that is too short to be trained on is left out of all parts: its scale would come from rows that are held out.
    in_train = long_enough(cut["train"], spec.data.horizon)
    notes = [*table.notes, *check(in_train, cut["train"], table, spec, "train")]
    kept = {part: in_train & long_enough(span, spec.data.horizon) for part, span in cut.items()}
    for part, fits in kept.items():
        if part != "train":
            notes += check(fits | ~in_train if fits.any() else fits, cut[part], table, spec, part)
    reading = TargetReading.from_spec(table, spec) if codec is None else TargetReading.of(codec)
    read_as, read_spans = reading(table), {part: reading.part(span, table) for part, span in cut.items()}
    trained, read_kept = np.repeat(in_train, reading.many), {part: np.repeat(each, reading.many) for part, each in kept.items()}
    notes += notes_on_cut(table, cut, kept)
    learned = codec is None
    codec = codec or learn(read_as, read_spans["train"].only(trained), spec, reading, _named(read_as, trained))
    inputs = _encode(read_as, codec, new)
    parts = {part: _sequences(inputs, span, read_kept[part], read_as, codec) for part, span in read_spans.items()}
    notes += [line for part, span in cut.items() if part != "train" for line in unseen_values(part, table, codec, span.only(kept[part]))]
    if learned and spec.data.standardize:
        flat = _constant(read_as, read_spans["train"], codec)
        for part, each in read_kept.items():
            notes += _without_scale(read_as, read_spans[part], flat & each[:, None], codec, part) if part != "train" else ()
    for part, open_table in tables.items():
        if part != "train":
            other = open_table(codec)
            notes += notes_on_series(table, cut["train"].starts, cut["train"].lengths, other, part)
            notes += other.notes[1:]  # the first note, about columns, is already given for train
            parts[part] = (sequences := read(replace(other, notes=other.notes[:1]), codec, spec, new, part=part, labelled=True))
            notes += sequences.notes
    for part, sequences in parts.items():
        check_weights(sequences, part)
    return Entry(parts, codec, tuple(notes), table.about)


def check_weights(data: Sequences, part: str) -> None:
    """Refuse a part in which no row that is forecast or estimated has a weight above 0; the first rows may only warm up the carry."""
    weights = data.step_weights
    bounds = zip(data.starts if data.warm is None else data.starts + data.warm, data.starts + data.lengths, strict=True)
    if weights is not None:
        check_largest_weight(
            max(float(weights[low:high].max(initial=0.0)) for low, high in bounds), f"{part}: every weight in it", "remove data.weight"
        )


def _constant(table: Table, span: SeriesPart, codec: Codec) -> NDArray[np.bool_]:
    """Return which targets of which series never change in a part: [series, targets]."""
    targets, bounds = list(codec.targets), zip(span.starts, span.starts + span.lengths, strict=True)
    rows = [table.values[low:high][:, targets] for low, high in bounds]
    return np.array([np.ptp(part, axis=0) == 0 if len(part) else np.ones(len(targets), np.bool_) for part in rows], np.bool_)


def _without_scale(table: Table, span: SeriesPart, flat: NDArray[np.bool_], codec: Codec, part: str) -> tuple[str, ...]:
    """Return a line about series with a target that is `flat` in train and changes in a part: its deviation is not known."""
    new = [table.names[place] for place in np.flatnonzero((flat & ~_constant(table, span, codec)).any(axis=1))]
    if not new:
        return ()
    many = f"series {new[0]} is" if len(new) == 1 else f"{len(new):,} series ({', '.join(new[:3])}{', …' * (len(new) > 3)}) are"
    fact = f"{many} constant in train but not here, which leaves no scale for the change"
    return (f"{part}: {fact}: it counts in the units of the file in loss, mae and rmse, and may outweigh all others",)


def encoded(table: Table, codec: Codec, new: NewArray) -> Sequences:
    """Return all rows of a table as sequences, with no warm-up."""
    table = TargetReading.of(codec)(table)
    return _sequences(_encode(table, codec, new), whole(table), np.ones(len(table.names), np.bool_), table, codec)


def read(table: Table, codec: Codec, spec: Spec, new: NewArray, *, part: str, labelled: bool) -> Sequences:
    """Read a separate table with the codec of the training data."""
    span, kept = whole(table), np.ones(len(table.names), np.bool_)
    used = span if labelled else SeriesPart(table.starts, table.totals, span.warm)  # a forecast also reads what is known ahead
    notes = (*table.notes[1:], *unseen_values(table.name, table, codec, used))  # which columns are read was reported in training
    if labelled:
        kept = long_enough(span, spec.data.horizon)
        notes += check(kept, span, table, spec, part)
    elif codec.known:
        check_known(table, codec, spec.data.horizon)
    table, many = TargetReading.of(codec)(table), len(codec.channels) or 1
    return replace(_sequences(_encode(table, codec, new), whole(table), np.repeat(kept, many), table, codec), notes=notes)


def check_known(table: Table, codec: Codec, horizon: int) -> None:
    """Reject a table to predict from in which what is known ahead ends before the horizon does."""
    ahead = np.zeros_like(table.lengths) if table.ahead_rows is None else table.ahead_rows
    columns = ", ".join(codec.known[:4])
    if (ahead < horizon).any():
        place = int(np.argmax(ahead < horizon))
        of = f" of series {table.names[place]}" if len(table.names) > 1 else ""
        fact = f"{columns} must be known for {horizon} steps after the last values{of}, but {int(ahead[place])} are given"
        remedy = f"add rows with their times and {columns}, and the other columns empty (or, to a forecaster, pass them as future)"
        raise DataError(f"{table.name}: {fact}; {remedy}")


def from_rows(rows: Rows, weight: str | None = None) -> Table:
    """Make a table from rows with `steps`, one series each; `weight` is the field with the weight of each, or of each of its steps."""
    matrices: list[NDArray[np.float64]] = []
    weights: list[NDArray[np.float32]] = []
    for number, row in rows:
        where = rows.where(number)
        refuse_resets(row, where)
        matrices.append(steps_of(row, where, matrices[0].shape[1] if matrices else None))
        if weight is not None:
            row_weights = weight_of({WEIGHT: take(row, weight, where)}, len(matrices[-1]), where)
            weights.append(np.broadcast_to(np.asarray(row_weights, np.float32), len(matrices[-1])))
    if not matrices:
        raise DataError(f"{rows.name} is empty; use data with at least one series")
    table = from_matrices(matrices, rows.name)
    return replace(table, weights=np.concatenate(weights)) if weights else table


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
    )


def choose_columns(table: Table, choice: ColumnChoice) -> Table:
    """Return a table of unnamed columns restricted to some of them; it has no covariates."""
    columns = choice.columns
    choice.check_unnamed(table.name, "time", "series", "frequency")
    if choice.weight is not None and table.weights is None:
        raise DataError(f"{table.name} is a list of numbers, but data.weight names a column; use a CSV or Parquet file, or a frame")
    if choice.named:
        fact = f"{table.name} is a list of numbers, but data.{next(name for name in COVARIATES if getattr(choice, name))} names columns"
        raise DataError(f"{fact}; use a CSV or Parquet file, or a frame")
    if columns is None or columns == table.columns:
        return table
    missing = [column for column in columns if column not in table.columns]
    if missing:
        raise DataError(f"{table.name} has no column {missing[0]!r} (data.columns); its columns are {', '.join(table.columns[:8])}")
    return replace(table, columns=columns, values=table.values[:, [table.columns.index(column) for column in columns]])
