"""Data for regression at every step: series of inputs, with numbers to estimate from them at each step, some of which are missing.

Blocks of series are read twice, to learn the codec and to write the arrays, so that memory does not grow with the file. All series share
one scale, that of the rows that are trained on. Parts are cut as those of forecasts are: in time, each after rows that warm up the carry.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carrywave.data.codec import Codec
from carrywave.data.files.arrays import Appender, NewArray
from carrywave.data.files.cache import Entry
from carrywave.data.holdout import held_out
from carrywave.data.sequences import Ints, Sequences
from carrywave.data.steps.gaps import mask_columns, masked
from carrywave.data.steps.table_blocks import SeriesSource
from carrywave.data.tables.calendar import calendar_columns
from carrywave.data.tables.moments import Moments, standardise
from carrywave.data.tables.parts import SeriesPart, spans, whole
from carrywave.data.tables.series import check_weights, known_codes, unseen_values
from carrywave.data.tables.table import Table
from carrywave.errors import DataError
from carrywave.spec.spec import Spec

MOST_NOTES = 8  # of blocks, which may all be alike
# Added to a series' deviation in the NSE loss, as in Kratzert et al. (2019): a nearly dry one does not outweigh all others.
LEAST_SPREAD = 0.1

Cut = dict[str, SeriesPart]


def build(sources: dict[str, SeriesSource], spec: Spec, new: NewArray, *, codec: Codec | None) -> Entry:
    """Build all parts of the data: those cut from the training series, and one for each separate file."""
    train, cuts_valid = sources["train"], "valid" not in sources
    cuts = _Cuts(spec, separate=train.separate, valid_file=not cuts_valid, test_file="test" in sources)
    if train.separate and spec.data.split is None and spec.data.context is not None:
        raise DataError("data.context is for a part that is cut from every series, but rows of steps are held out whole; remove it")
    notes: list[str] = []
    taught = codec is None
    if codec is None:
        codec = _learn(train, spec, cuts, notes)
    writer = _Writer(codec, spec, new, labelled=True)
    for table in cuts.over(train.open(codec, True)):
        notes += [] if taught else table.notes[1:]
        writer.add(table, cut := cuts(table))
        for part, span in cut.items():
            notes += unseen_values(part, table, codec, span) if part != "train" else ()
    parts = writer.close()
    _check_targets(parts, spec, train_name=writer.name)
    all_notes = [*_few(notes), *writer.left_out()]
    for part, source in sources.items():
        if part != "train":
            sequences = read(source, codec, spec, new, part=part, labelled=True)
            parts[part], all_notes = replace(sequences, notes=()), [*all_notes, *sequences.notes]
    return Entry(parts, codec, tuple(all_notes))


def read(source: SeriesSource, codec: Codec, spec: Spec, new: NewArray, *, part: str, labelled: bool) -> Sequences:
    """Read separate series with the codec of the training data; if not `labelled`, all of them, without targets."""
    writer = _Writer(codec, spec, new, labelled=labelled)
    notes: list[str] = []
    for table in source.open(codec, labelled):
        span = whole(table)
        writer.add(table, {part: _warmed(span, spec) if labelled else span})
        notes += [*table.notes[1:], *unseen_values(part, table, codec)]  # which columns are read was reported in training
    sequences = writer.close()[part]
    if labelled and not len(sequences):
        raise DataError(f"{writer.name}: no step of {part} has a target{_after(spec)}; add rows with {', '.join(codec.step_targets)}")
    return replace(sequences, notes=(*_few(notes), *writer.left_out()))


def tables_of(source: SeriesSource, codec: Codec, spec: Spec, new: NewArray) -> Iterator[tuple[Table, Sequences]]:
    """Yield the blocks of series to predict for, each in the units of the file and as a model reads it."""
    for table in source.open(codec, False):
        writer = _Writer(codec, spec, new, labelled=False)
        writer.add(table, {"data": whole(table)})
        yield table, writer.close()["data"]


@dataclass
class _Cuts:
    """Cuts the series of one block after the other into parts."""

    spec: Spec
    separate: bool
    valid_file: bool
    test_file: bool
    held: NDArray[np.bool_] | None = None

    def over(self, tables: Iterable[Table]) -> Iterator[Table]:
        """Yield the tables, of which there is one if series are separate examples."""
        for table in tables:
            if self.separate and self.spec.data.split is None and not self.valid_file:
                self.held = held_out(len(table.names), self.spec.data.share, self.spec.train.seed)
            yield table

    def __call__(self, table: Table) -> Cut:
        """The parts of a table's series."""
        if self.separate and self.spec.data.split is None:
            all_rows, held = whole(table), self.held
            cut = {"train": all_rows}
            if held is not None and held.any():
                cut = {
                    part: replace(all_rows, lengths=np.where(chosen, table.lengths, 0))
                    for part, chosen in (("train", ~held), ("valid", held))
                }
        else:
            cut = spans(table, self.spec, valid_file=self.valid_file, test_file=self.test_file)
        return {part: _warmed(span, self.spec) for part, span in cut.items()}


def _warmed(span: SeriesPart, spec: Spec) -> SeriesPart:
    """A part in which the first steps of every series only warm up the carry (`data.warmup`)."""
    return replace(span, warm=np.minimum(np.maximum(span.warm, spec.data.warmup), span.lengths))


def _scored(table: Table, span: SeriesPart, places: list[int]) -> list[NDArray[np.float64]]:
    """The targets of each series that are scored in a part, NaN where there are none."""
    bounds = zip(span.starts + span.warm, span.starts + span.lengths, strict=True)
    return [table.values[low:high][:, places] for low, high in bounds]


def _learn(train: SeriesSource, spec: Spec, cuts: _Cuts, notes: list[str]) -> Codec:
    """Learn the codec: columns, their scale over the rows that are trained on, and how much the targets of each series vary there."""
    seen: _Seen | None = None
    for table in cuts.over(train.open(None, True)):
        seen = seen or _Seen(table, spec)
        seen.add(table, cuts(table)["train"])
        notes += table.notes
    if seen is None:
        raise DataError("train is empty; use data with at least one series")
    return seen.codec()


@dataclass
class _Seen:
    """What the first pass over the training series collects."""

    first: Table
    spec: Spec
    names: list[str] = field(default_factory=list)
    deviations: list[NDArray[np.float64]] = field(default_factory=list)

    def __post_init__(self) -> None:
        table, choice = self.first, self.first.choice
        calendar = calendar_columns(choice.calendar)
        self.targets = choice.targets
        self.measured = tuple(column for column in table.columns if column not in (*self.targets, *calendar))
        if not self.measured and not calendar and not table.categorical:
            raise DataError(
                f"{table.name}: nothing is left to read besides {', '.join(self.targets)}; add columns, or shorten data.targets"
            )
        self.masked = tuple(column for column in self.measured if column not in choice.static) if choice.missing == "mask" else ()
        clashing = [column for column in mask_columns(self.masked) if column in table.columns]
        if clashing:
            raise DataError(f"{table.name} has a column {clashing[0]}, which data.missing=mask adds; rename it")
        self.moments = {column: Moments() for column in (*self.measured, *self.targets)}
        self.categories: list[set[str]] = [set() for _ in table.categorical]

    def add(self, table: Table, span: SeriesPart) -> None:
        """Add the rows of a block that are trained on."""
        by_series = [np.arange(low, low + length) for low, length in zip(span.starts, span.lengths, strict=True)]
        rows = np.concatenate(by_series) if by_series else np.empty(0, np.int64)
        for column, moments in self.moments.items():
            values = table.values[rows, table.columns.index(column)]
            moments.add(values[~np.isnan(values)][:, None])
        for values, codes, seen in zip(table.categories, () if table.codes is None else table.codes[rows].T, self.categories, strict=True):
            seen.update(values[code] for code in np.unique(codes) if code >= 0)
        places = [table.columns.index(target) for target in self.targets]
        for name, scored in zip(table.names, _scored(table, span, places), strict=True):
            if len(scored):
                self.names.append(name)
                self.deviations.append(_deviations(scored))

    def codec(self) -> Codec:
        """What was learned."""
        wanted, choice, table = bool(self.spec.data.standardize), self.first.choice, self.first
        scale = {column: moments.scale(wanted=wanted, columns=1) for column, moments in self.moments.items()}
        if not wanted:
            for column, moments in self.moments.items():
                moments.check_unscaled([f"column {column}"], table.name)
        for column in (*self.measured, *self.targets):
            if not self.moments[column].count:
                of = "data.targets" if column in self.targets else "input"
                empty = "empty or of weight 0" if column in self.targets and choice.weight is not None else "empty"
                raise DataError(f"{table.name}: column {column} ({of}) is {empty} in all rows of train; fill it in, or leave it out")
        further = len(mask_columns(self.masked)) + len(calendar_columns(choice.calendar))  # which need no scale
        mean, std = (tuple(scale[column][part][0] for column in self.measured) for part in (0, 1))
        target_mean, target_std = (tuple(scale[column][part][0] for column in self.targets) for part in (0, 1))
        spreads = np.array(self.deviations).reshape(len(self.names), len(self.targets)) / np.array(target_std)
        return Codec(
            self.spec.task,
            "columns",
            columns=(*self.measured, *mask_columns(self.masked), *calendar_columns(choice.calendar)),
            mean=(*mean, *(0.0,) * further),
            std=(*std, *(1.0,) * further),
            target_mean=target_mean,
            target_std=target_std,
            names=tuple(self.names),
            time=table.time,
            series=table.series,
            frequency=self.spec.data.frequency_text or table.frequency,
            day_first=None if table.times is None else table.times.day_first,
            calendar=choice.calendar,
            static=choice.static,
            categorical=table.categorical,
            categories=tuple(tuple(sorted(values)) for values in self.categories),
            step_targets=self.targets,
            masked=self.masked,
            spreads=tuple(tuple(float(each) for each in row) for row in spreads),
        )


def _deviations(scored: NDArray[np.float64]) -> NDArray[np.float64]:
    """The deviation of each target of one series over the steps that have it; NaN with fewer than two."""
    present = [column[~np.isnan(column)] for column in scored.T]
    return np.array([np.std(values) if len(values) > 1 else np.nan for values in present])


class _Writer:
    """Appends blocks of series to the arrays of all parts, which share them."""

    def __init__(self, codec: Codec, spec: Spec, new: NewArray, *, labelled: bool) -> None:
        self.codec, self.spec, self.labelled, self.name = codec, spec, labelled, ""
        self.inputs = new(np.float32, len(codec.columns) + len(codec.categorical))
        self.tags = new(np.float32, len(codec.step_targets)) if labelled else None
        self.weights: Appender | None = None
        self.new = new
        self.rows = 0
        self.places: dict[str, list[tuple[Ints, Ints, Ints]]] = {}
        self.names: dict[str, list[str]] = {}
        self.spreads: dict[str, list[NDArray[np.float64]]] = {}
        self.left: dict[str, tuple[int, int]] = {}
        self._train_spreads = dict(zip(codec.names, codec.spreads, strict=True))

    def add(self, table: Table, cut: Cut) -> None:
        """Append the rows of a block, and note where the parts of its series are."""
        codec, self.name = self.codec, table.name
        self.inputs.append(_inputs(table, codec))
        targets = [table.columns.index(target) for target in codec.step_targets] if self.tags is not None else []
        if self.tags is not None:
            self.tags.append(_standardised(table.values[:, targets], codec.target_mean, codec.target_std, table.name))
            self._weigh(table)
        for part, span in cut.items():
            kept = span.lengths > 0
            if self.labelled:
                scored = [_deviations(each) if np.isfinite(each).any() else None for each in _scored(table, span, targets)]
                kept = np.array([each is not None for each in scored], np.bool_)
                self.spreads.setdefault(part, []).append(self._spreads(table, scored, kept))
                left, total = self.left.get(part, (0, 0))
                self.left[part] = left + int(((span.lengths > 0) & ~kept).sum()), total + int((span.lengths > 0).sum())
            kept_span = span.only(kept)
            self.places.setdefault(part, []).append((kept_span.starts + self.rows, kept_span.lengths, kept_span.warm))
            self.names.setdefault(part, []).extend(name for name, is_kept in zip(table.names, kept, strict=True) if is_kept)
        self.rows += len(table.values)

    def _weigh(self, table: Table) -> None:
        """Append the weights of a block, if it has any; then all blocks do."""
        if table.weights is None and table.choice.weight is not None:
            raise DataError(f"{table.name} has no column {table.choice.weight} (data.weight), which the training data has; add it")
        if table.weights is not None:
            self.weights = self.weights or self.new(np.float32, None)
            self.weights.append(table.weights)

    def _spreads(self, table: Table, scored: list[NDArray[np.float64] | None], kept: NDArray[np.bool_]) -> NDArray[np.float64]:
        """The deviations of the targets of each series in train; of one that train does not contain, here."""
        units = np.array(self.codec.target_std)
        spreads = [self._train_spreads.get(table.names[number], np.asarray(scored[number]) / units) for number in np.flatnonzero(kept)]
        # A single target has no deviation; that of all series stands for it.
        return np.nan_to_num(np.array(spreads, np.float64).reshape(len(spreads), len(units)), nan=1.0)

    def close(self) -> dict[str, Sequences]:
        """Return the parts; one without a series of its own is left out, but for train and a single one."""
        inputs = self.inputs.close()
        tags, weights = (None if each is None else each.close() for each in (self.tags, self.weights))
        parts = {}
        for part, places in self.places.items():
            starts, lengths, warm = (np.concatenate(each) for each in zip(*places, strict=True))
            spreads = np.concatenate(self.spreads[part]) if part in self.spreads else None
            warmed = warm if warm.any() else None
            names = tuple(self.names[part])
            parts[part] = Sequences(inputs, starts, lengths, tags=tags, step_weights=weights, warm=warmed, spreads=spreads, names=names)
            if len(lengths):
                check_weights(parts[part], part)
        return parts

    def left_out(self) -> list[str]:
        """A line for each part with series that have no target there."""
        return [
            f"{self.name}: {left:,} of {total:,} series have no target in {part}{_after(self.spec)} and are left out of it"
            for part, (left, total) in self.left.items()
            if left
        ]


def _inputs(table: Table, codec: Codec) -> NDArray[np.float32]:
    """All rows of a block as a model reads them: numbers, standardised, what is missing of them, the calendar and codes of categories."""
    measured, calendar = codec.measured, calendar_columns(codec.calendar)
    places = [table.columns.index(column) for column in measured]
    numbers = _standardised(table.values[:, places], codec.mean[: len(measured)], codec.std[: len(measured)], table.name)
    parts: list[NDArray[Any]] = [numbers]
    if codec.masked:
        masked_places = [measured.index(column) for column in codec.masked]
        numbers[:, masked_places], further = masked(numbers[:, masked_places], table.starts, table.totals)
        parts.append(further)
    parts.append(table.values[:, [table.columns.index(column) for column in calendar]])
    if (codes := known_codes(table, codec)) is not None:
        parts.append(codes)
    return np.concatenate([part.astype(np.float32, copy=False) for part in parts], axis=1)


def _standardised(values: NDArray[np.float64], mean: tuple[float, ...], std: tuple[float, ...], where: str) -> NDArray[np.float32]:
    """As `standardise`, with NaN where there is no value."""
    present = ~np.isnan(values)
    return np.where(present, standardise(np.where(present, values, np.array(mean)), mean, std, where), np.float32(np.nan))


def _check_targets(parts: dict[str, Sequences], spec: Spec, train_name: str) -> None:
    """Refuse training data in which nothing is scored; drop other parts without any."""
    if not len(parts["train"]):
        raise DataError(f"{train_name}: no step of train has a target{_after(spec)}; add rows, or lower data.warmup")
    for part in [name for name, data in parts.items() if not len(data)]:
        del parts[part]


def _after(spec: Spec) -> str:
    return f" after the first {spec.data.warmup} (data.warmup)" if spec.data.warmup else ""


def _few(notes: list[str]) -> list[str]:
    """The first of many notes, each once."""
    distinct = list(dict.fromkeys(notes))
    return (
        distinct
        if len(distinct) <= MOST_NOTES
        else [*distinct[:MOST_NOTES], f"{len(distinct) - MOST_NOTES} further remarks of this kind are left out"]
    )
