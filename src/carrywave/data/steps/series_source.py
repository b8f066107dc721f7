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
        choice = ColumnChoice.of(data, codec, labelled=labelled)
        if codec is None:
            choice.check_unnamed(rows.name, "time", "frequency", "columns", "targets", *COVARIATES)
            choice = replace(choice, series=(SERIES_NAME,), targets=targets, frequency="none")
        choice = replace(choice, weight=WEIGHT if WEIGHT in frame.columns else None)
        return arrange(frame, rows.name, choice)

    return SeriesSource(table, separate=True)


def choice_of(data: DataSpec, codec: Codec | None, name: str, *, labelled: bool) -> ColumnChoice:
    """The choice of columns of a table; refuse one without targets."""
    if codec is None and not data.targets:
        raise DataError(f"{name} is a table, but data.targets does not say what to estimate at every step; set it to a column or several")
    if codec is None and data.label is not None:
        raise DataError(f"{name} is a table, whose targets data.targets names, but data.label is {data.label}; remove it")
    if codec is None and (both := sorted(set(data.targets or ()) & set(data.columns or ()))):
        raise DataError(
            f"data.columns and data.targets both name {both[0]!r}, but what is estimated is not read; remove it from data.columns"
        )
    return ColumnChoice.of(data, codec, labelled=labelled)


def _long_table(rows: Rows, data: DataSpec, codec: Codec | None, *, labelled: bool) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Rows with steps as one table with a row for each step, and the names of its targets."""
    columns = None if codec is None else len(codec.measured)
    outputs = None if codec is None else len(codec.step_targets)
    name_field = (data.series or (SERIES_NAME,))[0]
    made: dict[str, Any] = {}
    series: list[str] = []
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
            fields.take(row, name_field, where)  # not an item without a name
        named = row.get(name_field)
        series.append(f"{rows.name} item {len(series)}" if named is None else str(named))
    if not steps:
        raise DataError(f"{rows.name} is empty; use data with at least one row")
    if (names := pd.Index(series)).has_duplicates:
        fact = f"two rows are named {names[names.duplicated()][0]} ({name_field})"
        raise DataError(f"{rows.name}: {fact}; give each sequence its own name")
    lengths = [len(matrix) for matrix in steps]
    targets: tuple[str, ...] = () if codec is None or not labelled else codec.step_targets
    if codec is None and labelled:
        targets = ("label",) if (outputs or 1) == 1 else tuple(f"label {place}" for place in range(outputs or 1))
    made[SERIES_NAME] = np.repeat(np.array(series, object), lengths)
    for columns_of, matrices in ((tuple(str(place) for place in range(columns or 1)), steps), (targets, labels)):
        for place, column in enumerate(columns_of):
            made[column] = np.concatenate([np.broadcast_to(matrix, (len(matrix), len(columns_of)))[:, place] for matrix in matrices])
    if any(weight is not None for weight in weights):
        each = [np.broadcast_to(1.0 if weight is None else weight, many) for weight, many in zip(weights, lengths, strict=True)]
        made[WEIGHT] = np.concatenate(each)
    return pd.DataFrame(made), targets


def _width(matrix: fields.Matrix) -> int | None:
    """How many numbers a step has; None if every step is null, which leaves it open."""
    return None if matrix.shape[1] == 1 and np.isnan(matrix).all() else matrix.shape[1]


def _matrix(row: Row, field: str, where: str, columns: int | None) -> fields.Matrix:
    """The numbers of a field for each step, NaN for null."""
    value = fields.take(row, field, where)
    if isinstance(value, list) and None in value:
        widths = [len(step) for step in value if isinstance(step, list | tuple)] or [columns or 1]
        if widths[0] > 1 or isinstance(next((step for step in value if step is not None), None), list | tuple):
            value = [[None] * widths[0] if step is None else step for step in value]  # all of it is missing
    matrix = fields.numbers(value, field, where)
    matrix = matrix[:, None] if matrix.ndim == 1 else matrix
    if matrix.ndim != 2 or not matrix.size:
        raise DataError(f"{where}: {field} has shape {list(matrix.shape)}; write a list of steps, each a number or a list of numbers")
    if columns is not None and matrix.shape[1] != columns:
        raise DataError(f"{where}: a step has {matrix.shape[1]} numbers in {field}, but others have {columns}; use {columns} in every step")
    if (bad := unusable(matrix) & ~np.isnan(matrix)).any():
        step, column = np.argwhere(bad)[0]
        raise DataError(f"{where}: step {step}, column {column} of {field} is {matrix[step, column]}, not a finite number; correct it")
    return matrix
