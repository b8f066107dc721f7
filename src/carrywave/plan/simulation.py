"""Simulates a schedule with given task times and message times: when each task starts and ends, how long stages wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from carrywave.plan.schedule.schedule import Schedule, StageTask, start_times_of


class TaskSpan(NamedTuple):
    """An interval of a worker's time: a task, `reduce` (gradient all-reduce) or `update`."""

    label: str
    start: float
    end: float
    task: StageTask | None = None


@dataclass(frozen=True)
class Timeline:
    """What each stage does when; all replicas are the same."""

    rows: tuple[tuple[TaskSpan, ...], ...]

    @property
    def seconds(self) -> float:
        """Time from the start to the end of the last stage to finish."""
        return max((row[-1].end for row in self.rows if row), default=0.0)

    @property
    def ends(self) -> tuple[float, ...]:
        """When each stage finishes."""
        return tuple(row[-1].end if row else 0.0 for row in self.rows)

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds each stage spends working, not counting `reduce`."""
        return tuple(sum(span.end - span.start for span in row if span.label != "reduce") for row in self.rows)

    @property
    def bubble(self) -> float:
        """The fraction of the stages' time that is not work."""
        return 1 - sum(self.busy) / (self.seconds * len(self.rows)) if self.seconds else 0.0

    def then(self, label: str, spans: list[tuple[float, float]]) -> Timeline:
        """This timeline with one more span on each stage; empty spans are omitted."""
        rows = [(*row, TaskSpan(label, start, end)) if end > start else row for row, (start, end) in zip(self.rows, spans, strict=True)]
        return replace(self, rows=tuple(rows))


def simulate(schedule: Schedule, run: Callable[[StageTask], float], message: Callable[[StageTask], float]) -> Timeline:
    """The timeline of a schedule: `run` is what a task takes, `message` what its output takes to another stage."""
    starts = start_times_of(schedule, run, message)
    rows = (tuple(TaskSpan(task.phase, starts[task], starts[task] + run(task), task) for task in tasks) for tasks in schedule.stages)
    return Timeline(tuple(rows))
