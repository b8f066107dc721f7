"""Where series whose steps have targets come from: a table, or rows with `steps` and `labels`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from carrywave.data.codec import Codec
from carrywave.data.files import fields
from carrywave.data.files.rows import WEIGHT, Row, Rows
from carrywave.data.tables.choice import COVARIATES, ColumnChoice
from carrywave.data.tables.moments import unusable
from carrywave.data.tables.reading import SERIES_NAME
from carrywave.data.tables.table import Table, arrange
from carrywave.errors import DataError
from carrywave.spec.data_spec import DataSpec

Open = Callable[[Codec | None, bool], Table]


@dataclass(frozen=True)
class SeriesSource:
    """Where series come from: as the spec says or, given a codec, as the training data was read; with or without their targets."""

    open: Open
    separate: bool = False  # each series is an example by itself, so that whole ones are held out, not their ends


def of_frame(read: Callable[[], tuple[pd.DataFrame, tuple[str, ...]]], name: str, data: DataSpec) -> SeriesSource:
    """The series of a table; `read` gives it as a frame, with lines on how it was read."""

    def table(codec: Codec | None, labelled: bool) -> Table:
        frame, notes = read()
        return arrange(frame, name, choice_of(data, codec, name, labelled=labelled), notes=notes)

    return SeriesSource(table)


def of_rows(open_rows: Callable[[bool], Rows], data: DataSpec) -> SeriesSource:
    """A series for each row with `steps` and, for each step, a number or several in `labels`; rows are opened with or without these."""

    def table(codec: Codec | None, labelled: bool) -> Table:
        rows = open_rows(labelled)
        frame, targets = _long_table(rows, data, codec, labelled=labelled)
        weight = WEIGHT if WEIGHT in frame.columns else None
        choice = replace(ColumnChoice.of(data, codec, labelled=labelled), weight=weight)
        if codec is None:
            named = next((name for name in (*COVARIATES, "columns", "targets") if getattr(data, name)), None)
            if named is not None:
                raise DataError(f"{rows.name} has rows of steps, but data.{named} names columns; use a CSV or Parquet file, or remove it")
            choice.check_unnamed(rows.name, "time", "frequency")
            choice = replace(choice, series=(SERIES_NAME,), targets=targets, frequency="none")
        return arrange(frame, rows.name, choice)

    return SeriesSource(table, separate=True)


def choice_of(data: DataSpec, codec: Codec | None, name: str, *, labelled: bool) -> ColumnChoice:
    """The choice of columns of a table; refuse one without targets."""
    if codec is None and not data.targets:
        raise DataError(f"{name} is a table, but data.targets does not say what to estimate at every step; set it to a column or several")
    if codec is None and data.label is not None:
        raise DataError(f"{name} is a table, whose targets data.targets names, but data.label is {data.label}; remove it")
    both = sorted(set(data.targets or ()) & set(data.columns or ())) if codec is None else []
    if both:
        raise DataError(
            f"data.columns and data.targets both name {both[0]!r}, but what is estimated is not read; remove it from data.columns"
        )
    return ColumnChoice.of(data, codec, labelled=labelled)


def _long_table(rows: Rows, data: DataSpec, codec: Codec | None, *, labelled: bool) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Rows with steps as one table with a row for each step, and the names of its targets."""
    columns = None if codec is None else len(codec.measured)
    outputs = None if codec is None else len(codec.step_targets)
    series: list[str] = []
    lengths: list[int] = []
    steps: list[fields.Matrix] = []
    labels: list[fields.Matrix] = []
    weights: list[float | fields.Matrix | None] = []
    for number, row in rows:
        where = rows.where(number)
        fields.refuse_resets(row, where)
        steps.append(_matrix(row, "steps", where, columns))
        columns = _width(steps[-1]) or columns
        if labelled:
            labels.append(_matrix(row, "labels", where, outputs))
            outputs = _width(labels[-1]) or outputs
            weights.append(fields.weight_of(row, len(steps[-1]), where))
            if len(labels[-1]) != len(steps[-1]):
                raise DataError(f"{where}: {len(labels[-1])} labels for {len(steps[-1])} steps; use one per step (null for none)")
        if codec is None and data.series is not None:
            fields.take(row, data.series[0], where)  # not an item without a name
        series.append(_named(row, data, f"{rows.name} item {len(series)}"))
        lengths.append(len(steps[-1]))
    if not steps:
        raise DataError(f"{rows.name} is empty; use data with at least one row")
    again = next((name for name in series if series.count(name) > 1), None) if len(set(series)) < len(series) else None
    if again is not None:
        raise DataError(f"{rows.name}: two rows are named {again} ({(data.series or (SERIES_NAME,))[0]}); give each sequence its own name")
    targets = (codec.step_targets if codec is not None else _target_names(outputs or 1)) if labelled else ()
    made: dict[str, Any] = {SERIES_NAME: np.repeat(np.array(series, object), lengths)}
    for names, matrices in (([str(place) for place in range(columns or 1)], steps), (targets, labels)):
        wide = [np.broadcast_to(matrix, (len(matrix), len(names))) for matrix in matrices]
        together = np.concatenate(wide) if wide else np.empty((0, 0))
        made |= {name: together[:, place] for place, name in enumerate(names)}
    if any(weight is not None for weight in weights):
        each = [np.broadcast_to(1.0 if weight is None else weight, many) for weight, many in zip(weights, lengths, strict=True)]
        made[WEIGHT] = np.concatenate(each)
    return pd.DataFrame(made), targets


def _target_names(outputs: int) -> tuple[str, ...]:
    return ("label",) if outputs == 1 else tuple(f"label {number}" for number in range(outputs))


def _named(row: Row, data: DataSpec, otherwise: str) -> str:
    name = row.get((data.series or (SERIES_NAME,))[0])
    return otherwise if name is None else str(name)


def _width(matrix: fields.Matrix) -> int | None:
    """How many numbers a step has; None if every step is null, which leaves it open."""
    return None if matrix.shape[1] == 1 and np.isnan(matrix).all() else matrix.shape[1]


def _matrix(row: Row, field: str, where: str, columns: int | None) -> fields.Matrix:
    """The numbers of a field for each step, NaN for null."""
    value = fields.take(row, field, where)
    if isinstance(value, list) and None in value:
        width = columns or next((len(step) for step in value if isinstance(step, list | tuple)), 1)
        if width > 1 or any(isinstance(step, list | tuple) for step in value):
            value = [[None] * width if step is None else step for step in value]  # all of it is missing
    matrix = fields.numbers(value, field, where)
    matrix = matrix[:, None] if matrix.ndim == 1 else matrix
    if matrix.ndim != 2 or not matrix.size:
        raise DataError(f"{where}: {field} has shape {list(matrix.shape)}; write a list of steps, each a number or a list of numbers")
    if columns is not None and matrix.shape[1] != columns:
        raise DataError(f"{where}: a step has {matrix.shape[1]} numbers in {field}, but others have {columns}; use {columns} in every step")
    bad = unusable(matrix) & ~np.isnan(matrix)
    if bad.any():
        step, column = (int(place) for place in np.argwhere(bad)[0])
        fact = f"step {step}, column {column} of {field} is {matrix[step, column]}, not a finite number (below 1e25)"
        raise DataError(f"{where}: {fact}; correct it")
    return matrix
