"""Formats the choice of a plan as plain text: stages, timeline, figures and alternatives. Pure functions, no terminal needed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from carrywave.plan.memory import say
from carrywave.plan.predict import Prediction
from carrywave.plan.search import PlanChoice, describe
from carrywave.plan.simulation import TaskSpan, Timeline
from carrywave.plan.units import Units, unit_names

COLUMNS = 100  # width of a picture, not counting the names of its rows
WAITS = "."
_LETTERS = {"F": "Ff", "B": "Bb", "H": "Hh", "W": "wW", "reduce": "+", "update": "u"}
_LEGEND = {
    "F": "F f forward of a chunk",
    "B": "B b backward of a chunk",
    "H": "H h shared head",
    "W": "w W deferred weight gradients",
    "reduce": "+ gradients summed over workers",
    "update": "u update",
}


def stage_names(prediction: Prediction, units: int) -> list[str]:
    """The units of each stage, in words."""
    plan = prediction.plan
    return [unit_names(units, *plan.span(stage, units)) for stage in range(plan.stages)]


def seconds_text(seconds: float) -> str:
    """Format seconds with a unit, to three digits."""
    for size, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= 0.9995 * size:
            return f"{seconds / size:.3g} {name}" if seconds < 999.5 * size else f"{seconds / size:,.0f} {name}"
    return f"{seconds / 1e-6:.3g} us" if seconds else "0 s"


def stages_text(units: Units, prediction: Prediction) -> str:
    """A table of the stages: units, seconds of work and memory of each."""
    heads = ["stage", "units", "work per step", "memory", "limit", "parameters", "gradients", "optimizer", "activations"]
    rows = []
    for number, name in enumerate(stage_names(prediction, len(units))):
        memory, seconds = prediction.memory[number], prediction.timeline.busy[number]
        held = memory.activations + memory.carries + memory.workspace
        sizes = (memory.total, prediction.limit_bytes, memory.parameters, memory.gradients, memory.optimizer, held)
        rows.append([str(number), name, seconds_text(seconds), *map(say, sizes)])
    return table(heads, rows, left=(1,))


def timeline_text(timeline: Timeline, columns: int = COLUMNS) -> str:
    """The step as a picture: one row per stage, real time from left to right; each column shows what takes up most of its time."""
    seconds = timeline.seconds
    if not seconds:
        return ""
    width = len(f"stage {len(timeline.rows) - 1}")
    rows = [_row(spans, seconds, columns) for spans in timeline.rows]
    legend = [words for label, words in _LEGEND.items() if any(letter in row for letter in _LETTERS[label] for row in rows)]
    legend += [f"{WAITS} waiting"] * any(WAITS in row for row in rows)
    lines = [f"{f'stage {stage}':<{width}} {row}" for stage, row in enumerate(rows)]
    return "\n".join([*lines, f"{'':<{width}} 0 s{seconds_text(seconds):>{columns - 3}}", ", ".join(legend)])


def _row(spans: Sequence[TaskSpan], seconds: float, columns: int) -> str:
    each = seconds / columns
    times: list[dict[str, float]] = [{} for _ in range(columns)]
    for span in spans:
        letters = _LETTERS[span.label]
        # Alternate upper and lower case between neighbouring chunks, or micro-batches, to show where each ends.
        letter = letters[(span.task.chunk + span.task.micro_batch) % len(letters)] if span.task is not None else letters
        for column in range(int(span.start / each), min(columns, math.ceil(span.end / each))):
            overlap = min(span.end, (column + 1) * each) - max(span.start, column * each)
            times[column][letter] = times[column].get(letter, 0.0) + overlap
    row = []
    for shares in times:
        most = max(shares.items(), key=lambda share: share[1], default=(WAITS, 0.0))[0]
        row.append(most if sum(shares.values()) >= each / 2 else WAITS)
    return "".join(row)


def figures_text(units: Units, choice: PlanChoice) -> str:
    """Step time, speed, idle time, traffic, and the efficiency relative to one device."""
    best, workers = choice.best, choice.best.plan.workers
    if choice.serial is None:
        efficiency = "unknown: one device cannot hold the model"
    elif workers == 1:
        efficiency = "100%: a single device"
    else:
        times = choice.serial.seconds / best.seconds
        one = f"which takes {seconds_text(choice.serial.seconds)} per step"
        efficiency = f"{choice.efficiency:.1%}: {workers} devices are {times:.2f} times as fast as one, {one}"
    return "\n".join(
        [
            f"step        {seconds_text(best.seconds)}",
            f"speed       {best.tokens_per_second:,.0f} {units.counted}/s",
            f"bubble      {best.timeline.bubble:.1%} of the devices' time is spent waiting, or summing gradients without overlap",
            f"traffic     {say(best.sent_bytes)} per step between stages, over all workers; "
            f"{say(best.reduced_bytes)} of gradients that each worker sums with other replicas",
            f"efficiency  {efficiency}",
        ]
    )


def doubt_text(error: float) -> str:
    """How far the figures may be off, and what decides."""
    known = f"to within about {error:.0%}, as nine of ten timed layers were" if error else "from figures whose error is not known"
    return f"All times are predicted, {known}; where workers train, three real steps of each of the best plans decide."


def rivals_text(units: Units, choice: PlanChoice) -> str:
    """The alternatives, beside the plan that was chosen."""
    rows = [
        [describe(each.plan), str(each.plan.workers), seconds_text(each.seconds), f"{each.tokens_per_second:,.0f}", choice.beside(each)]
        for each in choice.rivals
    ]
    return table(["plan", "devices", "step", f"{units.counted}/s", "beside it"], rows, left=(0, 4)) if rows else "there are no other plans"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> str:
    """A table with right-aligned columns, except those listed in `left`."""
    widths = [max(len(row[at]) for row in (heads, *rows)) for at in range(len(heads))]

    def line(row: Sequence[str]) -> str:
        return "  ".join(
            cell.ljust(width) if at in left else cell.rjust(width) for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )

    return "\n".join(line(row).rstrip() for row in (heads, *rows))
