"""Draws one step of a pipeline on GPUs: its tasks as the device timed them, above those that the planner predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from carrywave.plan.cost.simulation import TaskSpan, Timeline
from carrywave.plan.plan import Plan
from carrywave.plan.schedule.schedule import StageTask
from carrywave.plan.search.predictor import Prediction
from carrywave.plan.show.svg import Panel, draw
from carrywave.plan.show.text import unit_names

TASKS = ("F", "B", "H", "W")  # laps of other labels are waits and sends, in which a stage does nothing

Lapped = Sequence[Sequence[Any]]  # of one worker: label, task, start and end in seconds on the device's clock


def drawn(title: str, plan: Plan, units: int, laps: Sequence[Lapped], prediction: Prediction | None) -> str:
    """The picture as SVG. `laps` are those of all workers, by rank; the stages of the first replica are shown."""
    names = [unit_names(units, first, last) for first, last in pairwise(plan.edges(units))]
    shown = [("measured", timeline_of(laps[: plan.stages]))]
    if prediction is not None:
        rows = tuple(tuple(span for span in row if span.label in TASKS) for row in prediction.timeline.rows)
        shown.append(("predicted", replace(prediction.timeline, rows=rows)))
    panels = [Panel(f"{what}: {1e3 * line.seconds:.2f} ms, stages {line.bubble:.0%} idle", line, names) for what, line in shown]
    return draw(panels, title)


def timeline_of(laps: Sequence[Lapped]) -> Timeline:
    """The tasks of each worker; time begins with the first of them."""
    rows = [[TaskSpan(label, start, end, StageTask(*task)) for label, task, start, end in lapped if label in TASKS] for lapped in laps]
    first = min(span.start for row in rows for span in row)
    moved = [[span._replace(start=span.start - first, end=span.end - first) for span in row] for row in rows]
    return Timeline(tuple(tuple(sorted(row, key=lambda span: span.start)) for row in moved), (0,) * len(moved))
