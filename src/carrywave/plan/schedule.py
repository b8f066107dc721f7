"""A schedule is data: for each stage the tuple of its tasks, in order. The runtime interprets it and decides nothing.

Printed with `show`, a schedule is a picture, one row a stage, one column a moment at which every task takes one unit of
time: `F2` is the forward of time chunk 2, `B2` its backward, `.` a wait. A second slice of lanes adds a letter: `F2b`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from carrywave.errors import PlanError

Phase = Literal["F", "B"]


class Task(NamedTuple):
    """One forward or backward of one time chunk of one slice of lanes on one stage."""

    phase: Phase
    stage: int
    chunk: int
    slice: int = 0


@dataclass(frozen=True)
class Schedule:
    """The tasks of each stage, in the order in which that stage carries them out."""

    stages: tuple[tuple[Task, ...], ...]
    chunks: int
    slices: int


def serial(chunks: int = 1, slices: int = 1, *, backward: bool = True) -> Schedule:
    """One stage: each slice forward through its chunks, then back through them in reverse, before the next slice starts."""
    if chunks < 1 or slices < 1:
        raise PlanError(f"a schedule needs at least one chunk and one slice, got {chunks} and {slices}; use 1 or more")
    tasks: list[Task] = []
    for part in range(slices):
        tasks += [Task("F", 0, chunk, part) for chunk in range(chunks)]
        if backward:
            tasks += [Task("B", 0, chunk, part) for chunk in reversed(range(chunks))]
    return Schedule((tuple(tasks),), chunks, slices)


def needs(task: Task, schedule: Schedule) -> list[Task]:
    """The tasks whose results this one reads: the stage before, the chunk before; backward, the stage and chunk after."""
    last_stage, last_chunk = len(schedule.stages) - 1, schedule.chunks - 1
    if task.phase == "F":
        below = [task._replace(stage=task.stage - 1)] if task.stage else []
        return below + ([task._replace(chunk=task.chunk - 1)] if task.chunk else [])
    wanted = [task._replace(phase="F")]
    if task.stage < last_stage:
        wanted.append(task._replace(stage=task.stage + 1))
    if task.chunk < last_chunk:
        wanted.append(task._replace(chunk=task.chunk + 1))
    return wanted


def place(schedule: Schedule) -> dict[Task, int]:
    """The moment at which each task starts when every task takes one unit of time; refuses a schedule that cannot run."""
    known = {task for tasks in schedule.stages for task in tasks}
    moments: dict[Task, int] = {}
    nexts = [0] * len(schedule.stages)
    ready = [0] * len(schedule.stages)
    while len(moments) < len(known):
        moved = False
        for stage, tasks in enumerate(schedule.stages):
            while nexts[stage] < len(tasks):
                task = tasks[nexts[stage]]
                before = needs(task, schedule)
                missing = [need for need in before if need not in known]
                if missing:
                    raise PlanError(
                        f"{name(task, schedule)} on stage {stage} needs {name(missing[0], schedule)}, which no stage runs; add it"
                    )
                if any(need not in moments for need in before):
                    break
                moments[task] = max([ready[stage], *(moments[need] + 1 for need in before)])
                ready[stage] = moments[task] + 1
                nexts[stage] += 1
                moved = True
        if not moved:
            stuck = [name(tasks[nexts[stage]], schedule) for stage, tasks in enumerate(schedule.stages) if nexts[stage] < len(tasks)]
            raise PlanError(f"the schedule cannot go on: {', '.join(stuck)} wait for each other; reorder them")
    return moments


def name(task: Task, schedule: Schedule) -> str:
    """A task as it stands in the picture."""
    return f"{task.phase}{task.chunk}" + (chr(ord("a") + task.slice % 26) if schedule.slices > 1 else "")


def show(schedule: Schedule) -> str:
    """The schedule as a picture, one row a stage."""
    moments = place(schedule)
    width = max((len(name(task, schedule)) for task in moments), default=1)
    end = max(moments.values(), default=-1) + 1
    rows = []
    for tasks in schedule.stages:
        row = ["."] * end
        for task in tasks:
            row[moments[task]] = name(task, schedule)
        rows.append(" ".join(cell.ljust(width) for cell in row).rstrip())
    return "\n".join(rows)
