"""The page of a backtest: its scores, and for each of the first series and columns the truth as a line, each forecast as a line from its
origin, and between the outermost quantiles a band.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from carrywave.data.tables.table import Table
from carrywave.report.blocks import Block, Listing, PagePart, page
from carrywave.report.chart import LETTER, Area, Chart, Curve
from carrywave.report.figures import metric_text
from carrywave.train.backtest import Backtest, times_of
from carrywave.train.backtest_scores import OriginForecast

WIDTH = 1000  # pixels
MOST_CHARTS = 8


def backtest_page(result: Backtest) -> str:
    """The HTML of a backtest."""
    table, columns, rolling = result.table, result.columns, result.rolling
    pairs = [(series, place) for series in sorted({each.series for each in result.forecasts}) for place in range(len(columns))]
    charts = list[Block]()
    for series, place in pairs[:MOST_CHARTS]:
        name = columns[place] if len(table.names) == 1 else f"{table.names[series]}: {columns[place]}"
        made = [each for each in result.forecasts if each.series == series]
        charts.append(_chart(name, table, made, (place, columns[place]), result.quantiles))
    title = f"{rolling.origins} origins, {rolling.stride} rows apart, {rolling.horizon} steps ahead"
    left_out = [f"The first {MOST_CHARTS} of {len(pairs)} are drawn."] if len(pairs) > MOST_CHARTS else []
    parts = [PagePart("Forecasts", [*charts, *left_out]), PagePart("Scores", _scores(result.scores))]
    return page(table.name, f"carrywave backtest · {title}", [], parts)


def _scores(rows: Sequence[Mapping[str, Any]]) -> list[Block]:
    """The scores over everything, and by column."""
    shown = [row for row in rows if row["origin"] is None and row["step"] is None]
    names = [name for name in shown[0] if name not in ("origin", "step", "column")] if shown else []
    cells = [[str(row["column"] or "all"), *(metric_text(name, row.get(name)) for name in names)] for row in shown]
    return [Listing("", ("", *names), cells)]


def _chart(
    title: str, table: Table, forecasts: Sequence[OriginForecast], column: tuple[int, str], quantiles: Sequence[float] | None
) -> Chart:
    place, values = column[0], table.values[int(table.starts[forecasts[0].series]) :, table.columns.index(column[1])]
    first, end = min(each.known for each in forecasts), max(each.known + len(each.truth_HC) for each in forecasts)
    begin = max(0, first - max(2, end - first))
    middle = 0 if quantiles is None else int(np.argmin(np.abs(np.array(quantiles) - 0.5)))
    point = "forecast" if quantiles is None or forecasts[0].banded else f"quantile {quantiles[middle]:g}"
    curves, areas, x_ticks, free = list[Curve](), list[Area](), list[tuple[float, str]](), float(begin)
    for each in forecasts:
        # A forecast begins where its origin is, at a value that is known.
        now = np.full((1, each.forecast_HCQ.shape[2]), values[each.known - 1])
        lines = [(each.known - 1 + step, *row) for step, row in enumerate(np.concatenate([now, each.forecast_HCQ[:, place]]).tolist())]
        curves.append(Curve(point, [(line[0], line[1 + middle]) for line in lines], "c1"))
        if quantiles is not None and len(quantiles) > 1:
            name = f"quantiles {quantiles[0]:g} to {quantiles[-1]:g}"
            areas.append(Area(name, [(line[0], line[1], line[-1]) for line in lines], "c1"))
        when = str(times_of(table, each)[0])
        if each.known >= free:  # there is room for the time below the plot
            x_ticks.append((float(each.known - 1), when))
            free = each.known + (len(when) + 2) * LETTER / WIDTH * (end - begin)
    truth = Curve("truth", list(zip(range(begin, end), values[begin:end].tolist(), strict=True)), "base")
    origins = [float(each.known - 1) for each in forecasts]
    return Chart(title, [*curves, truth], areas, origins=origins, x_name="", x_ticks=x_ticks, width=WIDTH)
