"""The page about a search: its trials, their values one after the other, and the value by each key that is a number."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from carrywave.report import figures
from carrywave.report.blocks import Listing, PagePart, page
from carrywave.report.chart import Chart, Curve, Mark, number
from carrywave.report.figures import Tile
from carrywave.report.record import is_number

MOST_ROWS = 500  # of the table: the best and the latest


def render_search(name: str, metric: str, keys: Sequence[str], rows: Sequence[Mapping[str, Any]], best: int, *, higher: bool) -> str:
    """The page of a search; a row has `trial`, the keys, the metric, `epochs`, `seconds` and `state`."""
    judged = [row for row in rows if is_number(row.get(metric))]
    shown = sorted(judged, key=lambda row: -row[metric] if higher else row[metric]) + [row for row in rows if row not in judged]
    of_best = next(row for row in rows if row["trial"] == best)
    title, value, percent = figures.metric_name(metric), figures.metric_text(metric, of_best[metric]), metric.startswith(figures.SHARES)
    so_far = list(accumulate((row[metric] for row in judged), max if higher else min))
    line = Curve("the best so far", [(row["trial"], value) for row, value in zip(judged, so_far, strict=True)], "c2")
    charts = []
    for key in ("trial", *(key for key in keys if all(is_number(row[key]) for row in judged))):
        dots, mark = [(row[key], row[metric]) for row in judged], Mark(of_best[key], of_best[metric], f"trial {best}: {value}")
        curves = [line] if key == "trial" else []
        charts.append(Chart(f"{title} by {key}", curves, mark=mark, dots=dots, x_name=key, percent=percent))
    table = [
        [
            str(row["trial"]),
            *(_text(row[key]) for key in keys),
            figures.metric_text(metric, row[metric]) if row in judged else "–",
            str(row["epochs"]),
            figures.duration(row["seconds"]),
            f"{row['state']}: {row['why']}" if row.get("why") else row["state"],
        ]
        for row in shown[:MOST_ROWS]
    ]
    note = "A trial's value is that of its best evaluation on the validation data."
    listing = Listing("Trials, the best first", ("trial", *keys, title, "epochs", "time", "state"), table, note)
    tiles = [Tile(f"best {title}", value, f"trial {best}"), *(Tile(key, _text(of_best[key]), "of the best trial") for key in keys)]
    states = ", ".join(f"{count} {state}" for state, count in Counter(row["state"] for row in rows).items())
    return page(name, f"carrywave tune · {states}", tiles, [PagePart("Values", charts), PagePart("Trials", [listing])])


def _text(value: Any) -> str:
    return number(value) if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
