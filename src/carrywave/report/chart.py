"""Draws line charts as inline SVG: lines, points, bands and marks on two axes. Pure functions; colours are classes of the page's style.

Every text is escaped here, so the page can take a drawing as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from carrywave.plan.show.drawing import inline, points_text, ticks

WIDTH, HEIGHT, WIDE = 440, 250, 620  # pixels; WIDE is the width of a chart that has half of the page
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 12, 34  # pixels around the plot
ROW, LETTER = 14, 7.4  # pixels: of a line of text above the plot, and of a letter in it
MOST_POINTS = 300  # of a line: more are reduced to the lowest and highest of neighbours
MOST_DOTS = 40  # points of a line that are drawn as dots

Points = Sequence[tuple[float, float]]
_Place = Callable[[float, float], tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """One line of a chart: its name in the legend, its points, and its class (`c0` … `c5`, or `base`)."""

    name: str
    points: Points
    kind: str = "c0"
    dashed: bool = False
    dots: bool = False
    legend: bool = True


@dataclass(frozen=True)
class Band:
    """The area between two values at each place."""

    name: str
    points: Sequence[tuple[float, float, float]]  # place, lower, upper
    kind: str = "c0"


@dataclass(frozen=True)
class Mark:
    """A point that is marked, and its caption."""

    x: float
    y: float
    text: str
    kind: str = "c0"


def draw(
    title: str,
    lines: Sequence[Line],
    *,
    x_name: str = "step",
    bands: Sequence[Band] = (),
    marks: Sequence[Mark] = (),
    dots: Points = (),
    at: float | None = None,
    zero: bool = False,
    percent: bool = False,
    square: bool = False,
    width: int = WIDTH,
    x_ticks: Sequence[tuple[float, str]] = (),
) -> str:
    """The SVG of a chart; empty if there is nothing to draw.

    `dots` are points without a line, `at` draws a vertical line there, `zero` has the value axis begin at 0, and `square` gives both axes
    the same range. The captions of `marks` stand above the plot, where they cover nothing. `x_ticks` replaces the numbers below it.
    """
    drawn = [line for line in lines if line.points]
    xs = [x for line in drawn for x, _ in line.points] + [x for band in bands for x, *_ in band.points] + [x for x, _ in dots]
    ys = [y for line in drawn for _, y in line.points] + [y for band in bands for _, *pair in band.points for y in pair]
    ys += [y for _, y in dots]
    if not xs:
        return ""
    y_range = _range(ys, zero=zero)
    if percent and max(ys) <= 1:
        y_range = y_range[0], min(y_range[1], 1.02)  # there are no shares above 100%; a little room for the line itself
    x_range = y_range if square else (min(xs), max(xs))
    if square:
        x_range = y_range = _range([*xs, *ys], zero=zero)
    if x_range[0] == x_range[1]:
        x_range = x_range[0] - 1, x_range[1] + 1

    def across(x: float) -> float:
        return LEFT + (x - x_range[0]) / (x_range[1] - x_range[0]) * (width - LEFT - RIGHT)

    labels = _labels(marks, across, width)
    top = TOP + ROW * len({row for _, row in labels})

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            across(x),
            HEIGHT - BOTTOM - (y - y_range[0]) / (y_range[1] - y_range[0]) * (HEIGHT - top - BOTTOM),
        )

    named = x_ticks or [(value, _tick(value)) for value in ticks(*x_range, most=6)]
    parts = _grid(x_range, y_range, place, x_name, width, named, percent=percent)
    if at is not None:
        x = place(at, y_range[0])[0]
        parts.append(f'<line class="here" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
    for band in bands:
        upper = [place(x, high) for x, _, high in band.points]
        lower = [place(x, low) for x, low, _ in reversed(band.points)]
        parts.append(
            f'<polygon class="band {band.kind}" points="{points_text(upper + lower)}"><title>{escape(band.name)}</title></polygon>'
        )
    for line in drawn:
        parts += _line(line, place)
    for x, y in (place(*point) for point in dots):
        parts.append(f'<circle class="dot c0" cx="{x:.1f}" cy="{y:.1f}" r="2.4"/>')
    for mark, (x, row) in zip(marks, labels, strict=True):
        parts += _mark(mark, place(mark.x, mark.y), x, TOP + ROW * row)
    return inline("chart", title, parts, width, HEIGHT)


def legend(lines: Sequence[Line], bands: Sequence[Band] = ()) -> str:
    """The names of lines and bands beside their colours, as HTML."""
    names = [f'<li class="{line.kind}{" dashed" * line.dashed}">{escape(line.name)}</li>' for line in lines if line.legend and line.points]
    names += [f'<li class="{band.kind} area">{escape(band.name)}</li>' for band in bands]
    return f'<ul class="legend">{"".join(names)}</ul>' if len(names) > 1 or bands else ""


def number(value: float) -> str:
    """A number as a person reads it: four digits, thousands apart."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e15 or size < 1e-4:
        return f"{value:.3g}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def reduced(points: Points, most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """At most about `most` points: of each run of neighbours the lowest and the highest, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    kept: list[tuple[float, float]] = [points[0]]
    size = math.ceil((len(points) - 2) / ((most - 2) // 2))
    for first in range(1, len(points) - 1, size):
        some = points[first : min(first + size, len(points) - 1)]
        kept += sorted({min(some, key=lambda point: point[1]), max(some, key=lambda point: point[1])})
    return [*kept, points[-1]]


def _range(values: Sequence[float], *, zero: bool) -> tuple[float, float]:
    low, high = min(values), max(values)
    low = min(low, 0.0) if zero else low
    if low == high:
        wide = abs(low) * 0.1 or 1.0
        return (low, low + wide) if zero else (low - wide, high + wide)
    margin = 0.06 * (high - low)
    return low if zero and low == 0 else low - margin, high + margin


def _grid(
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    place: _Place,
    x_name: str,
    width: int,
    x_ticks: Sequence[tuple[float, str]],
    *,
    percent: bool,
) -> list[str]:
    parts = []
    for value in ticks(*y_range):
        _, y = place(x_range[0], value)
        label = f"{100 * value:.3g}%" if percent else _tick(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="end" x="{LEFT - 6}" y="{y + 4:.1f}">{label}</text>')
    for value, label in x_ticks:
        x = _within(place(value, y_range[0])[0], label, width)
        parts.append(f'<text class="mid" x="{x:.1f}" y="{HEIGHT - BOTTOM + 15}">{escape(label)}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{width - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>')
    parts.append(f'<text class="mid" x="{(LEFT + width - RIGHT) / 2:.0f}" y="{HEIGHT - 4}">{escape(x_name)}</text>')
    return parts


def _tick(value: float) -> str:
    """Short, for an axis: 12.5k instead of 12,500."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.4g}{letter}"
    return f"{value:.6g}"


def _line(line: Line, place: _Place) -> list[str]:
    points = reduced(line.points)
    dashed = ' stroke-dasharray="5 4"' if line.dashed else ""
    way = points_text([place(*point) for point in points])
    parts = [f'<polyline class="line {line.kind}" points="{way}"{dashed}><title>{escape(line.name)}</title></polyline>']
    if (line.dots and len(points) <= MOST_DOTS) or len(points) == 1:
        for x, y in points:
            at_x, at_y = place(x, y)
            title = f"{line.name}: {number(y)} at {number(x)}"
            parts.append(f'<circle class="dot {line.kind}" cx="{at_x:.1f}" cy="{at_y:.1f}" r="2.6"><title>{escape(title)}</title></circle>')
    return parts


def _labels(marks: Sequence[Mark], across: Callable[[float], float], width: int) -> list[tuple[float, int]]:
    """Where the middle of each mark's text stands above the plot, and in which row: as near to the mark as the others leave room."""
    places: list[tuple[float, int]] = []
    occupied: list[tuple[float, float, int]] = []  # from, to, row
    for mark in marks:
        half = LETTER * len(mark.text) / 2
        x = _within(across(mark.x), mark.text, width)
        row = 0
        while any(row == other and x - half < high + LETTER and x + half > low - LETTER for low, high, other in occupied):
            row += 1
        occupied.append((x - half, x + half, row))
        places.append((x, row))
    return places


def _within(x: float, text: str, width: int) -> float:
    """The middle of a text that is to stand at x, moved so that none of it is cut off."""
    half = LETTER * len(text) / 2
    return max(min(x, width - half), half)


def _mark(mark: Mark, at: tuple[float, float], text_x: float, text_y: float) -> list[str]:
    """A ring around the point, and a thin line up to its caption."""
    x, y = at
    return [
        f'<line class="up {mark.kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{text_y + 4:.1f}" y2="{y - 5.5:.1f}"/>',
        f'<circle class="ring {mark.kind}" cx="{x:.1f}" cy="{y:.1f}" r="5.5"><title>{escape(mark.text)}</title></circle>',
        f'<text class="said mid" x="{text_x:.1f}" y="{text_y:.1f}">{escape(mark.text)}</text>',
    ]
