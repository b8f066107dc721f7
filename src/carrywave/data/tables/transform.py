"""What is forecast of the target columns instead of their values (`data.transform`): logarithms or differences, and the way back.

`log` and `log1p` suit positive values that grow by factors; `diff` forecasts the change from row to row. Applied to the values of a file
before they are standardised, and undone in forecasts. NumPy only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carrywave.data.tables.table import Table
from carrywave.errors import DataError

LEAST = {"log": 0.0, "log1p": -1.0}  # every value must be larger
LARGEST = 57.0  # exp of it is the largest number that files may hold, about 1e25


def transformed(table: Table, columns: tuple[str, ...], kind: str) -> Table:
    """Return the table with some of its columns transformed; refuse a value that has no logarithm."""
    if kind == "none":
        return table
    if kind in LEAST:
        remedy = f"use data.transform={'log1p or ' * (kind == 'log')}none, or correct it"
        _check(table, columns, lambda own: own <= LEAST[kind], f"{kind} needs values above {LEAST[kind]:g}; {remedy}")
    places, values = [table.columns.index(column) for column in columns], table.values.copy()
    changed = forward(values[:, places], kind, values[:1, places])
    if kind == "diff":
        changed[table.starts] = 0.0  # the first row of a series
    values[:, places] = changed
    return replace(table, values=values)


def check_counts(table: Table, columns: tuple[str, ...], kind: str) -> None:
    """Refuse values that are no counts."""
    remedy = "use data.distribution=normal or student_t, or round it (data.missing=forward or zero fills in whole numbers)"
    why = f"data.distribution={kind} needs whole numbers of 0 or more; {remedy}"
    _check(table, columns, lambda own: (own < 0) | (own > np.floor(own)), why)


def _check(table: Table, columns: tuple[str, ...], wrong: Callable[[NDArray[np.float64]], NDArray[np.bool_]], why: str) -> None:
    """Raise if any value of some columns is wrong, with the first of them; what is missing is not."""
    values = table.values[:, [table.columns.index(column) for column in columns]]
    bad = np.argwhere(wrong(values))
    if not len(bad):
        return
    row, place = (int(at) for at in bad[0])
    number = int(np.searchsorted(table.starts, row, side="right")) - 1
    at = f"row {row - table.starts[number] + 1}"
    if table.times is not None:
        at = f"the row of {table.times.written(slice(row, row + 1))[0]}"
    of = f" of series {table.names[number]}" if len(table.names) > 1 else ""
    raise DataError(f"{table.name}: {at}{of}, column {columns[place]} is {values[row, place]:g}, and {why}")


def forward(values: NDArray[Any], kind: str, last: NDArray[Any]) -> NDArray[np.float64]:
    """Transform values [rows, …]; `last` [1, …] is the row before the first, from which it differs."""
    values = np.asarray(values, np.float64)
    if kind == "diff":
        return np.diff(values, axis=0, prepend=last)
    result: NDArray[np.float64] = np.log(values) if kind == "log" else np.log1p(values) if kind == "log1p" else values
    return result


def backward(values: NDArray[np.float64], kind: str, last: NDArray[Any]) -> NDArray[np.float64]:
    """Undo `forward`: transformed values [rows, …] that follow the row `last` [1, …] of the file."""
    if kind == "diff":
        return np.asarray(last + np.cumsum(values, axis=0), np.float64)
    small = np.minimum(values, LARGEST)
    result: NDArray[np.float64] = np.exp(small) if kind == "log" else np.expm1(small) if kind == "log1p" else values
    return result
