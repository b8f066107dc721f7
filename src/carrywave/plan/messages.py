"""Puts the messages between stages into a schedule, and proves that the result cannot hang.

Every edge between neighbouring stages has a channel for each direction: activations up, gradients down. Messages on a channel
match by order alone: the i-th send meets the i-th receive. `prove` runs a program under the strictest rules that we claim to
work under; a transport that buffers, or sends in the background, only loosens them. A stage takes its steps strictly in order;
a receive is posted and never blocks; a send blocks until its receive is posted; a run blocks until its receive has met its send.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, NamedTuple

from carrywave.errors import PlanError
from carrywave.plan.schedule import Phase, Schedule, Task, check, name, own_needs, place


class Step(NamedTuple):
    """Post the receive of what `task` reads from its neighbour, run it, or send what it gives its neighbour."""

    kind: Literal["receive", "run", "send"]
    task: Task


@dataclass(frozen=True)
class Program:
    """A schedule with its messages: the steps of each stage, in order."""

    schedule: Schedule
    stages: tuple[tuple[Step, ...], ...]


def with_messages(schedule: Schedule, ahead: int = 2) -> Program:
    """The schedule with a send right after each run (after the last run of a slice where stages work in turn), and receives
    posted ahead of the runs that need them.

    All tasks are put in one order, that of the moments at which they start. Before a run, a stage has posted the receives of
    all messages whose senders stand before that run in this order. So when tasks are taken in this order no send ever waits:
    its receiver has been through all that stands before, and has posted. `ahead` more receives on each channel let a
    neighbour be earlier than expected. What is open at once is bounded by that, and by how far ahead of its
    neighbour the schedule lets a stage run.
    """
    if ahead < 0:
        raise PlanError(f"receives cannot be posted {-ahead} messages late; use ahead >= 0")
    moments = place(schedule, forward=1, backward=2)
    turns = {task: turn for turn, task in enumerate(sorted(moments, key=lambda task: (moments[task], task.stage)))}
    return Program(schedule, tuple(_steps(schedule, stage, turns, ahead) for stage in range(len(schedule.stages))))


def spell(program: Program) -> str:
    """The steps as text, one row a stage: `<F0` posts the receive of what F0 reads, `F0` runs it, `F0>` sends what it gives."""
    marks = {"receive": ("<", ""), "run": ("", ""), "send": ("", ">")}
    rows = [[name(step.task, program.schedule).join(marks[step.kind]) for step in steps] for steps in program.stages]
    return "\n".join(" ".join(row) for row in rows)


def _steps(schedule: Schedule, stage: int, turns: dict[Task, int], ahead: int) -> tuple[Step, ...]:
    steps: list[Step] = []
    inboxes = [_inbox(schedule, stage, "F"), _inbox(schedule, stage, "B")]
    due, posted = [0, 0], [0, 0]
    held: list[Task] = []  # run, and not yet handed on
    for task in schedule.stages[stage]:
        for channel, inbox in enumerate(inboxes):
            while due[channel] < len(inbox) and turns[inbox[due[channel]]] < turns[task]:
                due[channel] += 1
            post = min(due[channel] + ahead, len(inbox))
            steps += [Step("receive", sender._replace(stage=stage)) for sender in inbox[posted[channel] : post]]
            posted[channel] = post
        steps.append(Step("run", task))
        if _talks(Step("send", task), schedule):
            held.append(task)
        if not schedule.in_turn or task.chunk == (schedule.chunks[task.slice] - 1 if task.phase == "F" else 0):
            steps += [Step("send", each) for each in held]
            held.clear()
    return tuple(steps)


def _inbox(schedule: Schedule, stage: int, phase: Phase) -> list[Task]:
    """The tasks of a neighbour whose messages come to this stage, in the order in which it sends them."""
    neighbour = stage - 1 if phase == "F" else stage + 1
    if not 0 <= neighbour < len(schedule.stages):
        return []
    return [task for task in schedule.stages[neighbour] if task.phase == phase]


def _reader(task: Task) -> Task:
    """The task that reads what this one sends."""
    return task._replace(stage=task.stage + 1 if task.phase == "F" else task.stage - 1)


def _talks(step: Step, schedule: Schedule) -> bool:
    """Whether there is a neighbour at the other end of this send or receive."""
    upward = (step.task.phase == "F") == (step.kind == "send")
    return step.task.stage < len(schedule.stages) - 1 if upward else step.task.stage > 0


def prove(program: Program) -> None:
    """Refuses a program that would hang, mix up messages, leave some over, or break a dependency, under the rules above."""
    _check_steps(program)
    _Proof(program).carry_out()


def _check_steps(program: Program) -> None:
    """Each stage runs its tasks of the schedule in order; every step stands on the stage of its task and has a neighbour to talk to."""
    schedule = program.schedule
    check(schedule)
    if len(program.stages) != len(schedule.stages):
        raise PlanError(
            f"a program of {len(program.stages)} stages cannot carry out a schedule of {len(schedule.stages)}; give each its steps"
        )
    for stage, (steps, tasks) in enumerate(zip(program.stages, schedule.stages, strict=True)):
        for step in steps:
            if step.task.stage != stage:
                raise PlanError(f"stage {stage} cannot {_say(step, schedule)} of stage {step.task.stage}; take it away")
            if step.kind != "run" and not _talks(step, schedule):
                raise PlanError(f"stage {stage} has no neighbour to {_say(step, schedule)}; take it away")
        runs = [step.task for step in steps if step.kind == "run"]
        for ran, task in zip_longest(runs, tasks):
            if ran != task:
                found, wanted = (name(each, schedule) if each else "nothing" for each in (ran, task))
                raise PlanError(f"stage {stage} runs {found} where the schedule has {wanted}; keep to the schedule's order")


class _Channel:
    """One direction of one edge. Messages are known by the task that reads them."""

    def __init__(self) -> None:
        self.sends: list[Task] = []
        self.receives: list[Task] = []
        self.places: dict[Task, int] = {}  # of the receives


class _Proof:
    def __init__(self, program: Program) -> None:
        self.schedule, self.stages = program.schedule, program.stages
        self.channels: defaultdict[tuple[Phase, int], _Channel] = defaultdict(_Channel)  # by phase and receiving stage
        self.ran: set[Task] = set()
        self.at = [0] * len(self.stages)
        self.offered = [False] * len(self.stages)  # the send at hand is waiting for its receive

    def carry_out(self) -> None:
        moved = True
        while moved:
            moved = False
            for stage in range(len(self.stages)):
                moved = self._advance(stage) or moved
        left = [(stage, steps[at]) for stage, (steps, at) in enumerate(zip(self.stages, self.at, strict=True)) if at < len(steps)]
        if left:
            waits = ", ".join(f"stage {stage} waits to {_say(step, self.schedule)}" for stage, step in left)
            raise PlanError(f"the program cannot go on: {waits}; post the receives before the sends that wait for each other")
        for (_, stage), channel in self.channels.items():
            for task in channel.receives[len(channel.sends) :]:
                raise PlanError(f"stage {stage} posts a receive for {name(task, self.schedule)} that nothing is sent to; take it away")

    def _advance(self, stage: int) -> bool:
        """Take this stage's steps until one blocks; whether anything happened that another stage may wait for."""
        before = self.at[stage], self.offered[stage]
        steps = self.stages[stage]
        while self.at[stage] < len(steps) and self._take(stage, steps[self.at[stage]]):
            self.at[stage] += 1
        return before != (self.at[stage], self.offered[stage])

    def _take(self, stage: int, step: Step) -> bool:
        """Whether the step is done; if not, it is tried again."""
        if step.kind == "run":
            return self._run(step.task)
        task = step.task if step.kind == "receive" else _reader(step.task)
        channel = self.channels[step.task.phase, task.stage]
        if step.kind == "receive":
            channel.places.setdefault(task, len(channel.receives))
            channel.receives.append(task)
            self._match(channel, len(channel.receives))
            return True
        if not self.offered[stage]:
            if step.task not in self.ran:
                raise PlanError(f"stage {stage} sends {name(step.task, self.schedule)} before it has run; put the send after the run")
            channel.sends.append(task)
            self._match(channel, len(channel.sends))
        # Only this stage sends on this channel, so the last send is its own.
        self.offered[stage] = len(channel.receives) < len(channel.sends)
        return not self.offered[stage]

    def _run(self, task: Task) -> bool:
        what = name(task, self.schedule)
        for need in own_needs(task, self.schedule):
            if need not in self.ran:
                raise PlanError(f"stage {task.stage} runs {what} before {name(need, self.schedule)}, which it needs; swap them")
        if _talks(Step("receive", task), self.schedule):
            channel = self.channels[task.phase, task.stage]
            if task not in channel.places:
                raise PlanError(f"stage {task.stage} runs {what} without a receive for it; post one before")
            if channel.places[task] >= len(channel.sends):
                return False
        self.ran.add(task)
        return True

    def _match(self, channel: _Channel, count: int) -> None:
        """The send and the receive that stand at this place, where both are there, are for the same message."""
        if count > min(len(channel.sends), len(channel.receives)):
            return
        sent, received = channel.sends[count - 1], channel.receives[count - 1]
        if sent != received:
            raise PlanError(
                f"message {count - 1} to stage {sent.stage} is sent for {name(sent, self.schedule)} but received for "
                f"{name(received, self.schedule)}; post receives in the order of the sends"
            )


def _say(step: Step, schedule: Schedule) -> str:
    return f"{step.kind} {name(step.task, schedule)}"
