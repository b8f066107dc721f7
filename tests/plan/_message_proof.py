"""Proves that a program cannot deadlock, by executing it under the strictest rules that we support.

A stage executes its steps strictly in order; posting a receive never blocks; a send blocks until its receive is posted; a run blocks until
its receive has been paired with a send. A transport that buffers, or sends in the background, only relaxes these rules.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import zip_longest
from typing import cast

from carrywave.errors import PlanError
from carrywave.plan.schedule.messages import Channel, Program, ProgramStep, incoming, outgoing
from carrywave.plan.schedule.schedule import Schedule, StageTask, check, name, needs_on_stage, reader


def spell(program: Program) -> str:
    """The steps as text, one row per stage: `<F0` posts the receive for F0's input, `F0` runs it, `F0>` sends its output."""
    marks = {"receive": ("<", ""), "run": ("", ""), "send": ("", ">")}
    rows = [[name(step.task, program.schedule).join(marks[step.kind]) for step in steps] for steps in program.stages]
    return "\n".join(" ".join(row) for row in rows)


def _talks(step: ProgramStep, schedule: Schedule) -> bool:
    """True if this send or receive has another stage at its other end."""
    return (outgoing if step.kind == "send" else incoming)(step.task, schedule) is not None


def prove(program: Program) -> None:
    """Reject a program that, under the rules above, would deadlock, mismatch messages, leave some unmatched, or break a dependency."""
    _check_steps(program)
    _Proof(program).execute()


def _check_steps(program: Program) -> None:
    """Check that each stage runs its scheduled tasks in order, and that every step is on its task's stage and has a peer."""
    schedule = program.schedule
    check(schedule)
    if len(program.stages) != len(schedule.stages):
        raise PlanError(
            f"a program of {len(program.stages)} stages cannot run a schedule of {len(schedule.stages)} stages; give each stage its steps"
        )
    for stage, (steps, tasks) in enumerate(zip(program.stages, schedule.stages, strict=True)):
        for step in steps:
            if step.task.stage != stage:
                raise PlanError(f"stage {stage} cannot {_say(step, schedule)} of stage {step.task.stage}; remove it")
            if step.kind != "run" and not _talks(step, schedule):
                raise PlanError(f"stage {stage} has no neighbour for {_say(step, schedule)}; remove it")
        runs = [step.task for step in steps if step.kind == "run"]
        for ran, task in zip_longest(runs, tasks):
            if ran != task:
                found, wanted = (name(each, schedule) if each else "nothing" for each in (ran, task))
                raise PlanError(f"stage {stage} runs {found} where the schedule has {wanted}; follow the schedule's order")


class _Channel:
    """The state of one channel during the proof. Messages are identified by the task that reads them."""

    def __init__(self) -> None:
        self.sends: list[StageTask] = []
        self.receives: list[StageTask] = []
        self.places: dict[StageTask, int] = {}  # index of each task's receive


class _Proof:
    def __init__(self, program: Program) -> None:
        self.schedule, self.stages = program.schedule, program.stages
        self.channels: defaultdict[Channel, _Channel] = defaultdict(_Channel)
        self.ran: set[StageTask] = set()
        self.at = [0] * len(self.stages)
        self.offered = [False] * len(self.stages)  # the current send is blocked, waiting for its receive

    def execute(self) -> None:
        moved = True
        while moved:
            moved = False
            for stage in range(len(self.stages)):
                moved = self._advance(stage) or moved
        left = [(stage, steps[at]) for stage, (steps, at) in enumerate(zip(self.stages, self.at, strict=True)) if at < len(steps)]
        if left:
            waits = ", ".join(f"stage {stage} waits to {_say(step, self.schedule)}" for stage, step in left)
            raise PlanError(f"the program deadlocks: {waits}; post the receives before the sends that wait for each other")
        for line, channel in self.channels.items():
            for task in channel.receives[len(channel.sends) :]:
                raise PlanError(f"stage {line.receiver} posts a receive for {name(task, self.schedule)} that no send matches; remove it")

    def _advance(self, stage: int) -> bool:
        """Execute this stage's steps until one blocks; return True if it made progress that may unblock another stage."""
        before = self.at[stage], self.offered[stage]
        steps = self.stages[stage]
        while self.at[stage] < len(steps) and self._take(stage, steps[self.at[stage]]):
            self.at[stage] += 1
        return before != (self.at[stage], self.offered[stage])

    def _take(self, stage: int, step: ProgramStep) -> bool:
        """Try one step; return False if it blocks and must be retried."""
        if step.kind == "run":
            return self._run(step.task)
        task = step.task if step.kind == "receive" else cast(StageTask, reader(step.task, self.schedule))
        channel = self.channels[cast(Channel, incoming(task, self.schedule))]
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
        # Only this stage sends on this channel, so the last send is this one.
        self.offered[stage] = len(channel.receives) < len(channel.sends)
        return not self.offered[stage]

    def _run(self, task: StageTask) -> bool:
        what = name(task, self.schedule)
        for need in needs_on_stage(task, self.schedule):
            if need not in self.ran:
                raise PlanError(f"stage {task.stage} runs {what} before {name(need, self.schedule)}, which it needs; swap them")
        if (line := incoming(task, self.schedule)) is not None:
            channel = self.channels[line]
            if task not in channel.places:
                raise PlanError(f"stage {task.stage} runs {what} without a receive for it; post one first")
            if channel.places[task] >= len(channel.sends):
                return False
        self.ran.add(task)
        return True

    def _match(self, channel: _Channel, count: int) -> None:
        """Check that the count-th send and receive, if both have been posted, are for the same message."""
        if count > min(len(channel.sends), len(channel.receives)):
            return
        sent, received = channel.sends[count - 1], channel.receives[count - 1]
        if sent != received:
            raise PlanError(
                f"message {count - 1} to stage {sent.stage} is sent for {name(sent, self.schedule)} but received for "
                f"{name(received, self.schedule)}; post receives in the order of the sends"
            )


def _say(step: ProgramStep, schedule: Schedule) -> str:
    return f"{step.kind} {name(step.task, schedule)}"
