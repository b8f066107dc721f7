"""Formats the choice of a plan as plain text: stages, timeline, figures, alternatives and scaling. Pure functions, no terminal needed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from carrywave.plan.cluster import Cluster
from carrywave.plan.memory import say
from carrywave.plan.predict import Prediction
from carrywave.plan.scaling import Scale
from carrywave.plan.search import GAIN_PER_DOUBLING, PlanChoice, describe
from carrywave.plan.simulation import TaskSpan, Timeline
from carrywave.plan.units import Units, unit_names

MOST_TICKS = 8  # on an axis of time
COLUMNS = 100  # width of a picture, not counting the names of its rows
MOST_ROWS = 24  # height of a picture; stages in the middle are omitted, as they are much alike
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
    return [unit_names(units, stage.first, stage.last) for stage in prediction.stages]


def seconds_text(seconds: float) -> str:
    """Format seconds with a unit, to three digits."""
    for size, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= 0.9995 * size:
            return f"{seconds / size:.3g} {name}" if seconds < 999.5 * size else f"{seconds / size:,.0f} {name}"
    return f"{seconds / 1e-6:.3g} us" if seconds else "0 s"


def stages_text(units: Units, prediction: Prediction) -> str:
    """A table of the stages: units, seconds of work and memory."""
    shares = prediction.plan.shares_head
    heads = ["stage", "units", "work per step", *["shared head"] * shares, "memory", "limit", "share"]
    linked = any(stage.memory.links for stage in prediction.stages)
    heads += ["parameters", "gradients", "optimizer", "activations", "carries", "workspace", *["links"] * linked]
    rows = []
    for number, (stage, name) in enumerate(zip(prediction.stages, stage_names(prediction, len(units)), strict=True)):
        memory = stage.memory
        scored = sum(span.end - span.start for span in prediction.timeline.rows[number] if span.label == "H")
        row = [str(number), name, seconds_text(stage.seconds), *[seconds_text(scored)] * shares]
        row += [say(memory.total), say(stage.limit_bytes), f"{memory.total / stage.limit_bytes:.0%}"]
        parts = (memory.parameters, memory.gradients, memory.optimizer, memory.activations, memory.carries, memory.workspace)
        rows.append([*row, *map(say, parts), *[say(memory.links)] * linked])
    return table(heads, rows, left=(1,))


def timeline_text(timeline: Timeline, columns: int = COLUMNS) -> str:
    """The step as a picture: one row per stage, real time from left to right; each column shows what takes up most of its time."""
    seconds = timeline.seconds
    if not seconds:
        return ""
    shown = list(range(len(timeline.rows)))
    if len(shown) > MOST_ROWS:
        shown = shown[: MOST_ROWS // 2] + shown[-MOST_ROWS // 2 :]
    width = len(f"stage {shown[-1]}")
    lines, seen, before = [], "", -1
    for stage in shown:
        if stage != before + 1:
            lines.append(f"… {stage - before - 1} more stages")
        before = stage
        row = _row(timeline.rows[stage], seconds, columns)
        lines.append(f"{f'stage {stage}':<{width}} {row}")
        seen += row
    lines += [f"{'':<{width}} {line}" for line in _ruler(seconds, columns)]
    legend = [words for label, words in _LEGEND.items() if any(letter in seen for letter in _LETTERS[label])]
    return "\n".join([*lines, ", ".join(legend + [f"{WAITS} waiting"] * (WAITS in seen))])


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


def _ruler(seconds: float, columns: int) -> list[str]:
    marks, names = [" "] * (columns + 12), [" "] * (columns + 12)
    for moment in ticks(0.0, seconds, MOST_TICKS):
        at = round(moment / seconds * columns)
        marks[at] = "|"
        for offset, letter in enumerate(seconds_text(moment)):
            names[at + offset] = letter
    return ["".join(marks).rstrip(), "".join(names).rstrip()]


def figures_text(choice: PlanChoice) -> str:
    """Step time, speed, idle time, traffic, and the efficiency relative to one device."""
    best, plan = choice.best, choice.best.plan
    # If batch shapes differ, the picture shows one of them, whereas the step time is their mean.
    drawn = best.timeline.seconds
    mean = abs(drawn - best.seconds) > 0.01 * best.seconds
    on_average = f" on average; the one drawn takes {seconds_text(drawn)}" if mean else ""
    lines = [
        f"step        {seconds_text(best.seconds)}{on_average}",
        f"speed       {best.speed}",
        f"bubble      {best.bubble:.1%} of the devices' time is spent waiting, or summing gradients without overlap",
        f"traffic     {say(best.sent_bytes)} per step between stages, over all workers; "
        f"{say(best.reduced_bytes)} of gradients that each worker sums with other replicas",
    ]
    lines += [f"transport   {best.transports}"] if plan.workers > 1 else []
    if choice.serial is None:
        lines.append("efficiency  unknown: one device cannot hold the model")
    elif plan.workers == 1:
        lines.append("efficiency  100%: a single device")
    else:
        times = choice.serial.seconds / best.seconds
        lines.append(
            f"efficiency  {choice.efficiency:.1%}: {plan.workers} devices are {times:.2f} times as fast as one, "
            f"which takes {seconds_text(choice.serial.seconds)} per step"
        )
    return "\n".join(lines)


def doubt_text(units: Units, cluster: Cluster) -> str:
    """How far the figures may be off."""
    error = max(host.profile.error(units.precision) for host in cluster.hosts)
    known = f"to within about {error:.0%}, as nine of ten timed layers were" if error else "from figures whose error is not known"
    return f"All times are predicted, {known}; where workers train, a few real steps of the best plans decide."


def rivals_text(choice: PlanChoice) -> str:
    """The alternatives and why they were not chosen."""
    if not choice.rivals:
        return "there are no other plans"
    rows = []
    for rival in choice.rivals:
        prediction = rival.prediction
        took = ["-", "-"] if prediction is None else [seconds_text(prediction.seconds), f"{prediction.tokens_per_second:,.0f}"]
        cuts = f", cuts {list(rival.plan.cuts)}" if _only_cuts_differ(choice, rival.plan.cuts, describe(rival.plan)) else ""
        rows.append([describe(rival.plan) + cuts, str(rival.plan.workers), *took, rival.why])
    return table(["plan", "devices", "step", f"{choice.best.counted}/s", "why not"], rows, left=(0, 4))


def _only_cuts_differ(choice: PlanChoice, cuts: tuple[int, ...], description: str) -> bool:
    return description == describe(choice.best.plan) and cuts != choice.best.plan.cuts


def scale_text(scale: Scale) -> str:
    """A table of how speed and cost grow with the number of devices, and where more stop paying off."""
    first = scale.points[0]
    counted = first.prediction.counted
    rows = []
    for point in scale.points:
        prediction = point.prediction
        rows.append(
            [
                f"{point.devices:,}",
                f"{prediction.plan.workers:,}",
                f"{prediction.tokens_per_second:,.0f}",
                f"{prediction.tokens_per_second / first.prediction.tokens_per_second:.2f}",
                f"{point.efficiency:.1%}",
                _number(prediction.plan.workers * 1e6 / prediction.tokens_per_second),
                describe(prediction.plan),
            ]
        )
    heads = ["devices", "used", f"{counted}/s", "speed-up", "efficiency", f"device-seconds per million {counted}", "plan"]
    return table(heads, rows, left=(6,)) + f"\n{scale_sentence(scale)}"


def _number(value: float) -> str:
    """Format a number to three digits, or as a whole number from 100 on."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def scale_sentence(scale: Scale) -> str:
    """Says where more devices stop paying off."""
    pays, last = scale.pays_up_to, scale.points[-1]
    many = f"{pays:,} device{'s' if pays > 1 else ''}"
    fastest = max(scale.points, key=lambda point: point.prediction.tokens_per_second).prediction
    if pays == last.devices:
        return f"More devices pay off throughout this table, up to {many}."
    paying = max(
        (point.prediction for point in scale.points if point.prediction.plan.workers <= pays), key=lambda each: each.tokens_per_second
    )
    gain = fastest.tokens_per_second / paying.tokens_per_second - 1
    beyond = f"the fastest plan, on {fastest.plan.workers:,}, gains {gain:.1%}" if gain > 0 else "more devices gain nothing"
    return f"More than {many} do not pay off: beyond that, each doubling saves less than {GAIN_PER_DOUBLING:.0%}; {beyond}."


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> str:
    """A table with right-aligned columns, except those listed in `left`."""
    widths = [max(len(row[at]) for row in (heads, *rows)) for at in range(len(heads))]

    def line(row: Sequence[str]) -> str:
        return "  ".join(
            cell.ljust(width) if at in left else cell.rjust(width) for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )

    return "\n".join(line(row).rstrip() for row in (heads, *rows))


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round values within a range, at most about this many."""
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(step * factor for factor in (1, 2, 5, 10) if step * factor * most >= (high - low) * (1 - 1e-9))
    return [count * step for count in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
