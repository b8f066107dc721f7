"""Compares predicted with measured step time, once and over a few steps of a run; if they differ much, names the cause. Keeps the step
that was timed task by task, for the report.

Collective, because one step is timed task by task on every worker. It does not affect the results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from carrywave.parallel.world import all_gather_json
from carrywave.plan.predict import Prediction
from carrywave.plan.schedule.schedule import StageTask
from carrywave.plan.show.text import stage_names
from carrywave.plan.simulation import TaskSpan
from carrywave.step.passes.task_clock import TaskClock
from carrywave.step.trainer import Trainer

FIRST, STEPS = 5, 20  # skipped, then timed: first steps are slower (allocation, kernel selection, graph capture)
FAR_OFF = 0.25
TASKS = ("F", "B", "H", "W")
MOST_SPANS = 1000  # of a worker; if there are more, none is kept
MOST_ROWS = 24  # workers whose spans are kept; of the others, only the sums


@dataclass(frozen=True)
class Spent:
    """Seconds of one worker in one step: its tasks, waiting for messages, and everything else (all-reduces, the update)."""

    work: float
    wait: float
    rest: float


class Comparison:
    """Follows the first steps of a run, and reports one line after them."""

    def __init__(self, trainer: Trainer, prediction: Prediction | None, say: Callable[[str], None]) -> None:
        self.trainer, self.prediction, self.say = trainer, prediction, say
        self.first, self.steps = FIRST, STEPS
        self.number = 0  # steps seen
        self.begun = 0.0
        self.seconds = 0.0  # per step, measured
        self.ready = self.done = False
        self.timeline: dict[str, Any] | None = None  # the step that was timed task by task, on rank 0

    def fit_into(self, steps: float) -> None:
        """Follow fewer steps in a run that has only this many left; none if not even one can be timed after the first."""
        self.steps = int(min(STEPS, steps - FIRST - 1))
        self.done = self.steps < 1

    def skip(self, seconds: float) -> None:
        """Exclude time spent on other work."""
        self.begun += seconds

    def before(self) -> None:
        """Call before each step."""
        if self.done:
            return
        self.number += 1
        clock = TaskClock(self.trainer.device)
        if self.number == self.first + 1:
            self.begun = clock.now()
        if self.number == self.first + self.steps + 1:
            self.seconds = (clock.now() - self.begun) / self.steps
            self.ready = True
            if self.trainer.capture is None:  # a captured graph has no tasks to time, and a step without it may not fit in memory
                self.trainer.compute.clock = clock
                self.begun = clock.now()

    def after(self) -> dict[str, float] | None:
        """Call after each step; after the last one that is followed, returns the figures for timing.jsonl."""
        if self.done or not self.ready:
            return None
        self.done = True
        clock, self.trainer.compute.clock = self.trainer.compute.clock, None
        spent: list[Spent] = []
        workers: list[dict[str, Any]] = []
        if clock is not None:
            workers = self._gather(clock, clock.now())
            # Replica by replica, stage by stage.
            spent = [Spent(each["compute"], each["wait"], each["messages"] + each["rest"]) for each in workers]
        predicted = self.prediction
        self.timeline = {"step_seconds": self.seconds, "steps": self.steps, "workers": _laid_side_by_side(workers)}
        if predicted is None:
            return {"step_seconds": self.seconds}
        names = stage_names(predicted, predicted.stages[-1].last)
        lines = predicted.timeline.rows if max(map(len, predicted.timeline.rows)) <= MOST_SPANS else ()
        rows = [[_plain(span.label, span.start, span.end, span.task) for span in row] for row in lines[:MOST_ROWS]]
        self.timeline |= {"predicted": {"step_seconds": predicted.seconds, "bubble": predicted.bubble, "stages": names, "rows": rows}}
        if self.steps == STEPS:  # a mean over fewer is no fair comparison
            self.say(line(predicted, self.seconds, spent))
        return {"step_seconds": self.seconds, "predicted_step_seconds": predicted.seconds}

    def _gather(self, clock: TaskClock, ended: float) -> list[dict[str, Any]]:
        """What every worker did in the step that was timed, by position."""
        mesh, begun = self.trainer.mesh, self.begun
        work, wait, messages = clock.seconds(*TASKS), clock.seconds("wait"), clock.seconds("send")
        shown = mesh.replica * mesh.plan.stages + mesh.stage < MOST_ROWS and len(clock.laps) <= MOST_SPANS
        local = {
            "rank": mesh.world.rank,
            "replica": mesh.replica,
            "stage": mesh.stage,
            "begun": begun,
            "seconds": ended - begun,
            "compute": work,
            "wait": wait,
            "messages": messages,
            "rest": max(0.0, ended - begun - work - wait - messages),
            "spans": [_plain(lap.label, lap.start - begun, lap.end - begun, lap.task) for lap in clock.laps] if shown else [],
        }
        by_rank = all_gather_json(mesh.world, local)
        hosts = mesh.world.hosts or ("",) * mesh.world.size
        return [{**by_rank[rank], "host": hosts[rank]} for rank in mesh.ranks]


def _plain(label: str, start: float, end: float, task: StageTask | None) -> list[Any]:
    """A span as JSON: label, start and end in seconds, chunk, micro-batch."""
    place = [None, None] if task is None else [task.chunk, task.micro_batch]
    return [label, round(start, 7), round(end, 7), *place]


def _laid_side_by_side(workers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The workers on one time axis: those of a host read one clock; every host begins at 0, as clocks of hosts differ."""
    first = {host: min(each["begun"] for each in workers if each["host"] == host) for host in {each["host"] for each in workers}}
    return [{**each, "begun": round(each["begun"] - first[each["host"]], 7)} for each in workers]


def line(prediction: Prediction, measured: float, spent: Sequence[Spent]) -> str:
    """The comparison in one line."""
    off = measured / prediction.seconds - 1
    text = f"a step takes {1e3 * measured:.3g} ms, predicted {1e3 * prediction.seconds:.3g} ms ({off:+.0%})"
    return text if abs(off) <= FAR_OFF or not spent else f"{text}: {cause(prediction, spent)}"


def cause(prediction: Prediction, spent: Sequence[Spent]) -> str:
    """What deviates most: the work of a stage, a link, or what follows the tasks."""
    stages = len(prediction.stages)
    expected = [_expected(row) for row in prediction.timeline.rows]
    # Replicas wait for the slowest of them.
    measured = [
        Spent(*(max(getattr(spent[rank], name) for rank in range(stage, len(spent), stages)) for name in ("work", "wait", "rest")))
        for stage in range(stages)
    ]
    names = stage_names(prediction, prediction.stages[-1].last)
    work = max(range(stages), key=lambda s: abs(measured[s].work - expected[s].work))
    rest = max(range(stages), key=lambda s: abs(measured[s].rest - expected[s].rest))
    of_work, of_rest = (abs(measured[work].work - expected[work].work), abs(measured[rest].rest - expected[rest].rest))
    wait = max(range(stages), key=lambda s: measured[s].wait - expected[s].wait)
    if stages > 1 and measured[wait].wait - expected[wait].wait > max(of_work, of_rest):
        other = wait - 1 if wait else 1
        return (
            f"stage {wait} waits {1e3 * measured[wait].wait:.3g} ms for messages, predicted {1e3 * expected[wait].wait:.3g} ms, "
            f"and no stage computes that much longer: check the link between stages {min(wait, other)} and {max(wait, other)}"
        )
    if of_work >= of_rest:
        who = f"stage {work} ({names[work]})" if stages > 1 else "the model"
        return f"{who} computes for {1e3 * measured[work].work:.3g} ms, predicted {1e3 * expected[work].work:.3g} ms"
    what = "sums over workers and the update take" if len(spent) > 1 else "the update takes"
    return f"{what} {1e3 * measured[rest].rest:.3g} ms, predicted {1e3 * expected[rest].rest:.3g} ms"


def _expected(row: Sequence[TaskSpan]) -> Spent:
    """The predicted seconds of a stage."""
    work = sum(span.end - span.start for span in row if span.label in TASKS)
    return Spent(work, _waited(row), sum(span.end - span.start for span in row) - work)


def _waited(row: Sequence[TaskSpan]) -> float:
    """The time a stage is idle before the end of its last task."""
    tasks = [span for span in row if span.label in TASKS]
    return max((span.end for span in tasks), default=0.0) - sum(span.end - span.start for span in tasks)
