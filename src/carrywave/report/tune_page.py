"""The page about a search: a table of its trials, their values one after the other, and the value by each key."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from markupsafe import Markup

from carrywave.plan.show.drawing import ticks
from carrywave.report import chart, figures
from carrywave.report.chart import Line, Mark
from carrywave.report.page import Figure, environment
from carrywave.report.record import is_number

MOST_ROWS = 500  # of the table: the best and the latest
FEW = 5  # values of a key that are all named below a picture
LOG_FACTOR = 10  # from which numbers are shown by orders of magnitude

Rows = Sequence[Mapping[str, Any]]


def render_search(name: str, metric: str, keys: Sequence[str], rows: Rows, best: int, *, higher: bool) -> str:
    """The page of a search; a row has `trial`, the keys, the metric, `epochs`, `seconds` and `state`."""
    judged = [row for row in rows if is_number(row.get(metric))]
    order = sorted(judged, key=lambda row: -row[metric] if higher else row[metric])
    others = [row for row in rows if not is_number(row.get(metric))]
    shown = [*order, *others][:MOST_ROWS]
    states = {state: sum(row["state"] == state for row in rows) for state in dict.fromkeys(row["state"] for row in rows)}
    of_best = next(row for row in rows if row["trial"] == best)
    return (
        environment()
        .get_template("tune.html")
        .render(
            title=name,
            metric=figures.metric_name(metric),
            keys=keys,
            best={
                "trial": best,
                "value": figures.metric_text(metric, of_best[metric]),
                "keys": [(key, _text(of_best[key])) for key in keys],
            },
            rows=[
                {
                    "trial": row["trial"],
                    "best": row["trial"] == best,
                    "values": [_text(row[key]) for key in keys],
                    "value": figures.metric_text(metric, row[metric]) if is_number(row.get(metric)) else "–",
                    "epochs": row["epochs"],
                    "seconds": row["seconds"],
                    "state": row["state"],
                    "why": row.get("why", ""),
                }
                for row in shown
            ],
            more=len(rows) - len(shown),
            states=", ".join(f"{count} {state}" for state, count in states.items()),
            drawn=[_by_trial(metric, judged, of_best, higher=higher), *(_by_key(metric, key, judged, of_best) for key in keys)],
        )
    )


def _text(value: Any) -> str:
    return chart.number(value) if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


def _by_trial(metric: str, rows: Rows, best: Mapping[str, Any], *, higher: bool) -> Figure:
    title = f"{figures.metric_name(metric)} by trial"
    values = [row[metric] for row in rows]
    so_far = list(accumulate(values, max if higher else min))
    lines = [Line("the best so far", [(row["trial"], value) for row, value in zip(rows, so_far, strict=True)], "c2")]
    dots = [(row["trial"], row[metric]) for row in rows]
    whole = [(place, f"{place:g}") for place in ticks(dots[0][0], max(dots[-1][0], dots[0][0] + 1), most=6) if place == int(place)]
    return _figure(metric, title, lines, dots, _mark(metric, best, best["trial"]), x_name="trial", x_ticks=whole)


def _by_key(metric: str, key: str, rows: Rows, best: Mapping[str, Any]) -> Figure:
    """Numbers on a line, by orders of magnitude if they span several; anything else side by side."""
    values = [row[key] for row in rows]
    named: list[tuple[float, str]] = []
    if all(is_number(value) for value in values):
        by_magnitude = min(values) > 0 and max(values) >= LOG_FACTOR * min(values)
        places = [math.log10(value) if by_magnitude else float(value) for value in values]
        if len(set(places)) <= FEW:
            named = sorted({place: _text(value) for place, value in zip(places, values, strict=True)}.items())
        elif by_magnitude:
            steps = range(math.floor(min(places)), math.ceil(max(places)) + 1)
            marked = [digit * 10.0**step for step in steps for digit in ((1, 2, 5) if len(steps) < FEW else (1,))]
            named = [(math.log10(value), f"{value:g}") for value in marked if min(places) <= math.log10(value) <= max(places)]
    else:
        texts = list(dict.fromkeys(_text(value) for value in values))
        places = [float(texts.index(_text(value))) for value in values]
        named = [(float(place), text) for place, text in enumerate(texts)]
    at = places[[row["trial"] for row in rows].index(best["trial"])]
    dots = [(place, row[metric]) for place, row in zip(places, rows, strict=True)]
    return _figure(metric, f"{figures.metric_name(metric)} by {key}", [], dots, _mark(metric, best, at), x_name=key, x_ticks=named)


def _mark(metric: str, best: Mapping[str, Any], place: float) -> Mark:
    return Mark(place, best[metric], f"trial {best['trial']}: {figures.metric_text(metric, best[metric])}")


def _figure(metric: str, title: str, lines: Sequence[Line], dots: Sequence[tuple[float, float]], mark: Mark, **how: Any) -> Figure:
    return Figure(title, Markup(chart.draw(title, lines, dots=dots, marks=[mark], percent=metric.startswith(figures.SHARES), **how)))
