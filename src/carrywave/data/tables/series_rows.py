"""Series as rows with `steps`, one for each, and with `labels` where every step has targets: turned into a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from carrywave.data.codec import Codec
from carrywave.data.files import fields
from carrywave.data.files.rows import WEIGHT, Row, Rows
from carrywave.data.tables.choice import ColumnChoice
from carrywave.data.tables.reading import SERIES_NAME
from carrywave.data.tables.table import Table, arrange
from carrywave.errors import DataError
from carrywave.spec.data_spec import DataSpec
from carrywave.spec.spec import Spec


def choice_of(data: DataSpec, codec: Codec | None, name: str, *, labelled: bool) -> ColumnChoice:
    """The choice of columns of a table; where every step has targets, refuse one without them."""
    if codec is None and data.each_step and not data.targets:
        raise DataError(f"{name} is a table, but data.targets does not say what to estimate at every step; set it to a column or several")
    return ColumnChoice.of(data, codec, labelled=labelled)


def table_of_rows(rows: Rows, spec: Spec, codec: Codec | None, *, labelled: bool) -> Table:
    """A series for each row with `steps` and, where every step has targets, a number or several for each step in `labels`."""
    data = spec.data
    choice = ColumnChoice.of(data, codec, labelled=labelled)
    frame, targets = _long_table(rows, spec, codec, labelled=labelled)
    weight = WEIGHT if WEIGHT in frame.columns else None
    choice = replace(choice, series=(SERIES_NAME,), frequency="none", weight=weight, in_order=True)
    table = arrange(frame, rows.name, replace(choice, targets=targets) if spec.each_step else choice)
    if spec.each_step:
        return replace(table, separate=True)
    alone = len(table.names) == 1
    return replace(table, names=(rows.name,) if alone else table.names, series=(), labels=(), notes=("", *table.notes[1:]))


def _long_table(rows: Rows, spec: Spec, codec: Codec | None, *, labelled: bool) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Rows with steps as one table with a row for each step, and the names of its targets."""
    each_step, named = labelled and spec.each_step, spec.data.series
    columns = None if codec is None else len(codec.read_columns)
    outputs = None if codec is None else len(codec.step_targets)
    name_field = (named or (SERIES_NAME,))[0]
    series: list[str] = []
    steps: list[fields.Matrix] = []
    labels: list[fields.Matrix] = []
    weights: list[float | fields.Matrix | None] = []
    for number, row in rows:
        where = rows.where(number)
        fields.refuse_resets(row, where)
        steps.append(_matrix(row, "steps", where, columns))
        columns = _width(steps[-1]) or columns
        weights.append(fields.weight_of(row, len(steps[-1]), where) if labelled else None)
        if each_step:
            labels.append(_matrix(row, "labels", where, outputs))
            outputs = _width(labels[-1]) or outputs
            if len(labels[-1]) != len(steps[-1]):
                raise DataError(f"{where}: {len(labels[-1])} labels for {len(steps[-1])} steps; use one per step (null for none)")
        if codec is None and named is not None:
            fields.take(row, name_field, where)  # not an item without a name
        name = row.get(name_field)
        series.append(f"{rows.name} item {len(series)}" if name is None else str(name))
    if not steps:
        raise DataError(f"{rows.name} is empty; use data with at least one row")
    if (names := pd.Index(series)).has_duplicates:
        fact = f"two rows are named {names[names.duplicated()][0]} ({name_field})"
        raise DataError(f"{rows.name}: {fact}; give each sequence its own name")
    lengths = [len(matrix) for matrix in steps]
    targets: tuple[str, ...] = () if codec is None or not each_step else codec.step_targets
    if codec is None and each_step:
        targets = ("label",) if (outputs or 1) == 1 else tuple(f"label {place}" for place in range(outputs or 1))
    made = {**_columns(steps, [str(place) for place in range(columns or 1)]), **_columns(labels, targets)}
    if any(weight is not None for weight in weights):
        each = [np.broadcast_to(1.0 if weight is None else weight, many) for weight, many in zip(weights, lengths, strict=True)]
        made[WEIGHT] = np.concatenate(each)
    made[SERIES_NAME] = np.repeat(np.array(series, object), lengths)
    return pd.DataFrame(made), targets


def _columns(matrices: Sequence[fields.Matrix], names: Sequence[str]) -> dict[str, Any]:
    """The numbers of all rows, a column for each name; those of a row in which nothing is there have one column."""
    whole = [np.broadcast_to(matrix, (len(matrix), len(names))) for matrix in matrices]
    return dict(zip(names, np.concatenate(whole).T, strict=True)) if names else {}


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
    return fields.matrix_of(value, field, where, columns, gaps=True)
