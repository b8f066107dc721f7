"""The picture of a backtest: for each of the first series and columns, the truth as a line, each forecast as a line from its origin, and
between the outermost quantiles a band.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from carrywave.data.tables.table import Table
from carrywave.report.chart import LETTER, Area, Chart, Curve, document
from carrywave.train.backtest import OriginForecast, times_of

WIDTH = 1000  # pixels
MOST_CHARTS = 8


def picture(
    table: Table, forecasts: Sequence[OriginForecast], columns: Sequence[str], quantiles: Sequence[float] | None, title: str
) -> str:
    """The SVG of a backtest."""
    pairs = [(series, place) for series in sorted({each.series for each in forecasts}) for place in range(len(columns))]
    left_out = f" (the first {MOST_CHARTS} of {len(pairs)})" if len(pairs) > MOST_CHARTS else ""
    charts = []
    for series, place in pairs[:MOST_CHARTS]:
        name = columns[place] if len(table.names) == 1 else f"{table.names[series]}: {columns[place]}"
        charts.append(_chart(name, table, [each for each in forecasts if each.series == series], (place, columns[place]), quantiles))
    return document(title + left_out, charts)


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
