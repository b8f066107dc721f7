"""Draws the forecasts of a backtest against the truth, as one self-contained SVG file without scripts or external fonts and styles.

A panel for each series and column, of the first few: the truth as a line, each forecast as a line from its origin, and between the
outermost quantiles a band. Colours follow the viewer's light or dark theme if it reports one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

import numpy as np

from carrywave.data.tables.table import Table
from carrywave.plan.show import drawing
from carrywave.prediction.backtest.rolled import Rolled, times_of

WIDTH, PANEL, HEAD, MARGIN, LEFT, FOOT = 1000, 200, 30, 14, 80, 26  # pixels; FOOT holds the times below a panel
LETTER = 6.5  # pixels, about
MOST_PANELS = 8
BEFORE = 1.0  # rows shown ahead of the first origin, as a share of those after it
_LIGHT = """
.frame{fill:none;stroke:#c3cad4}.grid{stroke:#e3e7ec}.origin{stroke:#a9b2be;stroke-dasharray:3 3}.end{text-anchor:end}
.truth{fill:none;stroke:#3b4656;stroke-width:1.4}.forecast{fill:none;stroke:#d1495b;stroke-width:1.6}.band{fill:#d1495b;opacity:.18}
"""
_DARK = ".frame{stroke:#4a5462}.grid{stroke:#262d37}.origin{stroke:#5d6878}.truth{stroke:#cfd6e0}"


def draw(table: Table, forecasts: Sequence[Rolled], columns: Sequence[str], quantiles: Sequence[float] | None, title: str) -> str:
    """The SVG of a backtest."""
    pairs = [(series, place) for series in sorted({each.series for each in forecasts}) for place in range(len(columns))]
    shown = pairs[:MOST_PANELS]
    left_out = f" (the first {len(shown)} of {len(pairs)})" if len(pairs) > len(shown) else ""
    parts = [f'<text class="title" x="{MARGIN}" y="{MARGIN + 16}">{escape(title + left_out)}</text>']
    top = MARGIN + HEAD
    for series, place in shown:
        of_series = [each for each in forecasts if each.series == series]
        name = columns[place] if len(table.names) == 1 else f"{table.names[series]}: {columns[place]}"
        parts += [
            f'<text x="{LEFT}" y="{top + 12}">{escape(name)}</text>',
            *_panel(table, of_series, place, columns[place], quantiles, top + 20),
        ]
        top += 20 + PANEL + FOOT + MARGIN
    parts += _legend(top, quantiles, banded=any(each.banded for each in forecasts))
    return drawing.document(title, parts, WIDTH, top + HEAD, light=_LIGHT, dark=_DARK)


def _panel(table: Table, forecasts: Sequence[Rolled], place: int, column: str, quantiles: Sequence[float] | None, top: int) -> list[str]:
    first = min(each.known for each in forecasts)
    end = max(each.known + len(each.truth_HC) for each in forecasts)
    begin = max(0, first - max(2, round(BEFORE * (end - first))))
    start = int(table.starts[forecasts[0].series])
    truth = table.values[start + begin : start + end, table.columns.index(column)]
    everything = np.concatenate([truth, *(each.forecast_HCQ[:, place].reshape(-1) for each in forecasts)])
    low, high = float(everything.min()), float(everything.max())
    room = 0.05 * (high - low) or 1.0
    low, high = low - room, high + room
    width = WIDTH - LEFT - MARGIN

    def x(row: float) -> float:
        return LEFT + width * (row - begin) / max(end - 1 - begin, 1)

    def y(value: float) -> float:
        return top + PANEL * (high - value) / (high - low)

    def points(rows: Iterable[float], values: Iterable[float]) -> str:
        return drawing.points_text((x(row), y(value)) for row, value in zip(rows, values, strict=True))

    parts = []
    for value in drawing.ticks(low, high):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - MARGIN}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(f'<text class="end" x="{LEFT - 6}" y="{y(value) + 4:.1f}">{value:g}</text>')
    parts.append(f'<rect class="frame" x="{LEFT}" y="{top}" width="{width}" height="{PANEL}"/>')
    free = 0.0  # from where there is room for another time
    for each in forecasts:
        # A forecast begins where its origin is, at a value that is known.
        rows = np.arange(each.known - 1, each.known + len(each.truth_HC))
        now = float(table.values[start + each.known - 1, table.columns.index(column)])
        lines = np.concatenate([np.full((1, each.forecast_HCQ.shape[2]), now), each.forecast_HCQ[:, place]])
        at = x(each.known - 1)
        parts.append(f'<line class="origin" x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{top + PANEL}"/>')
        if quantiles is not None and len(quantiles) > 1:
            parts.append(f'<polygon class="band" points="{points(rows, lines[:, -1])} {points(rows[::-1], lines[::-1, 0])}"/>')
        middle = _middle(quantiles)
        parts.append(f'<polyline class="forecast" points="{points(rows, lines[:, middle])}"/>')
        when = str(times_of(table, each)[0])
        if at - free > LETTER * len(when) / 2:
            parts.append(f'<text class="mid" x="{at:.1f}" y="{top + PANEL + 16}">{escape(when)}</text>')
            free = at + LETTER * (len(when) / 2 + 2)
    parts.append(f'<polyline class="truth" points="{points(range(begin, end), truth)}"/>')
    return parts


def _middle(quantiles: Sequence[float] | None) -> int:
    """The quantile that is drawn as a line: the median, or the one next to it."""
    return 0 if quantiles is None else int(np.argmin(np.abs(np.array(quantiles) - 0.5)))


def _legend(top: int, quantiles: Sequence[float] | None, *, banded: bool) -> list[str]:
    point = "forecast" if quantiles is None or banded else f"quantile {quantiles[_middle(quantiles)]:g}"
    entries = [("truth", "truth"), ("forecast", point)]
    if quantiles is not None and len(quantiles) > 1:
        entries.append(("band", f"quantiles {quantiles[0]:g} to {quantiles[-1]:g}"))
    entries.append(("origin", "origin, the last row known"))
    parts, left = [], LEFT
    for kind, name in entries:
        sample = (
            f'<rect class="band" x="{left}" y="{top + 3}" width="24" height="12"/>'
            if kind == "band"
            else f'<polyline class="{kind}" points="{left},{top + 9} {left + 24},{top + 9}"/>'
        )
        parts += [sample, f'<text x="{left + 30}" y="{top + 13}">{escape(name)}</text>']
        left += 60 + 7 * len(name)
    return parts
