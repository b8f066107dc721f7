"""Forecasting data: time series split chronologically into train, valid and test, all of them parts of one flat array."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carrywave.data.codec import Codec
from carrywave.data.files.cache import Entry
from carrywave.data.sequences import Ints, Sequences
from carrywave.data.tables.calendar import calendar_columns
from carrywave.data.tables.channels import LEAST, TargetReading
from carrywave.data.tables.choice import listed
from carrywave.data.tables.moments import Values, scale_of, scales_of, standardise
from carrywave.data.tables.parts import SeriesPart, long_enough, spans, whole
from carrywave.data.tables.table import Table
from carrywave.errors import DataError
from carrywave.spec.spec import Spec


def check(kept: NDArray[np.bool_], span: SeriesPart, table: Table, spec: Spec, part: str) -> tuple[str, ...]:
    """Return a line about series that are too short and left out of a part, with their names; reject it if all of them are."""
    data, short = spec.data, np.flatnonzero(~kept)
    asked = int(sum(data.split)) if part == "train" and data.split is not None and min(data.split) >= 1 else 0  # rows of each series
    if len(short) and len(short) == len(kept):
        num_rows = span.lengths - span.warm
        place = int(np.argmax(num_rows))
        many, where = int(num_rows[place]), f" in {part}"
        needs = f"a horizon of {data.horizon} needs {data.horizon + int(span.warm[place] == 0)}; reduce data.horizon, or add rows to {part}"
        if table.lengths[place] < asked:
            many, where, needs = int(table.lengths[place]), "", f"data.split asks for {asked}; use fewer, or shares below 1"
        raise DataError(f"{table.name}: series {table.names[place]} has {many} row{'s' * (many != 1)}{where}, but {needs}")
    shown = listed([f"{table.names[place]} ({table.lengths[place]:,} rows)" for place in short])
    needs = f"data.split and a horizon of {data.horizon}" if asked else f"a horizon of {data.horizon}"
    fact = f"{len(short):,} of {len(kept):,} series too short for {needs}"
    return (f"{table.name}: {fact} are left out of {part}: {shown}",) if len(short) else ()


def described(table: Table, train: SeriesPart, spec: Spec) -> dict[str, Any]:
    """What a codec says of a training table, whatever is learned from it."""
    codes = table.codes[train.rows]
    seen = [np.unique(codes[:, place]) for place in range(len(table.categorical))]
    categories = tuple(tuple(values[code] for code in each if code >= 0) for values, each in zip(table.categories, seen, strict=True))
    return {
        "task": spec.task,
        "field": "columns",
        "time": table.time,
        "series": table.series,
        "frequency": spec.data.frequency_text or table.frequency,
        "day_first": None if table.times is None else table.times.day_first,
        "calendar": table.choice.calendar,
        "static": table.choice.static,
        "categorical": table.categorical,
        "categories": categories,
    }


def learn(table: Table, train: SeriesPart, spec: Spec, reading: TargetReading, names: tuple[str, ...]) -> Codec:
    """Learn the codec of a training table that was read as `reading` says: columns, and their scale over the rows that are trained on;
    `names` are those of its series.
    """
    calendar, by_series = calendar_columns(table.choice.calendar), spec.data.standardize == "sequence"
    places = tuple(table.columns.index(target) for target in ((table.value,) if reading.channels else reading.targets))
    counted = places if spec.data.counts else ()
    measured, rows = len(table.columns) - len(calendar), train.rows
    mean, std = (0.0,) * measured, (1.0,) * measured
    if spec.data.standardize:
        gaps = table.missing(range(measured))
        mean, std = scale_of(table.values[rows, :measured], counted, None if gaps is None else gaps[rows])
    mean, std = (*mean, *(0.0 for _ in calendar)), (*std, *(1.0 for _ in calendar))  # the calendar needs no scale, and comes last
    # Series are scaled by their mean absolute seasonal change, as errors of many series are compared.
    by_change = bool(table.series)
    codec = Codec(
        columns=table.columns,
        targets=places,
        mean=mean,
        std=std,
        target_mean=tuple(mean[place] for place in places),
        target_std=tuple(std[place] for place in places),
        own_scale=by_series,
        known=table.choice.known,
        channels=reading.channels,
        transform=reading.transform,
        distribution=reading.distribution,
        **described(table, train, spec),
    )
    if not spec.data.standardize or not (by_series or len(table.names) > 1):
        return codec
    codec = replace(codec, scale_season=spec.data.season if by_change and not counted else 0)
    means, stds = (tuple(map(tuple, each.tolist())) for each in _own_scales(table, codec, train))
    # A single series shares its scale with any other, so those of its channels are named after these alone.
    names = reading.channels if reading.channels and len(table.names) == reading.many else names
    return replace(codec, names=names, means=means, stds=stds)


def _own_scales(table: Table, codec: Codec, span: SeriesPart) -> tuple[Values, Values]:
    """The scale of each series, one of which may count in thousands, another in units; but that of all series in columns that are constant
    within a series, or have a scale by nature: [series, columns].
    """
    gaps = table.missing(range(len(table.columns) - len(calendar_columns(codec.calendar))))
    season, counted = codec.scale_season, codec.counted
    mean, std = scales_of(table.values, span.starts, span.lengths, season=season, counted=counted, missing=gaps)
    shared = [name in codec.fixed and name not in codec.known for name in codec.columns]
    return np.where(shared, codec.mean, mean), np.where(shared, codec.std, std)


def scales(table: Table, codec: Codec) -> tuple[Values, Values]:
    """Return mean and std [series, columns] by which the series that a model reads of a table are standardised: in the order of `encoded`.

    All series share one scale unless the codec holds a scale per series, as it does if train has several. Then each series uses
    the scale of its rows in train or, if train does not contain it, of its rows here.
    """
    return _scales(TargetReading.of(codec)(table), codec)


def _scales(table: Table, codec: Codec) -> tuple[Values, Values]:
    learned, channels = codec.scale_of, codec.channels or (None,)
    mean, std = (np.tile(np.array(each, np.float64), (len(table.names), 1)) for each in (codec.mean, codec.std))
    known = [learned.get(name) or learned.get(channels[number % len(channels)] or name) for number, name in enumerate(table.names)]
    new = np.array([each is None for each in known], np.bool_)
    if learned:
        mean[~new], std[~new] = (np.array([each[way] for each in known if each is not None]).reshape(-1, mean.shape[1]) for way in (0, 1))
        if new.any():
            mean[new], std[new] = _own_scales(table, codec, whole(table).only(new))
    return mean, std


def unseen_series(where: str, names: Sequence[str], codec: Codec) -> tuple[str, ...]:
    """Return a line about series that train does not contain, if every series has its own scale; names are those in the file."""
    new = [] if codec.own_scale else [name for name in names if not codec.knows_scale(name)]  # own_scale asks for this
    fact = "not in the training data; the scale is computed from the rows given here, so pass enough of them"
    many = f"{len(new):,} series ({', '.join(new[:3])}{', …' * (len(new) > 3)}) are" if len(new) > 1 else f"series {''.join(new)} is"
    return (f"{where}: {many} {fact}",) if new else ()


def _encode(table: Table, codec: Codec) -> NDArray[np.float32]:
    """Encode all rows of a table as a model reads it: numbers, standardised, and the codes of categories, 0 for a value that train does not
    contain.
    """
    mean, std = (np.repeat(each, table.totals, axis=0) for each in _scales(table, codec))
    return np.concatenate([standardise(table.values, mean, std), known_codes(table, codec).astype(np.float32)], axis=1)


def known_codes(table: Table, codec: Codec) -> Ints:
    """Return the codes of a table's categories in the training data, [rows, categorical columns]."""
    codes = np.zeros((len(table.values), len(table.categorical)), np.int64)
    for place, (values, learned) in enumerate(zip(table.categories, codec.categories, strict=True)):
        number = {value: code for code, value in enumerate(learned, start=1)}
        of_place = np.array([*(number.get(value, 0) for value in values), 0], np.int64)  # the last is that of no value, -1
        codes[:, place] = of_place[table.codes[:, place]]
    return codes


def unseen_values(where: str, table: Table, codec: Codec, span: SeriesPart | None = None) -> tuple[str, ...]:
    """Return a line for each categorical column with values that train does not contain."""
    codes, lines = known_codes(table, codec), []
    rows = (whole(table) if span is None else span).scored.rows
    for place, column in enumerate(table.categorical):
        unknown = rows[(codes[rows, place] == 0) & (table.codes[rows, place] >= 0)]
        if len(unknown):
            new = [repr(table.categories[place][code]) for code in np.unique(table.codes[unknown, place])]
            values = f"value{'s' * (len(new) > 1)} {listed(new)}"
            many = f"{len(unknown):,} row{'s' * (len(unknown) != 1)}"
            lines.append(f"{where}: column {column} has {values} in {many} that train does not contain; counted as unknown")
    return tuple(lines)


def _sequences(inputs: NDArray[Any], span: SeriesPart, kept: NDArray[np.bool_], table: Table, codec: Codec) -> Sequences:
    """Return one part of the series that are kept, of a table as a model reads it, as sequences."""
    chosen = span.only(kept)
    means, units = (each[kept] for each in _scales(table, codec))
    absolute = codec.transform in LEAST or codec.distribution != "none"
    return Sequences(
        inputs,
        chosen.starts,
        chosen.lengths,
        step_weights=table.weights,
        missing=table.missing([table.columns.index(codec.columns[target]) for target in codec.targets]),
        warm=chosen.warm if chosen.warm.any() else None,
        units=units,
        means=means if absolute else None,
        names=names_of(table, kept),
    )


def names_of(table: Table, kept: NDArray[np.bool_]) -> tuple[str, ...]:
    """Return the names of the series that are kept."""
    return tuple(name for name, is_kept in zip(table.names, kept, strict=True) if is_kept)


def build(table: Table, spec: Spec, *, codec: Codec | None, files: Collection[str]) -> Entry:
    """Build the parts that are cut from train's table; `files` are those that have one of their own."""
    cut = spans(table, spec, files)
    # A series that is too short to be trained on is left out of all parts: its scale would come from rows that are held out.
    in_train = long_enough(cut["train"], spec.data.horizon)
    notes = [*table.notes, *check(in_train, cut["train"], table, spec, "train")]
    kept = {part: in_train & long_enough(span, spec.data.horizon) for part, span in cut.items()}
    for part, fits in kept.items():
        if part != "train":
            notes += check(fits | ~in_train if fits.any() else fits, cut[part], table, spec, part)
    reading = TargetReading.from_spec(table, spec) if codec is None else TargetReading.of(codec)
    read_as, read_spans = reading(table), {part: reading.part(span, table) for part, span in cut.items()}
    read_kept = {part: np.repeat(each, reading.many) for part, each in kept.items()}
    codec = codec or learn(read_as, read_spans["train"].only(read_kept["train"]), spec, reading, names_of(read_as, read_kept["train"]))
    inputs = _encode(read_as, codec)
    parts = {part: _sequences(inputs, span, read_kept[part], read_as, codec) for part, span in read_spans.items()}
    notes += [line for part, span in cut.items() if part != "train" for line in unseen_values(part, table, codec, span.only(kept[part]))]
    return Entry(parts, codec, tuple(notes), table.about)


def encoded(table: Table, codec: Codec) -> Sequences:
    """Return all rows of a table as sequences, with no warm-up."""
    table = TargetReading.of(codec)(table)
    return _sequences(_encode(table, codec), whole(table), np.ones(len(table.names), np.bool_), table, codec)


def read(table: Table, codec: Codec, spec: Spec, *, part: str, labelled: bool) -> Sequences:
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
    return replace(_sequences(_encode(table, codec), whole(table), np.repeat(kept, many), table, codec), notes=notes)


def check_known(table: Table, codec: Codec, horizon: int) -> None:
    """Reject a table to predict from in which what is known ahead ends before the horizon does."""
    ahead = table.totals - table.lengths
    if (ahead < horizon).any():
        columns, place = listed(codec.known), int(np.argmax(ahead < horizon))
        of = f" of series {table.names[place]}" if len(table.names) > 1 else ""
        fact = f"{columns} must be known for {horizon} steps after the last values{of}, but {int(ahead[place])} are given"
        remedy = f"add rows with their times and {columns}, and the other columns empty (or, to a forecaster, pass them as future)"
        raise DataError(f"{table.name}: {fact}; {remedy}")
