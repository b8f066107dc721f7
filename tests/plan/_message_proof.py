"""Proves that a program cannot deadlock, by executing it under the strictest rules that we support.

A stage executes its steps strictly in order; posting a receive never blocks; a send blocks until its receive is posted; a run blocks until
its receive has been paired with a send. A transport that buffers, or sends in the background, only relaxes these rules.
"""

from __future__ import annotations

from collections import defaultdict
from typing import cast

from carrywave.errors import PlanError
from carrywave.plan.schedule.messages import Channel, Program, ProgramStep, incoming, outgoing
from carrywave.plan.schedule.schedule import StageTask, check, name, needs_on_stage, reader


def spell(program: Program) -> str:
    """The steps as text, one row per stage: `<F0` posts the receive for F0's input, `F0` runs it, `F0>` sends its output."""
    marks = {"receive": ("<", ""), "run": ("", ""), "send": ("", ">")}
    rows = [[name(step.task, program.schedule).join(marks[step.kind]) for step in steps] for steps in program.stages]
    return "\n".join(" ".join(row) for row in rows)


def prove(program: Program) -> None:
    """Reject a program that, under the rules above, would deadlock, mismatch messages, leave some unmatched, or break a dependency."""
    schedule = program.schedule
    check(schedule)
    for stage, (steps, tasks) in enumerate(zip(program.stages, schedule.stages, strict=True)):
        if tuple(step.task for step in steps if step.kind == "run") != tasks:
            raise PlanError(f"stage {stage} does not run its tasks in the schedule's order")
        for step in steps:
            ends = {"send": outgoing, "receive": incoming}
            if step.kind != "run" and ends[step.kind](step.task, schedule) is None:
                raise PlanError(f"stage {stage} has no neighbour for {step.kind} {name(step.task, schedule)}")
    _Proof(program).execute()


class _Channel:
    """The state of one channel during the proof. Messages are identified by the task that reads them."""

    def __init__(self) -> None:
        self.sends: list[StageTask] = []
        self.receives: list[StageTask] = []


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
            moved = any(self._advance(stage) for stage in range(len(self.stages)))
        left = [(stage, steps[at]) for stage, (steps, at) in enumerate(zip(self.stages, self.at, strict=True)) if at < len(steps)]
        if left:
            waits = ", ".join(f"stage {stage} waits to {step.kind} {name(step.task, self.schedule)}" for stage, step in left)
            raise PlanError(f"the program deadlocks: {waits}")
        for line, channel in self.channels.items():
            for task in channel.receives[len(channel.sends) :]:
                raise PlanError(f"stage {line.receiver} posts a receive for {name(task, self.schedule)} that no send matches")

    def _advance(self, stage: int) -> bool:
        """Execute this stage's steps until one blocks; return True if it made progress that may unblock another stage."""
        before, steps = (self.at[stage], self.offered[stage]), self.stages[stage]
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
            channel.receives.append(task)
        elif not self.offered[stage]:
            if step.task not in self.ran:
                raise PlanError(f"stage {stage} sends {name(step.task, self.schedule)} before it has run")
            channel.sends.append(task)
        for sent, received in zip(channel.sends, channel.receives, strict=False):
            if sent != received:
                names = name(sent, self.schedule), name(received, self.schedule)
                raise PlanError("a message to stage {} is sent for {} but received for {}".format(sent.stage, *names))
        # Only this stage sends on this channel, so the last send is this one.
        self.offered[stage] = step.kind == "send" and len(channel.receives) < len(channel.sends)
        return not self.offered[stage]

    def _run(self, task: StageTask) -> bool:
        what = f"stage {task.stage} runs {name(task, self.schedule)}"
        for need in needs_on_stage(task, self.schedule):
            if need not in self.ran:
                raise PlanError(f"{what} before {name(need, self.schedule)}, which it needs")
        if (line := incoming(task, self.schedule)) is not None:
            channel = self.channels[line]
            if task not in channel.receives:
                raise PlanError(f"{what} without a receive for it")
            if channel.receives.index(task) >= len(channel.sends):
                return False
        self.ran.add(task)
        return True
