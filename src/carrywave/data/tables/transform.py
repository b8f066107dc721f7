"""What is forecast of the target columns instead of their values (`data.transform`): logarithms or differences, and the way back.

`log` and `log1p` suit positive values that grow by factors; `diff` forecasts the change from row to row. Applied to the values of a file
before they are standardised, and undone in forecasts. NumPy only.
"""

from __future__ import annotations

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
    places = [table.columns.index(column) for column in columns]
    values = table.values.copy()
    for number, (start, length, total) in enumerate(zip(table.starts, table.lengths, table.totals, strict=True)):
        series_values = values[start : start + total, places]
        if kind in LEAST:
            _check(table, number, series_values[:length], columns, kind)
        values[start : start + total, places] = forward(series_values, kind, series_values[:1])
    return replace(table, values=values)


def _check(table: Table, number: int, values_RC: NDArray[np.float64], columns: tuple[str, ...], kind: str) -> None:
    remedy = "use data.transform=log1p or none" if kind == "log" else "use data.transform=none"
    wrong = ~np.isnan(values_RC) & ~(values_RC > LEAST[kind])
    _refuse(table, number, values_RC, wrong, columns, f"{kind} needs values above {LEAST[kind]:g}; {remedy}, or correct it")


def check_counts(table: Table, columns: tuple[str, ...], kind: str) -> None:
    """Refuse values that are no counts."""
    places = [table.columns.index(column) for column in columns]
    remedy = "use data.distribution=normal or student_t, or round it" + (
        " (data.missing=forward or zero fills in whole numbers)" if table.unfilled is not None else ""
    )
    for number, (start, length) in enumerate(zip(table.starts, table.lengths, strict=True)):
        series_values = table.values[start : start + length, places]
        wrong = ~np.isnan(series_values) & ((series_values < 0) | (series_values != np.floor(series_values)))
        _refuse(table, number, series_values, wrong, columns, f"data.distribution={kind} needs whole numbers of 0 or more; {remedy}")


def _refuse(
    table: Table, number: int, values_RC: NDArray[np.float64], wrong: NDArray[np.bool_], columns: tuple[str, ...], why: str
) -> None:
    """Raise if any value of a series is wrong, with the first of them."""
    if not wrong.any():
        return
    row, place = (int(at) for at in np.argwhere(wrong)[0])
    first = int(table.starts[number]) + row
    times = None if table.times is None else table.times.written(slice(first, first + 1))
    at = f"row {row + 1}" if times is None else f"the row of {times[0]}"
    of = f" of series {table.names[number]}" if len(table.names) > 1 else ""
    raise DataError(f"{table.name}: {at}{of}, column {columns[place]} is {values_RC[row, place]:g}, and {why}")


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
