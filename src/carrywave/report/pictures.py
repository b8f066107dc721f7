"""Draws a run's plan (who holds which units) and its step (who did which chunk when) as inline SVG. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import accumulate, pairwise
from typing import Any, cast

from carrywave.plan.schedule.schedule import Phase, StageTask
from carrywave.plan.show.drawing import inline
from carrywave.plan.show.svg import Panel, draw
from carrywave.plan.show.text import seconds_text
from carrywave.plan.simulation import TaskSpan, Timeline
from carrywave.plan.units import unit_names
from carrywave.report.record import RunRecord, is_number

BOX, GAP, TALL, LINE, MARGIN = 176, 44, 64, 26, 8  # pixels: width of a stage, between stages, height of a stage, between replicas
MOST_REPLICAS, MOST_STAGES = 4, 12  # drawn
MOST_WORKERS = 12  # rows of the measured step
MOST_SPANS = 3000  # in the drawing of a step: each takes about 130 bytes of the page
TASKS = ("F", "B", "H", "W")


def plan_picture(record: RunRecord) -> str:
    """Replicas as rows, stages as boxes with the units they hold, chunks of the window above; empty if the plan is not known."""
    plan = record.plan
    replicas, stages = plan.get("replicas"), plan.get("stages")
    if not isinstance(replicas, int) or not isinstance(stages, int) or replicas < 1 or stages < 1:
        return ""
    names = _stage_units(record, stages)
    shown_stages, shown_replicas = min(stages, MOST_STAGES), min(replicas, MOST_REPLICAS)
    width = MARGIN * 2 + shown_stages * (BOX + GAP) - GAP
    width = max(width, 560)
    parts, top = _chunks(record, width)
    seats = {(seat.get("replica"), seat.get("stage")): seat for seat in plan.get("workers") or () if isinstance(seat, dict)}
    for replica in range(shown_replicas):
        if replicas > 1:
            parts.append(f'<text x="{MARGIN}" y="{top + 12}">replica {replica}: its part of the lanes</text>')
            top += 20
        for stage in range(shown_stages):
            parts += _box(
                stage, names, seats.get((replica, stage)), MARGIN + stage * (BOX + GAP), top, first=_first(replicas, stages, stage)
            )
            if stage + 1 < shown_stages:
                parts += _arrows(MARGIN + stage * (BOX + GAP) + BOX, top)
        top += TALL + LINE - 8
    left_out = []
    if replicas > shown_replicas:
        left_out.append(f"{replicas - shown_replicas:,} more replicas like these")
    if stages > shown_stages:
        left_out.append(f"{stages - shown_stages:,} more stages")
    if left_out:
        parts.append(f'<text x="{MARGIN}" y="{top + 8}">… {" and ".join(left_out)}</text>')
        top += 20
    if replicas > 1:
        parts.append(f'<text class="soft" x="{MARGIN}" y="{top + 8}">replicas sum their gradients in every step</text>')
        top += 20
    return inline("plan", "the plan", parts, width, top, f' width="{width}" height="{top}"')


def step_picture(record: RunRecord, most: int = MOST_SPANS) -> str:
    """The predicted and the measured step on one time axis, as far as the run has them; empty if it has neither.

    Rows that would bring more than `most` spans into the drawing are left out.
    """
    panels = []
    predicted = record.timeline.get("predicted")
    if isinstance(predicted, Mapping) and (rows := _that_fit(_rows(predicted.get("rows")), most // 2)):
        timeline = Timeline(tuple(rows))
        panels.append(Panel(f"predicted: {seconds_text(timeline.seconds)}", timeline, [str(n) for n in predicted.get("stages") or ()]))
    measured = _measured(record, most // 2)
    if measured is not None:
        panels.append(measured)
    return draw(panels, "who did which chunk when", within="steps") if panels else ""


def _measured(record: RunRecord, most: int = MOST_SPANS) -> Panel | None:
    rows: list[tuple[TaskSpan, ...]] = []
    names = []
    for each in (record.timeline.get("workers") or ())[:MOST_WORKERS]:
        spans = _spans(each.get("spans") if isinstance(each, Mapping) else None)
        if not spans or not is_number(each.get("begun")) or not is_number(each.get("seconds")):
            continue
        begun = float(each["begun"])
        # Waiting is what is left blank: the bubble.
        shifted = [span._replace(start=span.start + begun, end=span.end + begun) for span in spans if span.label != "wait"]
        if (first := begun + spans[0].start) > begun:  # it waits for nobody yet: the table counts this as the rest, too
            shifted.insert(0, TaskSpan("rest", begun, first))
        rows.append((*shifted, TaskSpan("rest", shifted[-1].end, max(shifted[-1].end, begun + float(each["seconds"])))))
        names.append(f"replica {each.get('replica')}, stage {each.get('stage')}")
    rows = _that_fit(rows, most)
    if not rows:
        return None
    timeline = Timeline(tuple(rows))
    step = record.timeline.get("step")
    return Panel(f"measured: {seconds_text(timeline.seconds)}, step {step} timed task by task", timeline, names)


def bubble(record: RunRecord) -> float | None:
    """The share of the workers' time in the measured step that was not spent computing; None if it was not measured."""
    panel = _measured(record)
    if panel is None:
        return None
    busy = sum(span.end - span.start for row in panel.timeline.rows for span in row if span.label in TASKS)
    return 1 - busy / (panel.timeline.seconds * len(panel.timeline.rows)) if panel.timeline.seconds else None


def _that_fit(rows: list[tuple[TaskSpan, ...]], most: int) -> list[tuple[TaskSpan, ...]]:
    """The first rows, with at most `most` spans together."""
    sizes = accumulate(map(len, rows))
    return [row for row, size in zip(rows, sizes, strict=True) if size <= most]


def _rows(content: object) -> list[tuple[TaskSpan, ...]]:
    return [spans for row in content if (spans := tuple(_spans(row)))] if isinstance(content, list) else []


def _spans(content: object) -> list[TaskSpan]:
    """Spans as timeline.json has them: label, start, end, chunk, micro-batch."""
    spans = []
    for each in content if isinstance(content, list) else ():
        if not isinstance(each, list) or len(each) != 5 or not is_number(each[1]) or not is_number(each[2]):
            continue
        label, start, end, chunk, micro_batch = each
        phase = label if label in TASKS else "F"
        task = StageTask(cast(Phase, phase), 0, chunk, micro_batch) if isinstance(chunk, int) and isinstance(micro_batch, int) else None
        if label in (*TASKS, "reduce", "update", "send", "wait"):
            spans.append(TaskSpan(label, start, end, task if label in TASKS else None))
    return spans


def _stage_units(record: RunRecord, stages: int) -> list[str]:
    model = record.spec.get("model")
    layers = model.get("layers") if isinstance(model, Mapping) else None
    cuts = record.plan.get("cuts")
    if record.facts.get("own_model") or not isinstance(layers, int) or not isinstance(cuts, list) or len(cuts) != stages - 1:
        return ["the whole model"] if stages == 1 else [""] * stages
    edges = [0, *cuts, layers + 2]
    return [unit_names(layers + 2, first, last) for first, last in pairwise(edges)]


def _chunks(record: RunRecord, width: int) -> tuple[list[str], int]:
    """The window, cut into chunks; nothing if it is not cut."""
    batch, chunk_steps = record.spec.get("batch"), record.plan.get("chunk_steps")
    steps = batch.get("steps") if isinstance(batch, Mapping) else None
    if not isinstance(steps, int) or not isinstance(chunk_steps, int) or steps < 1 or chunk_steps < 1:
        return [], MARGIN
    many = -(-steps // chunk_steps)
    caption = f"a window of {steps:,} steps in {many:,} chunk{'s' * (many != 1)} of {min(chunk_steps, steps):,}"
    caption += ", which travel through the stages one after the other" if many > 1 else ""
    parts = [f'<text x="{MARGIN}" y="{MARGIN + 12}">{caption}</text>']
    shown = min(many, 64)
    each = (min(width, 760) - 2 * MARGIN) / shown
    for chunk in range(shown):
        shade = 0.45 + 0.55 * (chunk / (shown - 1) if shown > 1 else 1)
        parts.append(
            f'<rect class="chunk" x="{MARGIN + chunk * each:.1f}" y="{MARGIN + 20}" width="{each - 2:.1f}" height="16" rx="2" '
            f'fill-opacity="{shade:.2f}"/>'
        )
        if each >= 26:
            parts.append(f'<text class="in" x="{MARGIN + (chunk + 0.5) * each - 1:.1f}" y="{MARGIN + 32}">{chunk}</text>')
    return parts, MARGIN + 54


def _box(stage: int, names: Sequence[str], seat: Mapping[str, Any] | None, x: int, y: int, *, first: str) -> list[str]:
    who = "" if seat is None else f"rank {seat.get('rank')}"
    host = "" if seat is None or seat.get("host") in (None, "this host") else f"{seat.get('host')}"
    units = names[stage] if stage < len(names) else ""
    return [
        f'<rect class="box" x="{x}" y="{y}" width="{BOX}" height="{TALL}" rx="6"/>',
        f'<text class="strong" x="{x + 10}" y="{y + 18}">{first}</text>',
        f'<text class="soft end" x="{x + BOX - 10}" y="{y + 18}">{escape(who)}</text>',
        f'<text x="{x + 10}" y="{y + 37}">{escape(_short(units, 26))}</text>',
        f'<text class="soft" x="{x + 10}" y="{y + 54}">{escape(_short(host, 26))}</text>',
    ]


def _first(replicas: int, stages: int, stage: int) -> str:
    return f"stage {stage}" if stages > 1 else "all of the model" if replicas > 1 else "one device"


def _arrows(x: int, y: int) -> list[str]:
    """Activations one way, gradients the other."""
    right, left = x + GAP - 5, x + 5
    return [
        f'<path class="there" d="M{left} {y + 22}H{right}m-6 -4l6 4l-6 4"/>',
        f'<path class="back" d="M{right} {y + 42}H{left}m6 -4l-6 4l6 4"/>',
    ]


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
