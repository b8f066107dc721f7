"""A schedule is data: for each stage, the tuple of its tasks in order. The runtime interprets it and makes no decisions.

A chunk is a part of the window's steps. A micro-batch is a part of the lanes, or a whole batch of an accumulation group, so micro-batches
may differ in their number of chunks. `show` prints a schedule as a picture with one row per stage and one column per unit of
time, every task taking one unit: `F2` is the forward of chunk 2, `B2` its backward, `.` idle time. With several micro-batches a
letter is added: `F2b`. If the head is shared, `H2` is its forward and backward for chunk 2, on whichever stage has time for it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple

from carrywave.errors import PlanError

Phase = Literal["F", "B", "H"]

# Task durations assumed when a schedule is built. They need not be measured: an order made for a head of 2 ends within a few
# percent of the optimum for any head from 0.5 to 6.
FORWARD, BACKWARD, HEAD = 1, 2, 2


class StageTask(NamedTuple):
    """The forward (F) or backward (B) of one chunk of one micro-batch on one stage; or, for a shared head, its forward and backward (H)."""

    phase: Phase
    stage: int
    chunk: int
    micro_batch: int = 0


@dataclass(frozen=True)
class Schedule:
    """The tasks of each stage, in execution order."""

    stages: tuple[tuple[StageTask, ...], ...]
    chunks: tuple[int, ...]  # number of chunks in each micro-batch
    in_turn: bool = False  # a stage passes a micro-batch on only after finishing all of its chunks

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


def serial(chunks: int | Sequence[int] = 1, micro_batches: int = 1, *, backward: bool = True) -> Schedule:
    """One stage: each micro-batch runs forward through its chunks, then backward in reverse order, before the next micro-batch starts."""
    counts = _counts(1, chunks, micro_batches)
    return Schedule((_one_by_one(0, counts, backward),), counts)


def sequential(stages: int, chunks: int | Sequence[int] = 1, micro_batches: int = 1, *, backward: bool = True) -> Schedule:
    """Naive model parallelism: stages run one after the other, a whole micro-batch at a time, so only one works at any moment."""
    counts = _counts(stages, chunks, micro_batches)
    if not backward and len(counts) > 1:
        raise PlanError(
            "a sequential schedule without backward must have one micro-batch, since no backward would hold up the next; "
            "use micro_batches=1"
        )
    return Schedule(tuple(_one_by_one(stage, counts, backward) for stage in range(stages)), counts, in_turn=True)


def gpipe(stages: int, micro_batches: int, *, backward: bool = True) -> Schedule:
    """GPipe: micro-batches are pipelined without cutting time; all forwards, then all backwards in reverse order."""
    counts = _counts(stages, 1, micro_batches)
    rows = []
    for stage in range(stages):
        row = [StageTask("F", stage, 0, part) for part in range(micro_batches)]
        rows.append((*row, *(task._replace(phase="B") for task in reversed(row))) if backward else tuple(row))
    return Schedule(tuple(rows), counts)


def wavefront(
    stages: int, chunks: int | Sequence[int], micro_batches: int = 1, *, backward: bool = True, share_head: bool = False, head: float = HEAD
) -> Schedule:
    """Chunks are pipelined: stages work on different chunks, and a micro-batch's backward starts once its last chunk has passed the
    last stage. Several micro-batches interleave one forward, one backward (1F1B), so a stage holds little more than one micro-batch.

    `share_head`: the head's work on a chunk (H) goes to a stage that would otherwise be idle, so that the last stage has no
    more to do than the others; `head` is its duration relative to a forward. It has no effect with one stage, or in evaluation,
    where there is no idle time to fill.
    """
    counts = _counts(stages, chunks, micro_batches)
    if not backward:
        return Schedule(
            tuple(tuple(StageTask("F", stage, chunk, part) for chunk, part in _forwards(counts)) for stage in range(stages)), counts
        )
    return Schedule(_greedy(stages, counts, head if share_head and stages > 1 else None), counts)


def _greedy(stages: int, counts: tuple[int, ...], head: float | None) -> tuple[tuple[StageTask, ...], ...]:
    """Each stage's task order from a greedy simulation in which a forward takes 1 and a backward 2. A stage prefers a backward
    if one is ready, then a forward unless that would exceed its limit of chunks in flight, then a head (None: not shared).

    Among heads, it takes the one whose gradient is needed first. The last stage chooses first, so that the head all backwards wait
    for needs no message; then the stages from the first on, as the earliest ones wait longest for a backward.
    """
    forwards = _forwards(counts)
    backwards = [(chunk, part) for part, count in enumerate(counts) for chunk in reversed(range(count))]
    # The last stage may start the n-th backward once whole[n] forwards are done: all those up to the end of its micro-batch.
    whole = [end for end, count in zip(accumulate(counts), counts, strict=True) for _ in range(count)]
    last, total = stages - 1, len(forwards)
    limits = [max(counts) + extra(max(counts), last - stage) for stage in range(stages)]
    rows: list[list[StageTask]] = [[] for _ in range(stages)]
    begun = [[0, 0] for _ in range(stages)]  # counts of forwards, backwards
    done = [[0, 0] for _ in range(stages)]
    ends: list[float] = [0] * stages  # end time of each stage's current task
    turns = {place: turn for turn, place in enumerate(backwards)}  # the order in which the heads' gradients are needed
    unscored: set[int] = set()  # turns of heads that are ready and not started
    scored: dict[int, float] = {}  # end time of each turn's head
    now: float = 0
    while done[0][1] < total:
        for stage in range(stages):
            if ends[stage] <= now:
                if stage == last and head is not None:
                    unscored |= {turns[place] for place in forwards[done[last][0] : begun[last][0]]}
                done[stage] = begun[stage].copy()
        for stage in (last, *range(last)):
            if ends[stage] > now:
                continue
            forward, back = begun[stage]
            if stage == last:
                returns = back < total and done[last][0] >= whole[back] and (head is None or scored.get(back, math.inf) <= now)
            else:
                returns = back < total and done[stage + 1][1] > back
            if returns:
                rows[stage].append(StageTask("B", stage, *backwards[back]))
                begun[stage][1] += 1
                ends[stage] = now + BACKWARD
            elif forward < total and forward - back < limits[stage] and (stage == 0 or done[stage - 1][0] > forward):
                rows[stage].append(StageTask("F", stage, *forwards[forward]))
                begun[stage][0] += 1
                ends[stage] = now + FORWARD
            elif unscored and head is not None:
                turn = min(unscored)
                unscored.remove(turn)
                rows[stage].append(StageTask("H", stage, *backwards[turn]))
                scored[turn] = ends[stage] = now + head
        now = min((end for end in ends if end > now), default=now)
    return tuple(tuple(row) for row in rows)


def extra(chunks: int, distance: int) -> int:
    """How many chunks beyond one micro-batch a stage may hold when it is `distance` stages before the last.

    Between the last forward of a micro-batch and its first backward, such a stage has 3 * distance units of time to fill: for each
    later stage, one on the way forward and two on the way back. Forwards of later micro-batches fill them. If these are shorter than
    that, their backwards take part of the time: with one chunk each, 3 units hold one forward and one backward. With these
    limits, equal micro-batches finish 3 * (stages - 1) units after the time one stage needs for its own tasks, which is optimal.
    """
    return min(3, chunks) * distance


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


def _forwards(counts: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(chunk, part) for part, count in enumerate(counts) for chunk in range(count)]


def _one_by_one(stage: int, counts: tuple[int, ...], backward: bool) -> tuple[StageTask, ...]:
    tasks: list[StageTask] = []
    for part, count in enumerate(counts):
        row = [StageTask("F", stage, chunk, part) for chunk in range(count)]
        tasks += row
        if backward:
            tasks += [task._replace(phase="B") for task in reversed(row)]
    return tuple(tasks)


def source(task: StageTask, schedule: Schedule) -> StageTask | None:
    """The task on another stage whose message this task reads; None at the ends of the pipeline."""
    phase, stage, chunk, part = task
    last = len(schedule.stages) - 1
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
    if phase == "H":
        return StageTask("B", last, chunk, part) if stage < last else None
    if phase == "F" and stage == last:
        scorer = schedule.scorers.get((chunk, part), last)
        return StageTask("H", scorer, chunk, part) if scorer < last else None
    stage += 1 if phase == "F" else -1
    return StageTask(phase, stage, chunk, part) if 0 <= stage <= last else None


def own_needs(task: StageTask, schedule: Schedule) -> list[StageTask]:
    """Dependencies on the same stage: a forward needs the previous chunk; a backward its forward, its head and the next chunk."""
    phase, stage, chunk, part = task
    last = len(schedule.stages) - 1
    if phase == "F":
        return [StageTask("F", stage, chunk - 1, part)] if chunk else []
    wanted = [StageTask("F", stage, chunk, part)]
    if phase == "H":
        return wanted if stage == last else []
    if stage == last and schedule.scorers.get((chunk, part)) == last:
        wanted.append(StageTask("H", stage, chunk, part))
    return [*wanted, StageTask("B", stage, chunk + 1, part)] if chunk < schedule.chunks[part] - 1 else wanted


def needs(task: StageTask, schedule: Schedule) -> list[StageTask]:
    """All tasks that must finish before this one starts, on its own stage and on another."""
    other = source(task, schedule)
    if other is None:
        return own_needs(task, schedule)
    if schedule.in_turn:  # wait for the last chunk the neighbour computes: it passes on whole micro-batches
        other = other._replace(chunk=schedule.chunks[task.micro_batch] - 1 if task.phase == "F" else 0)
    return [other, *own_needs(task, schedule)]


def check(schedule: Schedule) -> None:
    """Reject a schedule in which a task is missing, duplicated or on the wrong stage."""
    if not schedule.stages or not schedule.chunks:
        raise PlanError("a schedule without stages or micro-batches has nothing to run; pass at least one of each")
    phases: tuple[Phase, ...] = ("F", "B") if schedule.backward else ("F",)
    heads: list[StageTask] = []
    for stage, tasks in enumerate(schedule.stages):
        found = Counter(tasks)
        for phase in phases:
            for chunk, part in _forwards(schedule.chunks):
                task = StageTask(phase, stage, chunk, part)
                if (times := found.pop(task, 0)) != 1:
                    fact = "is missing from" if times == 0 else f"appears {times} times on"
                    raise PlanError(f"{name(task, schedule)} {fact} stage {stage}; a stage must run each of its tasks once")
        for task in found:
            if task.phase != "H" or task.stage != stage or not schedule.backward:
                raise PlanError(f"{name(task, schedule)} of stage {task.stage} does not belong on stage {stage}; remove it")
        heads += found.elements()
    _check_heads(schedule, heads)


def _check_heads(schedule: Schedule, heads: Sequence[StageTask]) -> None:
    """Check that a shared head scores each chunk exactly once, on any stage."""
    found = Counter((task.chunk, task.micro_batch) for task in heads)
    last = len(schedule.stages) - 1
    for place in _forwards(schedule.chunks) if heads else []:
        if (times := found.pop(place, 0)) != 1:
            fact = "is missing from" if times == 0 else f"appears {times} times in"
            raise PlanError(f"{name(StageTask('H', last, *place), schedule)} {fact} the schedule; the head must run once on each chunk")
    for place in found:
        raise PlanError(f"{name(StageTask('H', last, *place), schedule)} scores a chunk that does not exist; remove it")


def place(schedule: Schedule, *, forward: float = 1, backward: float = 1, head: float = 1) -> dict[StageTask, float]:
    """Start time of each task, given task durations and free messages; rejects a schedule that would deadlock."""
    check(schedule)
    seconds = {"F": forward, "B": backward, "H": head}
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
                moments[task] = max([ready[stage], *(ends[need] for need in before)])
                ready[stage] = ends[task] = moments[task] + seconds[task.phase]
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


def peak(schedule: Schedule) -> tuple[int, ...]:
    """The peak number of chunks in flight on each stage, from the start of a forward to the end of its backward."""
    if not schedule.backward:
        return (1,) * len(schedule.stages)  # only the current chunk: nothing is kept for a backward
    return tuple(max(accumulate({"F": 1, "B": -1, "H": 0}[task.phase] for task in tasks)) for tasks in schedule.stages)


def bubble(schedule: Schedule, *, forward: float = FORWARD, backward: float = BACKWARD, head: float = HEAD) -> float:
    """The fraction of the stages' time spent idle, given task durations and free messages."""
    seconds = {"F": forward, "B": backward, "H": head}
    moments = place(schedule, forward=forward, backward=backward, head=head)
    end = max(moment + seconds[task.phase] for task, moment in moments.items())
    return 1 - sum(seconds[task.phase] for task in moments) / (end * len(schedule.stages))


def name(task: StageTask, schedule: Schedule) -> str:
    """A task as the picture shows it."""
    return f"{task.phase}{task.chunk}" + (_letters(task.micro_batch) if schedule.micro_batches > 1 else "")


def _letters(part: int) -> str:
    """a to z, then aa, ab, …, like spreadsheet columns."""
    letter = chr(ord("a") + part % 26)
    return _letters(part // 26 - 1) + letter if part >= 26 else letter


def show(schedule: Schedule) -> str:
    """The schedule as a picture, one row per stage."""
    moments = {task: int(moment) for task, moment in place(schedule).items()}
    width = max(len(name(task, schedule)) for task in moments)
    end = max(moments.values()) + 1
    rows = []
    for tasks in schedule.stages:
        row = ["."] * end
        for task in tasks:
            row[moments[task]] = name(task, schedule)
        rows.append(" ".join(cell.ljust(width) for cell in row).rstrip())
    return "\n".join(rows)
