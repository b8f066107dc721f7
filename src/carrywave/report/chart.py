"""Draws line charts as SVG for a page: lines, bands and marks on two axes. Pure functions; every text is escaped here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from importlib.resources import files
from typing import ClassVar

from markupsafe import Markup

WIDTH, HEIGHT, WIDE = 440, 250, 620  # pixels; WIDE is the width of a chart that has half of the page
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 12, 34  # pixels around the plot
ROW, LETTER = 14, 7.4  # pixels: of a line of text above the plot, and of a letter in it
MOST_POINTS = 300  # of a line: more are reduced to the lowest and highest of neighbours
MOST_DOTS = 40  # points of a line that are drawn as dots

Points = Sequence[tuple[float, float]]
_Place = Callable[[float, float], tuple[float, float]]


@dataclass(frozen=True)
class Curve:
    """One line of a chart: its name in the legend (none if empty), its points, and its class (`c0` … `c5`, or `base`)."""

    name: str
    points: Points
    kind: str = "c0"
    dashed: bool = False
    dots: bool = False


@dataclass(frozen=True)
class Area:
    """The area between two values at each place."""

    name: str
    points: Sequence[tuple[float, float, float]]  # place, lower, upper
    kind: str = "c0"


@dataclass(frozen=True)
class Mark:
    """A point that is marked, and its caption, which stands above the plot."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Chart:
    """A chart. `origins` are places with a vertical line, `x_ticks` replaces the numbers below the plot; `zero`: values begin at 0."""

    title: str
    curves: Sequence[Curve] = ()
    areas: Sequence[Area] = ()
    mark: Mark | None = None
    origins: Sequence[float] = ()
    x_name: str = "step"
    x_ticks: Sequence[tuple[float, str]] = ()
    zero: bool = False
    percent: bool = False
    width: int = WIDTH
    note: str = ""  # what is not drawn
    kind: ClassVar[str] = "chart"

    @cached_property
    def svg(self) -> Markup:
        """The drawing; empty if there is nothing to draw."""
        xs, ys = self._values()
        if not xs:
            return Markup("")
        x_range, y_range = self._ranges(xs, ys)

        def across(x: float) -> float:
            return LEFT + (x - x_range[0]) / (x_range[1] - x_range[0]) * (self.width - LEFT - RIGHT)

        top = TOP + ROW * (self.mark is not None)

        def place(x: float, y: float) -> tuple[float, float]:
            return across(x), HEIGHT - BOTTOM - (y - y_range[0]) / (y_range[1] - y_range[0]) * (HEIGHT - top - BOTTOM)

        parts = self._axes(x_range, y_range, place)
        for x, _ in (place(each, y_range[0]) for each in self.origins):
            parts.append(f'<line class="here" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        for area in self.areas:
            edge = [place(x, high) for x, _, high in area.points] + [place(x, low) for x, low, _ in reversed(area.points)]
            parts.append(f'<polygon class="band {area.kind}" points="{_text(edge)}"><title>{escape(area.name)}</title></polygon>')
        for curve in self.curves:
            parts += _curve(curve, place) if curve.points else []
        if self.mark is not None:
            (x, y), text, text_x = place(self.mark.x, self.mark.y), self.mark.text, _within(across(self.mark.x), self.mark.text, self.width)
            parts.append(f'<line class="up c0" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP + 4}" y2="{y - 5.5:.1f}"/>')
            parts.append(f'<circle class="ring c0" cx="{x:.1f}" cy="{y:.1f}" r="5.5"/>')
            parts.append(f'<text class="said mid" x="{text_x:.1f}" y="{TOP}">{escape(text)}</text>')
        head = f'<svg class="chart" viewBox="0 0 {self.width} {HEIGHT}" role="img"><title>{escape(self.title)}</title>\n'
        return Markup(head + "\n".join(parts) + "\n</svg>")

    @property
    def legend(self) -> list[tuple[str, str]]:
        """Class and name of lines and bands; empty if there is only one."""
        found = [(f"{curve.kind}{' dashed' * curve.dashed}", curve.name) for curve in self.curves if curve.name and curve.points]
        found += [(f"{area.kind} area", area.name) for area in self.areas]
        unique = list(dict.fromkeys(found))
        return unique if len(unique) > 1 else []

    def _values(self) -> tuple[list[float], list[float]]:
        lines = [curve.points for curve in self.curves]
        xs = [x for line in lines for x, _ in line] + [x for area in self.areas for x, *_ in area.points]
        return xs, [y for line in lines for _, y in line] + [y for area in self.areas for _, *pair in area.points for y in pair]

    def _ranges(self, xs: Sequence[float], ys: Sequence[float]) -> tuple[tuple[float, float], tuple[float, float]]:
        low, high = (min([*ys, 0.0]), max(ys)) if self.zero else (min(ys), max(ys))
        room = 0.06 * (high - low) if high > low else 0.1 * abs(low) or 1.0
        y_range = (low if self.zero and low == 0 else low - room), high + room
        if self.percent and high <= 1:
            y_range = y_range[0], min(y_range[1], 1.02)  # there are no shares above 100%; a little room for the line itself
        x_range = (min(xs), max(xs))
        return (x_range if x_range[0] < x_range[1] else (x_range[0] - 1, x_range[1] + 1)), y_range

    def _axes(self, x_range: tuple[float, float], y_range: tuple[float, float], place: _Place) -> list[str]:
        parts = []
        for value in ticks(*y_range):
            _, y = place(x_range[0], value)
            label = f"{100 * value:.3g}%" if self.percent else _tick(value)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{self.width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="end" x="{LEFT - 6}" y="{y + 4:.1f}">{label}</text>')
        for value, label in self.x_ticks or [(value, _tick(value)) for value in ticks(*x_range, most=6)]:
            x = _within(place(value, y_range[0])[0], label, self.width)
            parts.append(f'<text class="mid" x="{x:.1f}" y="{HEIGHT - BOTTOM + 15}">{escape(label)}</text>')
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{self.width - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text class="mid" x="{(LEFT + self.width - RIGHT) / 2:.0f}" y="{HEIGHT - 4}">{escape(self.x_name)}</text>')
        return parts


def style() -> str:
    """The colours of a page and the style of the charts in it."""
    return (files("carrywave.report") / "templates" / "chart.css").read_text("utf-8")


def number(value: float) -> str:
    """A number as a person reads it: four digits, thousands apart."""
    size = abs(value)
    if value and (size >= 1e15 or size < 1e-4):
        return f"{value:.3g}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


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


def _tick(value: float) -> str:
    """Short, for an axis: 12.5k instead of 12,500."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.4g}{letter}"
    return f"{value:.6g}"


def _curve(curve: Curve, place: _Place) -> list[str]:
    points = reduced(curve.points)
    dashed, way = ' stroke-dasharray="5 4"' * curve.dashed, _text([place(*point) for point in points])
    parts = [f'<polyline class="line {curve.kind}" points="{way}"{dashed}><title>{escape(curve.name)}</title></polyline>']
    if (curve.dots and len(points) <= MOST_DOTS) or len(points) == 1:
        parts += [f'<circle class="dot {curve.kind}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>' for x, y in (place(*point) for point in points)]
    return parts


def _within(x: float, text: str, width: int) -> float:
    """The middle of a text that is to stand at x, moved so that none of it is cut off."""
    half = LETTER * len(text) / 2
    return max(min(x, width - half), half)


def _text(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round values within a range, at most about this many."""
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(step * factor for factor in (1, 2, 5, 10) if step * factor * most >= (high - low) * (1 - 1e-9))
    return [count * step for count in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
