"""A schedule is data: for each stage, the tuple of its tasks in order. The runtime interprets it and makes no decisions.

A chunk is a part of the window's steps. A micro-batch is a part of the lanes, or a whole batch of an accumulation group, so micro-batches
may differ in their number of chunks. `show` prints a schedule as a picture with one row per stage and one column per unit of
time, every task taking one unit: `F2` is the forward of chunk 2, `B2` its backward, `.` idle time. With several micro-batches a
letter is added: `F2b`. If the head is shared, `H2` is its forward and backward for chunk 2, on whichever stage has time for it.

A backward has two parts. The gradient of the input is what the previous chunk and the previous stage wait for; nobody waits for the
gradients of the weights. If a micro-batch has several chunks, `B2` is the first part alone, and the second is one task for all of its
chunks: `W`, or `Wb`, after the micro-batch's last backward on that stage and wherever the stage has time for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from carrywave.errors import PlanError
from carrywave.plan.schedule.wavefront_order import BACKWARD, FORWARD, HEAD, WEIGHTS, forwards_of, wavefront_order

Phase = Literal["F", "B", "H", "W"]


class StageTask(NamedTuple):
    """The forward (F) or backward (B) of one chunk of one micro-batch on one stage; for a shared head, its forward and backward (H); or the
    weight gradients of all chunks of the micro-batch (W, whose chunk is 0).
    """

    phase: Phase
    stage: int
    chunk: int
    micro_batch: int = 0


@dataclass(frozen=True)
class Schedule:
    """The tasks of each stage, in execution order."""

    stages: tuple[tuple[StageTask, ...], ...]
    chunks: tuple[int, ...]  # number of chunks in each micro-batch

    @property
    def micro_batches(self) -> int:
        return len(self.chunks)

    @property
    def backward(self) -> bool:
        """True if there are backward tasks; evaluation has none."""
        return any(task.phase == "B" for tasks in self.stages for task in tasks)

    @cached_property
    def scorers(self) -> dict[tuple[int, int], int]:
        """Maps (chunk, micro-batch) to the stage that runs the shared head on it; empty if not shared: the last stage runs it for all."""
        return {(task.chunk, task.micro_batch): task.stage for tasks in self.stages for task in tasks if task.phase == "H"}

    @cached_property
    def deferred(self) -> frozenset[int]:
        """The micro-batches whose weight gradients are a task of their own (W); those of the others are part of each backward."""
        return frozenset(task.micro_batch for tasks in self.stages for task in tasks if task.phase == "W")


def serial(chunks: int | Sequence[int] = 1, micro_batches: int = 1, *, backward: bool = True, defer_weights: bool = True) -> Schedule:
    """One stage: each micro-batch runs forward through its chunks, then backward in reverse order, before the next micro-batch starts.

    `defer_weights`: the weight gradients of a micro-batch with several chunks are a task of their own (W), here and in the wavefront.
    """
    counts = _counts(1, chunks, micro_batches)
    tasks: list[StageTask] = []
    for part, count in enumerate(counts):
        row = [StageTask("F", 0, chunk, part) for chunk in range(count)]
        tasks += row
        if backward:
            tasks += [task._replace(phase="B") for task in reversed(row)]
        if backward and defer_weights and count > 1:
            tasks.append(StageTask("W", 0, 0, part))
    return Schedule((tuple(tasks),), counts)


def gpipe(stages: int, micro_batches: int, *, backward: bool = True) -> Schedule:
    """GPipe: micro-batches are pipelined without cutting time; all forwards, then all backwards in reverse order. With one micro-batch
    this is naive model parallelism: stages run one after the other, so that only one works at any moment.
    """
    counts = _counts(stages, 1, micro_batches)
    rows = []
    for stage in range(stages):
        row = [StageTask("F", stage, 0, part) for part in range(micro_batches)]
        rows.append((*row, *(task._replace(phase="B") for task in reversed(row))) if backward else tuple(row))
    return Schedule(tuple(rows), counts)


def wavefront(
    stages: int,
    chunks: int | Sequence[int],
    micro_batches: int = 1,
    *,
    backward: bool = True,
    share_head: bool = False,
    head: float = HEAD,
    defer_weights: bool = True,
) -> Schedule:
    """Chunks are pipelined: stages work on different chunks, and a micro-batch's backward starts once its last chunk has passed the
    last stage. Several micro-batches interleave one forward, one backward (1F1B), so a stage holds little more than one micro-batch.
    Weight gradients (W) go where a stage would otherwise be idle.

    `share_head`: the head's work on a chunk (H) goes to a stage that would otherwise be idle, so that the last stage has no
    more to do than the others; `head` is its duration relative to a forward. It has no effect with one stage, or in evaluation,
    where there is no idle time to fill.
    """
    counts = _counts(stages, chunks, micro_batches)
    if not backward:
        return Schedule(
            tuple(tuple(StageTask("F", stage, chunk, part) for chunk, part in forwards_of(counts)) for stage in range(stages)), counts
        )
    rows = wavefront_order(stages, counts, head if share_head and stages > 1 else None, defer_weights=defer_weights)
    return Schedule(tuple(tuple(StageTask(phase, stage, *position) for phase, *position in row) for stage, row in enumerate(rows)), counts)


def _counts(stages: int, chunks: int | Sequence[int], micro_batches: int) -> tuple[int, ...]:
    """The number of chunks in each micro-batch, given as one number for all micro-batches or one for each."""
    counts = (chunks,) * micro_batches if isinstance(chunks, int) else tuple(chunks)
    if stages < 1:
        raise PlanError(f"a schedule needs at least one stage, got {stages}; use 1 or more")
    if not counts or min(counts) < 1:
        raise PlanError(f"a schedule needs at least one chunk and one micro-batch, got {chunks} and {micro_batches}; use 1 or more")
    if micro_batches not in (1, len(counts)):
        raise PlanError(f"{len(counts)} numbers of chunks do not match {micro_batches} micro-batches; omit micro_batches")
    return counts


def source(task: StageTask, schedule: Schedule) -> StageTask | None:
    """The task on another stage whose message this task reads; None at the ends of the pipeline."""
    phase, stage, chunk, part = task
    last = len(schedule.stages) - 1
    if phase == "W":
        return None
    if phase == "H":
        return StageTask("F", last, chunk, part) if stage < last else None
    if phase == "B" and stage == last:
        scorer = schedule.scorers.get((chunk, part), last)
        return StageTask("H", scorer, chunk, part) if scorer < last else None
    stage += -1 if phase == "F" else 1
    return StageTask(phase, stage, chunk, part) if 0 <= stage <= last else None


def reader(task: StageTask, schedule: Schedule) -> StageTask | None:
    """The task on another stage that reads this task's output; None at the ends of the pipeline."""
    phase, stage, chunk, part = task
    last = len(schedule.stages) - 1
    if phase == "W":
        return None
    if phase == "H":
        return StageTask("B", last, chunk, part) if stage < last else None
    if phase == "F" and stage == last:
        scorer = schedule.scorers.get((chunk, part), last)
        return StageTask("H", scorer, chunk, part) if scorer < last else None
    stage += 1 if phase == "F" else -1
    return StageTask(phase, stage, chunk, part) if 0 <= stage <= last else None


def needs_on_stage(task: StageTask, schedule: Schedule) -> list[StageTask]:
    """Dependencies on the same stage: a forward needs the previous chunk; a backward its forward, its head and the next chunk; weight
    gradients the last backward of their micro-batch, that of its first chunk.
    """
    phase, stage, chunk, part = task
    last = len(schedule.stages) - 1
    if phase == "F":
        return [StageTask("F", stage, chunk - 1, part)] if chunk else []
    if phase == "W":
        return [StageTask("B", stage, 0, part)]
    wanted = [StageTask("F", stage, chunk, part)]
    if phase == "H":
        return wanted if stage == last else []
    if stage == last and schedule.scorers.get((chunk, part)) == last:
        wanted.append(StageTask("H", stage, chunk, part))
    return [*wanted, StageTask("B", stage, chunk + 1, part)] if chunk < schedule.chunks[part] - 1 else wanted


def needs(task: StageTask, schedule: Schedule) -> list[StageTask]:
    """All tasks that must finish before this one starts, on its own stage and on another."""
    other = source(task, schedule)
    return [*([] if other is None else [other]), *needs_on_stage(task, schedule)]


def check(schedule: Schedule) -> None:
    """Reject a schedule in which a task is missing, duplicated or on the wrong stage."""
    positions, last = forwards_of(schedule.chunks), len(schedule.stages) - 1
    phases: tuple[Phase, ...] = ("F", "B") if schedule.backward else ("F",)
    for stage, tasks in enumerate(schedule.stages):
        wanted = Counter(StageTask(phase, stage, *position) for phase in phases for position in positions)
        wanted.update(StageTask("W", stage, 0, part) for part in range(schedule.micro_batches) if part in schedule.deferred)
        _compare(Counter(task for task in tasks if task.phase != "H" or task.stage != stage), wanted, f"on stage {stage}", schedule)
    # A shared head scores each chunk once, on any stage.
    heads = Counter(StageTask("H", last, task.chunk, task.micro_batch) for tasks in schedule.stages for task in tasks if task.phase == "H")
    scored = positions if heads and schedule.backward else []
    _compare(heads, Counter(StageTask("H", last, *position) for position in scored), "in the schedule", schedule)


def _compare(found: Counter[StageTask], wanted: Counter[StageTask], where: str, schedule: Schedule) -> None:
    for task in [*wanted, *found]:
        if found[task] != wanted[task]:
            raise PlanError(
                f"{name(task, schedule)} is {found[task]} times {where}, not {wanted[task]}; a stage runs each of its tasks once"
            )


def durations(
    schedule: Schedule, *, forward: float = FORWARD, backward: float = BACKWARD, head: float = HEAD, weights: float = WEIGHTS
) -> Callable[[StageTask], float]:
    """How long each task of a schedule takes, given what a chunk takes: `backward` is its whole backward, including `weights`, its weight
    gradients, which if deferred are left out of the backward and added up over the chunks of the micro-batch.
    """

    def seconds(task: StageTask) -> float:
        match task.phase:
            case "F":
                return forward
            case "B":
                return backward - weights if task.micro_batch in schedule.deferred else backward
            case "H":
                return head
            case "W":
                return weights * schedule.chunks[task.micro_batch]

    return seconds


def start_times(schedule: Schedule, **times: float) -> dict[StageTask, float]:
    """Start time of each task, with the times of `durations` and free messages; rejects a schedule that would deadlock."""
    return start_times_of(schedule, durations(schedule, **times))


def start_times_of(
    schedule: Schedule, seconds: Callable[[StageTask], float], message: Callable[[StageTask], float] = lambda task: 0.0
) -> dict[StageTask, float]:
    """Start time of each task, given what tasks take, and what the output of each takes to another stage."""
    check(schedule)
    ends: dict[StageTask, float] = {}
    moments: dict[StageTask, float] = {}
    nexts = [0] * len(schedule.stages)
    ready: list[float] = [0] * len(schedule.stages)
    moved = True
    while moved:
        moved = False
        for stage, tasks in enumerate(schedule.stages):
            while nexts[stage] < len(tasks):
                task = tasks[nexts[stage]]
                before = needs(task, schedule)
                if any(need not in ends for need in before):
                    break
                moments[task] = max([ready[stage], *(ends[need] + (message(need) if need.stage != stage else 0.0) for need in before)])
                ready[stage] = ends[task] = moments[task] + seconds(task)
                nexts[stage] += 1
                moved = True
    stuck = [
        f"{name(tasks[at], schedule)} on stage {stage}"
        for stage, (tasks, at) in enumerate(zip(schedule.stages, nexts, strict=True))
        if at < len(tasks)
    ]
    if stuck:
        raise PlanError(
            f"the schedule deadlocks: {', '.join(stuck)} wait{'s' if len(stuck) == 1 else ''} for later tasks; reorder the tasks"
        )
    return moments


def bubble(schedule: Schedule, **times: float) -> float:
    """The fraction of the stages' time spent idle, with the times of `durations` and free messages."""
    seconds = durations(schedule, **times)
    moments = start_times_of(schedule, seconds)
    end = max(moment + seconds(task) for task, moment in moments.items())
    return 1 - sum(map(seconds, moments)) / (end * len(schedule.stages))


def name(task: StageTask, schedule: Schedule) -> str:
    """A task as the picture shows it."""
    chunk = "" if task.phase == "W" and task.chunk == 0 else task.chunk
    return f"{task.phase}{chunk}" + (_letters(task.micro_batch) if schedule.micro_batches > 1 else "")


def _letters(part: int) -> str:
    """a to z, then aa, ab, …, like spreadsheet columns."""
    letter = chr(ord("a") + part % 26)
    return _letters(part // 26 - 1) + letter if part >= 26 else letter


def show(schedule: Schedule) -> str:
    """The schedule as a picture, one row per stage."""
    moments = {task: int(moment) for task, moment in start_times_of(schedule, lambda task: 1).items()}
    width = max(len(name(task, schedule)) for task in moments)
    end = max(moments.values()) + 1
    rows = []
    for tasks in schedule.stages:
        row = ["."] * end
        for task in tasks:
            row[moments[task]] = name(task, schedule)
        rows.append(" ".join(cell.ljust(width) for cell in row).rstrip())
    return "\n".join(rows)
