"""The page about a run: its result beside the baselines, curves, samples, times, and what was trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from carrywave.report import figures
from carrywave.report.blocks import Block, Folded, Listing, PagePart, page
from carrywave.report.chart import Chart, Curve, Mark, Points, number
from carrywave.report.record import LogRow, RunRecord, is_number
from carrywave.tasks.baselines import BASELINES

MOST_METRICS = 8  # charts of metrics


def render(record: RunRecord, samples: Sequence[Block]) -> str:
    """The whole page; `samples` are blocks that `samples_of` makes, or a sentence why there are none."""
    parts: dict[str, Sequence[Block]] = {
        "Result": [*_results(record)] or ["Nothing was evaluated yet."],
        "Curves": [*_curves(record)] or ["No losses were logged yet."],
        "Samples": samples,
        "Times": [*_times(record)] or ["Nothing was timed yet."],
        "What was trained": [Listing("", (), list(figures.about(record))), Folded("The whole spec", record.spec_text)],
    }
    about = f"carrywave report · {figures.state(record)}"
    return page(record.name, about, list(figures.tiles(record)), [PagePart(title, blocks) for title, blocks in parts.items()])


def _results(record: RunRecord) -> Iterator[Block]:
    """The metrics of test and valid, beside those of the baselines."""
    which = "last" if record.keeps_last else "best"
    for title, row in (("Test data", next(reversed(record.rows("test")), None)), ("Validation data", record.best)):
        if row is not None:
            names, rows = figures.results(record, row)
            yield Listing(f"{title}, with the {which} weights (step {row.get('weights_step', row.get('step'))})", names, rows)


def _curves(record: RunRecord) -> Iterator[Block]:
    """Loss and every metric over the steps, with the step marked whose weights were kept."""
    train = figures.train_points(record.rows("train"), "loss", "targets")
    yield from _curve(record, figures.loss_name(record), "loss", [Curve("train", train, "c1", dots=True)])
    for name in [name for name in record.metric_names if not name.startswith("coverage_")][:MOST_METRICS]:
        yield from _curve(record, figures.metric_name(name) + figures.unit(record, name), name, [])


def _curve(record: RunRecord, title: str, name: str, curves: list[Curve]) -> Iterator[Chart]:
    """The chart of a metric: of train if there is one, of valid, and of baselines."""
    rows, best = record.rows("valid"), record.best
    curves = [*curves, Curve("validation", _points(rows, name), "c0", dots=True)]
    for other, kind in enumerate(BASELINES):
        points = _points(rows, f"{kind}_{name}")
        if points and all(points != curve.points for curve in curves):  # the last value is the naive forecast without a season
            curves.append(Curve(figures.baseline_name(record, kind), points, f"c{2 + other}" if other else "base", dashed=True))
    mark = Mark(best["step"], best[name], _caption(record, best, name)) if best and is_number(best.get(name)) else None
    values = [row[name] for row in (*rows, *(record.rows("train") if name == "loss" else ())) if name in row]
    many = sum(not is_number(value) for value in values)
    left_out = f"{many:,} of {len(values):,} values are infinite or not a number, and not drawn." if many else ""
    yield from _drawn(Chart(title, curves, mark=mark, percent=name.startswith(figures.SHARES), note=left_out))


def _caption(record: RunRecord, best: LogRow, name: str) -> str:
    """The caption of the step whose weights were kept: it is the best by one metric, and not by the others."""
    at = f"{number(best[name]) if name == 'loss' else figures.metric_text(name, best[name])} at step {best['step']:,}"
    return f"last: {at}" if record.keeps_last else f"best: {at}" if name == record.best_metric else at


def _times(record: RunRecord) -> Iterator[Block]:
    """Throughput, learning rate and gradient norm, where the time of a step went, and restarts."""
    rows = record.rows("train")
    steps = {row.get("step"): row.get("steps") for row in rows}
    timed = [{**row, "steps": steps.get(row.get("step"))} for row in record.timing if is_number(row.get("tokens_per_second"))]
    drawn: dict[str, tuple[Points, dict[str, Any]]] = {
        f"{figures.speed_unit(record)} per second": (figures.train_points(timed, "tokens_per_second", "seconds"), {}),
        "padding": (figures.train_points([row for row in rows if row.get("waste")], "waste", "steps"), {"percent": True}),
        "learning rate": (_points(rows, "lr"), {}),
        "gradient norm": (figures.train_points(rows, "norm", "steps"), {}),
    }
    for place, (title, (points, how)) in enumerate(drawn.items()):
        yield from _drawn(Chart(title, [Curve(title, points, f"c{2 + place}")], zero=True, **how))
    if restarts := figures.restarts(record):
        yield Listing("Restarts", ("when", "what", "from step"), restarts)


def _drawn(chart: Chart) -> Iterator[Chart]:
    """The chart, if there is anything to draw or to say."""
    if chart.svg or chart.note:
        yield chart


def _points(rows: Sequence[LogRow], name: str) -> list[tuple[float, float]]:
    return [(float(row["step"]), float(row[name])) for row in rows if is_number(row.get("step")) and is_number(row.get(name))]
