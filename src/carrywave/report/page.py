"""Puts the page together: what the template shows of each run, and the HTML itself. Everything a user or a file can name is escaped."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from carrywave.plan.plan import Plan
from carrywave.plan.schedule.schedule import show, wavefront
from carrywave.report import chart, figures, pictures
from carrywave.report.chart import Band, Line, Mark
from carrywave.report.record import RunRecord, is_number
from carrywave.report.sample_kinds import (
    Confused,
    Continued,
    Decided,
    Distributed,
    Followed,
    Forecasted,
    Paired,
    Ranked,
    Samples,
    Transcribed,
)
from carrywave.report.train_points import train_points
from carrywave.tasks.baselines import BASELINES

MOST_METRICS = 8  # charts of metrics
MOST_WORKERS = 64  # rows of the table of workers
MOST_PICTURED = 12  # chunks of a schedule that is shown as text
COLOURS = 6
SLOWER = 1.25  # times as long as the mean of the run: worth a word
COVERAGE = "coverage_"  # and the quantile: the share of values below its forecast


@dataclass(frozen=True)
class Figure:
    """A drawing with its title and legend."""

    title: str
    svg: Markup
    legend: str = ""
    note: str = ""  # what is not drawn


def render(records: Sequence[RunRecord], samples: Sequence[Samples | None], *, live: str = "") -> str:
    """The whole page; `live` is the nonce of the script that keeps it up to date, or empty for a page without any script."""
    most = pictures.MOST_SPANS // len(records)
    views = [_view(number, record, some, most) for number, (record, some) in enumerate(zip(records, samples, strict=True))]
    title = records[0].name if len(records) == 1 else f"{len(records)} runs"
    return (
        environment()
        .get_template("page.html")
        .render(title=title, runs=views, compared=_compared(records) if len(records) > 1 else None, live=live, parts=figures.PARTS)
    )


@cache
def environment() -> Environment:
    """Where templates come from."""
    templates = Environment(
        loader=PackageLoader("carrywave.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    templates.filters |= {"percent": lambda share: f"{100 * share:.1f}%", "seconds": figures.duration}
    return templates


def _view(number: int, record: RunRecord, samples: Samples | None, most: int) -> dict[str, Any]:
    """What the template shows of one run."""
    times = figures.workers(record)
    bubble = pictures.bubble(record)
    return {
        "id": f"run-{number}",
        "colour": f"c{number % COLOURS}",
        "name": record.name,
        "state": figures.state(record),
        "running": record.trained_now,
        "tiles": figures.tiles(record),
        "about": list(figures.about(record)),
        "spec": record.spec_text,
        "curves": list(_curves(record)),
        "speeds": list(_speeds(record)),
        "workers": times[:MOST_WORKERS],
        "more_workers": max(0, len(times) - MOST_WORKERS),
        "slowest": max(times, key=lambda worker: worker.compute, default=None),
        "timed_step": record.timeline.get("step"),
        "no_times": _why_no_times(record),
        "plan": Markup(pictures.plan_picture(record)),
        "plan_sentence": figures.plan_sentence(record.plan).capitalize() if record.plan else "",
        "schedule": _schedule(record),
        "step": Markup(pictures.step_picture(record, most)),
        "step_sentence": _step_sentence(record, bubble),
        "restarts": figures.restarts(record),
        "no_history": not record.history,
        "samples": None if samples is None else _samples(samples),
    }


def _curves(record: RunRecord) -> Iterator[Figure]:
    """Loss and every metric over the steps, with the best step marked."""
    best = record.best
    train, valid = train_points(record.rows("train"), "loss", "targets"), _points(record.rows("valid"), "loss")
    lines = [Line("train", train, "c1", dots=True), Line("validation", valid, "c0", dots=True)]
    if frequencies := _points(record.rows("valid"), "naive_loss"):
        lines.append(Line("label frequencies alone", frequencies, "base", dashed=True))
    marks = [Mark(best["step"], best["loss"], _marked(record, best, "loss"))] if best else []
    noted = _not_finite(record, "loss", ("train", "valid"))
    yield from _figure(figures.loss_name(record), lines, noted, marks=marks)
    covered = [name for name in record.metric_names if name.startswith(COVERAGE)]
    for name in [name for name in record.metric_names if name not in covered][:MOST_METRICS]:
        points = _points(record.rows("valid"), name)
        lines = [Line("validation", points, "c0", dots=True)]
        for other, (kind, what) in enumerate(BASELINES.items()):
            simple = _points(record.rows("valid"), f"{kind}_{name}")
            if simple and all(simple != line.points for line in lines[1:]):  # the last value is the naive forecast without a season
                lines.append(Line(what, simple, f"c{2 + other}" if other else "base", dashed=True))
        value = best.get(name) if best else None
        metric_marks = [Mark(best["step"], value, _marked(record, best, name))] if best and is_number(value) else []
        noted = _not_finite(record, name, ("valid",))
        title = figures.metric_name(name) + figures.unit(record, name)
        yield from _figure(title, lines, noted, marks=metric_marks, percent=name.startswith(figures.SHARES))
    if covered:
        lines, wanted = [], []
        for place, name in enumerate(covered):
            points, share = _points(record.rows("valid"), name), float(name.removeprefix(COVERAGE))
            lines.append(Line(f"quantile {share:g}", points, f"c{place % COLOURS}", dots=True))
            wanted.append(Line("wanted", [(x, share) for x, _ in points], "base", dashed=True, legend=place == 0))
        yield from _figure("share of values below each quantile", [*lines, *wanted], percent=True)


def _marked(record: RunRecord, best: Mapping[str, Any], name: str) -> str:
    """The caption of the step whose weights were kept: it is the best by one metric, and not by the others."""
    value = chart.number(best[name]) if name == "loss" else figures.metric_text(name, best[name])
    at = f"{value} at step {best['step']:,}"
    if record.keeps_last:
        return f"last: {at}"
    if name == record.best_metric:
        return f"best: {at}"
    return f"{at}, best by {figures.metric_name(record.best_metric)}" if name == "loss" else at


def _speeds(record: RunRecord) -> Iterator[Figure]:
    """Throughput, padding, learning rate and gradient norm over the steps."""
    rows = record.rows("train")
    steps = {row.get("step"): row.get("steps") for row in rows}
    timed = [{**row, "steps": steps.get(row.get("step"))} for row in record.timing if is_number(row.get("tokens_per_second"))]
    speed = Line("speed", train_points(timed, "tokens_per_second", "seconds"), "c2")
    yield from _figure(f"{figures.speed_unit(record)} per second", [speed], zero=True)
    padding = train_points(rows, "waste", "steps")
    if any(value for _, value in padding):
        yield from _figure("padding", [Line("padding", padding, "c3")], zero=True, percent=True)
    yield from _figure("learning rate", [Line("learning rate", _points(rows, "lr"), "c4")], zero=True)
    yield from _figure("gradient norm", [Line("norm", train_points(rows, "norm", "steps"), "c5")], zero=True)


def _figure(title: str, lines: Sequence[Line], note: str = "", **how: Any) -> Iterator[Figure]:
    """The drawing, if there is anything to draw, and what had to be left out of it."""
    svg = chart.draw(title, lines, **how)
    if svg or note:
        yield Figure(title, Markup(svg), Markup(chart.legend(lines)), note)


def _not_finite(record: RunRecord, name: str, parts: Sequence[str]) -> str:
    """How many logged values are infinite or not a number, in a sentence; empty if none is. The log has null for them."""
    values = [row[name] for part in parts for row in record.rows(part) if name in row]
    many = sum(not is_number(value) for value in values)
    if not many:
        return ""
    return f"{many:,} of {figures.counted(len(values), 'value')} {'is' if many == 1 else 'are'} infinite or not a number, and not drawn."


def _points(rows: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    return [(float(row["step"]), float(row[name])) for row in rows if is_number(row.get("step")) and is_number(row.get(name))]


def _why_no_times(record: RunRecord) -> str:
    """Why there are no times of workers, in a sentence."""
    train = record.spec.get("train")
    if isinstance(train, Mapping) and train.get("sync", "step") != "step":
        return "Tasks are not timed where replicas train on their own (train.sync)."
    if record.timeline:
        return "Steps were replayed from CUDA graphs, which have no tasks to time; the mean step is above."
    return "No step was timed task by task: the run is too short or too young for it (a few steps are enough), or older than the timeline."


def _step_sentence(record: RunRecord, bubble: float | None) -> str:
    early, predicted = record.timeline.get("step_seconds"), record.timeline.get("predicted")
    whole = figures.step_seconds(record)
    measured = early if whole is None else whole
    parts = []
    if is_number(measured):
        over = "" if whole is None else " over the whole run"
        parts.append(f"A step took {figures.duration(measured)} on average{over}.")
    if is_number(early) and whole is not None and record.timeline.get("steps"):
        slower = "; early steps are slower while a machine warms up or is busy" if early > SLOWER * whole else ""
        parts.append(f"The {record.timeline['steps']} steps before the one drawn here took {figures.duration(early)} on average{slower}.")
    if isinstance(predicted, Mapping) and is_number(predicted.get("step_seconds")):
        expected = predicted["step_seconds"]
        off = f" ({measured / expected - 1:+.0%})" if is_number(measured) and expected else ""
        parts.append(f"The planner had predicted {figures.duration(expected)}{off}.")
    elif measured:
        parts.append("There is no prediction: this machine had not been measured for such a model when the run started.")
    if bubble is not None:
        parts.append(f"In the step drawn here, {bubble:.1%} of the workers' time was not spent computing. Timing adds a little to it.")
    return " ".join(parts)


def _schedule(record: RunRecord) -> str:
    """The wavefront as the schedule has it, if it is small; empty otherwise."""
    plan, batch = record.plan, record.spec.get("batch")
    steps = batch.get("steps") if isinstance(batch, Mapping) else None
    if not isinstance(steps, int) or not isinstance(plan.get("stages"), int):
        return ""
    chunk_steps, micro_batches, stages = plan.get("chunk_steps"), plan.get("micro_batches") or 1, plan["stages"]
    shape = Plan(1, stages, tuple(plan.get("cuts") or ()), chunk_steps if isinstance(chunk_steps, int) else None)
    chunks = shape.chunks(steps)
    if chunks * micro_batches * stages == 1 or chunks * micro_batches > MOST_PICTURED or stages > MOST_PICTURED:
        return ""
    return show(wavefront(stages, chunks, micro_batches, share_head=bool(plan.get("share_head")), defer_weights=not plan.get("recompute")))


def _samples(samples: Samples) -> dict[str, Any]:
    texts = [each for each in samples.shown if isinstance(each, Continued)]
    drawn = [_forecast(each) for each in samples.shown if isinstance(each, Forecasted)]
    drawn += [_distributed(each) for each in samples.shown if isinstance(each, Distributed)]
    drawn += [_followed(each) for each in samples.shown if isinstance(each, Followed)]
    drawn += [_paired(each) for each in samples.shown if isinstance(each, Paired)]
    matrices = [_matrix(each) for each in samples.shown if isinstance(each, Confused)]
    tables = [_labels(each) for each in samples.shown if isinstance(each, Decided)]
    tables += [_ranked(each) for each in samples.shown if isinstance(each, Ranked)]
    transcripts = [each for each in samples.shown if isinstance(each, Transcribed)]
    return {"note": samples.note, "texts": texts, "drawn": drawn, "matrices": matrices, "tables": tables, "transcripts": transcripts}


def _forecast(sample: Forecasted) -> Figure:
    lines = [
        Line("truth", sample.history, "base", legend=False),
        Line("truth", sample.truth, "base"),
        Line(sample.point_name, sample.forecast, "c0"),
    ]
    bands = [Band(sample.band_name, sample.band, "c0")] if sample.band else []
    x_name, times = "steps ahead", _times(sample)
    if times:
        x_name = f"forecast made at {sample.times[len(sample.history) - 1]}"
    svg = chart.draw(sample.title, lines, x_name=x_name, bands=bands, at=0, width=chart.WIDE, x_ticks=times)
    return Figure(sample.title, Markup(svg), Markup(chart.legend(lines, bands)))


def _times(sample: Forecasted) -> list[tuple[float, str]]:
    """A few times to stand below a forecast, that of its origin among them; none if they are not known."""
    whole_minutes = all(text.endswith(":00") and text.count(":") == 2 for text in sample.times)
    texts = [text.removesuffix(":00") if whole_minutes else text for text in sample.times]
    room = chart.WIDE / (chart.LETTER * (max(map(len, texts), default=0) + 2))  # texts side by side
    origin, every = len(sample.history) - 1, max(1, math.ceil(len(texts) / max(room - 1, 1)))
    return [(float(place - origin), text) for place, text in enumerate(texts) if (place - origin) % every == 0]


def _distributed(sample: Distributed) -> Figure:
    lines = []
    for place, (name, values) in enumerate(sample.by_step):
        points = [(float(step), value) for step, value in enumerate(values, start=1) if math.isfinite(value)]
        lines.append(Line(name, points, f"c{place}" if place else "c0", dashed=place > 0, dots=len(points) == 1))
    listed = ", ".join(f"{name} {chart.number(value)}" for name, value in sample.worst)
    many = f"The {len(sample.worst)} worst of {sample.series:,}" if len(sample.worst) < sample.series else "From worst to best"
    svg = chart.draw(sample.title, lines, x_name="steps ahead", width=chart.WIDE, zero=True)
    return Figure(sample.title, Markup(svg), Markup(chart.legend(lines)), f"{many}: {listed}." if listed else "")


def _paired(sample: Paired) -> Figure:
    values = [value for point in sample.points for value in point] or [0.0]
    ends = [(min(values), min(values)), (max(values), max(values))]
    exact = Line("prediction = truth", ends, "base", dashed=True)
    return Figure(
        sample.title, Markup(chart.draw(sample.title, [exact], x_name="truth", dots=sample.points, square=True, width=chart.WIDE))
    )


def _matrix(sample: Confused) -> dict[str, Any]:
    """The table, of the most frequent labels; the accuracy is that of all. Labels that share the last row are not right just by meeting."""
    folded = sample.folded()
    rows = []
    for label, counts in zip(folded.labels, folded.counts, strict=True):
        total = sum(counts)
        rows.append({"label": label, "cells": [(many, many / total if total else 0.0) for many in counts]})
    return {"labels": folded.labels, "rows": rows, "accuracy": sample.accuracy, "folded": folded is not sample}


def _labels(sample: Decided) -> dict[str, Any]:
    """The table by label, of those that hold most often."""
    rows = []
    for row in sample.folded():
        scores = [float(row[name]) for name in ("precision", "recall", "f1")]
        shown = ["–" if math.isnan(score) else f"{100 * score:.1f}%" for score in scores]
        rows.append((str(row[sample.name]), [*shown, f"{row['targets']:,}", f"{row['predicted']:,}"]))
    more = len(sample.rows) - len(rows)
    names = ("precision", "recall", "F1", "holds", "predicted")
    more_of = f"{more} more {sample.name}s, which hold less often" if more else ""
    return {"by": sample.name, "names": names, "rows": rows, "more": more_of}


def _ranked(sample: Ranked) -> dict[str, Any]:
    """The table by series and target, of those that are estimated worst."""
    several = len({row["column"] for row in sample.rows}) > 1
    rows = []
    for row in sample.folded():
        scores = [float(row[name]) for name in ("nse", "kge", "rmse")]
        shown = ["–" if math.isnan(score) else f"{score:.3g}" for score in scores]
        rows.append((f"{row['series']} {row['column']}" if several else str(row["series"]), [*shown, f"{row['targets']:,}"]))
    more = len(sample.rows) - len(rows)
    names = ("NSE", "KGE", "RMSE", "targets")
    return {"by": "series", "names": names, "rows": rows, "more": f"{more} more, which are estimated better" if more else ""}


def _followed(sample: Followed) -> Figure:
    lines = [Line("truth", sample.truth, "base"), Line("estimate", sample.estimate, "c0")]
    return Figure(sample.title, Markup(chart.draw(sample.title, lines, width=chart.WIDE)), Markup(chart.legend(lines)))


def _compared(records: Sequence[RunRecord]) -> dict[str, Any]:
    """Several runs side by side: their figures, what differs in their specs, and their curves in one chart."""
    names = dict.fromkeys(tile.name for record in records for tile in figures.tiles(record))
    tiles = [{tile.name: tile for tile in figures.tiles(record)} for record in records]
    rows = [("task", [record.task for record in records]), ("state", [figures.state(record) for record in records])]
    rows += [("plan", [figures.plan_sentence(record.plan) if record.plan else "not recorded" for record in records])]
    rows += [(name, [of[name].value if name in of else "–" for of in tiles]) for name in names]
    flat = [_flat(record.spec) for record in records]
    keys = sorted({key for one in flat for key in one if len({other.get(key) for other in flat}) > 1})
    drawn: list[Figure] = []
    for title, part, name in _common(records):
        lines = [
            Line(
                record.name,
                train_points(record.rows(part), name, "targets") if part == "train" else _points(record.rows(part), name),
                f"c{number % COLOURS}",
                dots=part == "valid",
            )
            for number, record in enumerate(records)
        ]
        marks = []
        for number, record in enumerate(records):
            if part == "valid" and name == "loss" and (best := record.best):
                by = "" if record.best_metric == "loss" else f" (by {figures.metric_name(record.best_metric)})"
                by = " (last)" if record.keeps_last else by
                marks.append(Mark(best["step"], best["loss"], f"{chart.number(best['loss'])}{by}", f"c{number % COLOURS}"))
        drawn += _figure(title, lines, marks=marks, percent=name.startswith(figures.SHARES))
    return {"rows": rows, "spec": [(key, [one.get(key, "–") for one in flat]) for key in keys], "drawn": drawn}


def _common(records: Sequence[RunRecord]) -> Iterator[tuple[str, str, str]]:
    """Charts in which all runs are shown: title, part of the data, name."""
    yield "validation loss", "valid", "loss"
    yield "train loss", "train", "loss"
    shared = [name for name in records[0].metric_names if all(name in record.metric_names for record in records)]
    for name in shared[: MOST_METRICS // 2]:
        yield f"validation {figures.metric_name(name)}", "valid", name


def _flat(spec: Mapping[str, Any]) -> dict[str, str]:
    settings: dict[str, str] = {}
    for section, value in spec.items():
        if section == "plan" and isinstance(value, Mapping):
            value = ", ".join(f"{key}={json.dumps(setting)}" for key, setting in value.items() if setting not in (None, False))
        pairs = value.items() if isinstance(value, Mapping) else [("", value)]
        settings |= {f"{section}.{key}".rstrip("."): setting if isinstance(setting, str) else json.dumps(setting) for key, setting in pairs}
    return settings
