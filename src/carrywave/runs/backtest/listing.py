"""All forecasts of a backtest as rows, one for each series, origin, step ahead and column."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from carrywave.data.tables.table import Table
from carrywave.runs.backtest.rolled import Rolled

Row = dict[str, Any]


def times_of(table: Table, each: Rolled) -> tuple[Any, list[Any]]:
    """The time of the origin, the last row that was known, and of each step ahead; without times, numbers of rows, from 1."""
    steps, start = len(each.truth_HC), int(table.starts[each.series])
    times = None if table.times is None else table.times.ahead(start, each.known, steps)
    if times is None or table.times is None or each.known < 2:
        return each.known, [each.known + step + 1 for step in range(steps)]
    origin = table.times.ahead(start, each.known - 1, 1)
    return (each.known if origin is None else origin[0]), times


def rows_of(table: Table, forecasts: Sequence[Rolled], columns: Sequence[str], quantiles: Sequence[float] | None) -> Iterator[Row]:
    """The rows, in the units of the file."""
    several = len(table.names) > 1
    for each in forecasts:
        origin, times = times_of(table, each)
        named: Row = {table.series or "series": table.series_name(each.series)} if several or table.series is not None else {}
        for step, when in enumerate(times):
            for place, column in enumerate(columns):
                row = {**named, "origin": origin, table.time or "row": when, "step": step + 1, "column": column}
                values = each.forecast_HCQ[step, place].tolist()
                made = (
                    {"forecast": values[0]} if quantiles is None else {f"q{q:g}": value for q, value in zip(quantiles, values, strict=True)}
                )
                yield row | made | {"truth": float(each.truth_HC[step, place]), "naive": float(each.naive_HC[step, place])}
