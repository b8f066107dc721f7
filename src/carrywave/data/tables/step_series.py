"""Data for regression at every step: series of inputs, with numbers to estimate from them at each step, some of which are missing.

All series share one scale, that of the rows that are trained on. Parts are cut as those of forecasts are: in time, each after rows that
warm up the carry.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from carrywave.data.codec import Codec
from carrywave.data.files.cache import Entry
from carrywave.data.holdout import held_out
from carrywave.data.sequences import Ints, Sequences
from carrywave.data.tables.calendar import calendar_columns
from carrywave.data.tables.moments import scale_of, standardise
from carrywave.data.tables.parts import SeriesPart, spans, whole
from carrywave.data.tables.series import described, known_codes, names_of, unseen_values
from carrywave.data.tables.table import Table
from carrywave.errors import DataError
from carrywave.spec.spec import Spec

# Added to a series' deviation in the NSE loss, as in Kratzert et al. (2019): a nearly dry one does not outweigh all others.
LEAST_SPREAD = 0.1

SEEN, AGE = "_seen", "_age"

Cut = dict[str, SeriesPart]


def build(table: Table, spec: Spec, *, codec: Codec | None, files: Collection[str]) -> Entry:
    """Build the parts that are cut from the training series; `files` are those that have one of their own."""
    cut = _cut(table, spec, files)
    codec = codec or _learn(table, cut["train"], spec)
    parts, left_out = _encoded(table, cut, codec, spec)
    notes = [*table.notes, *left_out]
    for part, span in cut.items():
        notes += unseen_values(part, table, codec, span) if part != "train" else ()
    return Entry({part: data for part, data in parts.items() if len(data)}, codec, tuple(notes), table.about)


def read(table: Table, codec: Codec, spec: Spec, *, part: str, labelled: bool) -> Sequences:
    """Read a separate table with the codec of the training data; if not `labelled`, all series, without targets."""
    span = _warmed(whole(table), spec) if labelled else whole(table)
    parts, left_out = _encoded(table, {part: span}, codec, spec, labelled=labelled)
    notes = (*table.notes[1:], *unseen_values(part, table, codec), *left_out)  # which columns are read was reported in training
    return replace(parts[part], notes=notes)


def _cut(table: Table, spec: Spec, files: Collection[str]) -> Cut:
    """The parts of the training series: separate ones are held out whole."""
    if not table.separate or spec.data.split is not None:
        cut = spans(table, spec, files)
    else:
        cut = {"train": whole(table)}
        held = np.zeros(0, np.bool_) if "valid" in files else held_out(len(table.names), spec.data.share, spec.train.seed)
        if held.any():
            chosen = {"train": ~held, "valid": held}
            cut = {part: replace(cut["train"], lengths=np.where(each, table.lengths, 0)) for part, each in chosen.items()}
    return {part: _warmed(span, spec) for part, span in cut.items()}


def _warmed(span: SeriesPart, spec: Spec) -> SeriesPart:
    """A part in which the first steps of every series only warm up the carry (`data.warmup`)."""
    return replace(span, warm=np.minimum(np.maximum(span.warm, spec.data.warmup), span.lengths))


def _learn(table: Table, train: SeriesPart, spec: Spec) -> Codec:
    """Learn the codec: columns, their scale over the rows that are trained on, and how much the targets of each series vary there."""
    choice, calendar, targets = table.choice, calendar_columns(table.choice.calendar), table.choice.targets
    measured = tuple(column for column in table.columns if column not in (*targets, *calendar))
    if not measured and not calendar and not table.categorical:
        raise DataError(f"{table.name}: nothing is left to read besides {', '.join(targets)}; add columns, or shorten data.targets")
    masked_columns = tuple(column for column in measured if column not in choice.static) if choice.missing == "mask" else ()
    rows, scale = train.rows, {}
    for column in (*measured, *targets):
        values = table.values[rows, table.columns.index(column)]
        if np.isnan(values).all():
            of = "data.targets" if column in targets else "input"
            empty = "empty or of weight 0" if column in targets and choice.weight is not None else "empty"
            raise DataError(f"{table.name}: column {column} ({of}) is {empty} in all rows of train; fill it in, or leave it out")
        (mean,), (std,) = scale_of(values[~np.isnan(values)][:, None]) if spec.data.standardize else ((0.0,), (1.0,))
        scale[column] = mean, std
    further = (*mask_columns(masked_columns), *calendar)  # which need no scale
    units = np.array([scale[target][1] for target in targets])
    scored = [(name, each) for name, each in zip(table.names, _scored(table, train, targets), strict=True) if len(each)]
    return Codec(
        columns=(*measured, *further),
        mean=(*(scale[column][0] for column in measured), *(0.0 for _ in further)),
        std=(*(scale[column][1] for column in measured), *(1.0 for _ in further)),
        target_mean=tuple(scale[target][0] for target in targets),
        target_std=tuple(units.tolist()),
        names=tuple(name for name, _ in scored),
        step_targets=targets,
        masked=masked_columns,
        spreads=tuple(tuple((_deviations(each) / units).tolist()) for _, each in scored),
        **described(table, train, spec),
    )


def _scored(table: Table, span: SeriesPart, targets: Sequence[str]) -> list[NDArray[np.float64]]:
    """The targets of each series that are scored in a part, NaN where there are none."""
    return span.scored.of(table.values[:, [table.columns.index(target) for target in targets]])


def _deviations(scored: NDArray[np.float64]) -> NDArray[np.float64]:
    """The deviation of each target of one series over the steps that have it; NaN with fewer than two."""
    present = [column[~np.isnan(column)] for column in scored.T]
    return np.array([np.std(values) if len(values) > 1 else np.nan for values in present])


def _encoded(table: Table, cut: Cut, codec: Codec, spec: Spec, *, labelled: bool = True) -> tuple[dict[str, Sequences], list[str]]:
    """The parts of a table as a model reads it, which share their arrays, and a line for each part with series that have no target."""
    targets = codec.step_targets if labelled else ()
    inputs, tags, weights = _inputs(table, codec), None, None
    if labelled:
        values = table.values[:, [table.columns.index(target) for target in targets]]
        tags, weights = standardise(values, codec.target_mean, codec.target_std), table.weights
    known, units = dict(zip(codec.names, codec.spreads, strict=True)), np.array(codec.target_std)
    parts: dict[str, Sequences] = {}
    lines: list[str] = []
    for part, span in cut.items():
        present = span.lengths > 0
        kept, spreads = present, None
        if labelled:
            found = _scored(table, span, targets)
            kept = present & np.array([np.isfinite(each).any() for each in found], np.bool_)
            own = [known.get(table.names[at], _deviations(found[at]) / units) for at in np.flatnonzero(kept)]
            # A single target has no deviation; that of all series stands for it.
            spreads = np.nan_to_num(np.array(own, np.float64).reshape(len(own), len(units)), nan=1.0)
            if not kept.any() and (part == "train" or len(cut) == 1):  # other parts are none
                raise DataError(f"{table.name}: no step of {part} has a target{_after(spec)}; add rows, or lower data.warmup")
            if left := int((present & ~kept).sum()):
                fact = f"{left:,} of {int(present.sum()):,} series have no target in {part}{_after(spec)}"
                lines.append(f"{table.name}: {fact} and are left out of it")
        chosen, names = span.only(kept), names_of(table, kept)
        warm = chosen.warm if chosen.warm.any() else None
        parts[part] = Sequences(
            inputs, chosen.starts, chosen.lengths, tags=tags, step_weights=weights, warm=warm, spreads=spreads, names=names
        )
    return parts, lines


def _inputs(table: Table, codec: Codec) -> NDArray[np.float32]:
    """All rows of a table as a model reads them: numbers, standardised, what is missing of them, the calendar and codes of categories."""
    measured, calendar = codec.measured, calendar_columns(codec.calendar)
    values, days = (table.values[:, [table.columns.index(column) for column in names]] for names in (measured, calendar))
    numbers = standardise(values, codec.mean[: len(measured)], codec.std[: len(measured)])
    places = [measured.index(column) for column in codec.masked]
    numbers[:, places], further = masked(numbers[:, places], table.starts, table.totals)
    return np.concatenate([numbers, further, days.astype(np.float32), known_codes(table, codec).astype(np.float32)], axis=1)


def _after(spec: Spec) -> str:
    return f" after the first {spec.data.warmup} (data.warmup)" if spec.data.warmup else ""


def mask_columns(names: Sequence[str]) -> tuple[str, ...]:
    """The names of the further columns: whether each value is there, then how long ago the last one was."""
    return (*(name + SEEN for name in names), *(name + AGE for name in names))


def masked(values_NC: NDArray[np.float32], starts: Ints, totals: Ints) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """What a GRU-D reads of each value, for any cell: standardised values with their gaps closed, 0 before the first; and further columns
    [N, 2 C]: 1 or 0, and the logarithm of 1 + the steps since the last value. Series begin at `starts` and have `totals` rows.
    """
    present_NC = ~np.isnan(values_NC)
    row_N1 = np.arange(len(values_NC))[:, None]
    start_N1 = np.repeat(starts, totals)[:, None]
    last_NC = np.maximum.accumulate(np.where(present_NC, row_N1, -1), axis=0)
    preceded_NC = last_NC >= start_N1  # otherwise it is of an earlier series, or of none
    repeated_NC = np.take_along_axis(values_NC, np.maximum(last_NC, 0), axis=0)
    age_NC = np.where(preceded_NC, row_N1 - last_NC, row_N1 - start_N1 + 1)
    further = np.concatenate([present_NC, np.log1p(age_NC)], axis=1).astype(np.float32)
    return np.where(preceded_NC, repeated_NC, np.float32(0.0)), further
