"""Charts: nothing is lost in the drawing, and nothing but text comes out of text."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from carrywave.report.chart import WIDTH, Area, Chart, Curve, Mark, number, reduced


def points_of(svg: str) -> list[tuple[float, float]]:
    [way] = re.findall(r'<polyline class="line c0" points="([^"]*)"', svg)
    return [tuple(map(float, point.split(","))) for point in way.split()]  # type: ignore[misc]


def test_a_line_goes_through_its_points() -> None:
    found = points_of(Chart("t", [Curve("a", [(0, 0.0), (5, 10.0), (10, 5.0)])]).svg)
    xs, ys = zip(*found, strict=True)
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)  # coordinates have one decimal
    assert ys[0] - ys[1] == pytest.approx(2 * (ys[0] - ys[2]), abs=0.3)
    assert ys[1] < ys[2] < ys[0]  # up is down in SVG


def test_every_text_is_escaped() -> None:
    evil = "</title><script>alert(1)</script>&"
    line, area = Curve(evil, [(1, 1.0), (2, 2.0)], dots=True), Area(evil, [(1, 0.0, 1.0), (2, 1.0, 2.0)])
    chart = Chart(evil, [line], [area], x_name=evil, mark=Mark(1, 1.0, evil), x_ticks=[(1, evil), (2, "Tuesday")])
    assert [name for _, name in chart.legend] == [evil, evil]
    assert "script" not in {element.tag for element in ElementTree.fromstring(chart.svg).iter()}
    assert "Tuesday" in chart.svg
    assert chart.svg.count("&lt;script&gt;") >= 5


def test_what_is_said_of_a_mark_stands_above_the_curve() -> None:
    line, mark = Curve("a", [(0, 0.0), (50, 10.0), (100, 5.0)]), Mark(100, 5.0, "5 at step 100")
    svg = Chart("t", [line], mark=mark).svg
    highest = min(y for _, y in points_of(svg))
    [(x, y)] = [(float(x), float(y)) for x, y in re.findall(r'<text class="said mid" x="([0-9.]+)" y="([0-9.]+)"', svg)]
    assert y < highest
    assert x + 7.4 * len("5 at step 100") / 2 <= WIDTH  # moved to where it is not cut off
    assert min(y for _, y in points_of(Chart("t", [line]).svg)) < highest  # without a mark, the plot has the room


def test_a_spike_survives_the_reduction() -> None:
    points = [(float(at), 1.0) for at in range(10_000)]
    points[7_777] = (7_777.0, 99.0)
    few = reduced(points)
    assert len(few) <= 300
    assert (7_777.0, 99.0) in few
    assert few == sorted(few)
    assert (few[0], few[-1]) == (points[0], points[-1])


@pytest.mark.parametrize(
    "points", [[], [(3, 2.0)], [(1, 0.0), (2, 0.0)], [(1, -5.0), (2, -5.0)], [(0, 1e-9), (1, 2e-9)], [(0, 1e12), (1, 2e12)]]
)
def test_odd_values_can_be_drawn(points: list[tuple[float, float]]) -> None:
    svg = Chart("t", [Curve("a", points)]).svg + Chart("t", [Curve("a", points)], zero=True).svg
    assert ("<svg" in svg) == bool(points)
    assert "nan" not in svg
    assert "inf" not in svg


def test_numbers_are_short() -> None:
    assert [number(value) for value in (0, 0.07359, 3.2311, 1234.4, 1e-7)] == ["0", "0.07359", "3.231", "1,234", "1e-07"]


def test_an_axis_of_shares_ends_at_all_of_them() -> None:
    drawn = Chart("accuracy", [Curve("validation", [(1, 1.0), (2, 1.0)])], percent=True).svg
    assert ">100%<" in drawn
    assert ">105%<" not in drawn
