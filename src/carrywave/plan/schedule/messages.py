"""Adds the messages between stages to a schedule.

Every pair of neighbouring stages has a channel in each direction: activations forward, gradients backward. If the head is shared,
the last stage and every other stage have two more: one for the activations to be scored, one for their gradient. Messages on a channel
match by order alone: the i-th send pairs with the i-th receive. The result cannot deadlock: the tests execute programs under the strictest
rules that we support, where a stage executes its steps strictly in order, a send blocks until its receive is posted, and a run blocks until
its receive has been paired with a send.

This is not enough for a transport that executes all of a stage's messages one after another on the device, whichever channel they belong
to: there, a receive posted early blocks everything queued behind it. For such transports there is `Program.in_order`, with a proof of its
own in the tests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from carrywave.errors import PlanError
from carrywave.plan.schedule.schedule import Phase, Schedule, StageTask, reader, source, start_times

Pair = tuple[int, int]  # two stages, the lower first


class ProgramStep(NamedTuple):
    """Post the receive for the input of `task` from another stage, run the task, or send its output to another stage."""

    kind: Literal["receive", "run", "send"]
    task: StageTask


class Channel(NamedTuple):
    """A one-way connection between two stages; `phase` is that of the tasks that read from it."""

    phase: Phase
    sender: int
    receiver: int

    @property
    def pair(self) -> Pair:
        """The stages at its ends."""
        return min(self.sender, self.receiver), max(self.sender, self.receiver)


@dataclass(frozen=True)
class Program:
    """A schedule with its sends and receives: the steps of each stage, in order."""

    schedule: Schedule
    stages: tuple[tuple[ProgramStep, ...], ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Computed once: a program is long, and what is known of it is looked up in every pass."""
        return hash((self.schedule, self.stages))

    @cached_property
    def in_order(self) -> Program:
        """The same program with all messages in one global order, by send time; every stage posts its receives and sends in that order.

        A receive is thus never posted ahead of an earlier send of the same stage, and stages that execute their messages strictly one
        after another cannot deadlock: the earliest unfinished message is at the front of the queue at both of its ends.
        """
        turns = global_order(self.schedule)
        return Program(self.schedule, tuple(_in_order(self.schedule, stage, turns) for stage in range(len(self.schedule.stages))))


def with_messages(schedule: Schedule, ahead: int = 2) -> Program:
    """The schedule with a send right after each run, and with receives posted ahead of the runs that need them.

    All tasks are put in one global order, by start time. Before a run, a stage has posted the receives of all messages whose
    sending tasks precede that run in this order. So if tasks execute in this order, no send ever blocks: its receiver has
    executed everything earlier and has posted the receive. `ahead` extra receives on each channel let a neighbour be earlier
    than expected. The number of open receives is bounded by `ahead` and by how far the schedule lets a stage run ahead of
    its neighbour.
    """
    if ahead < 0:
        raise PlanError(f"receives cannot be posted {-ahead} messages late; use ahead >= 0")
    turns = global_order(schedule)
    return Program(schedule, tuple(_steps(schedule, stage, turns, ahead) for stage in range(len(schedule.stages))))


def global_order(schedule: Schedule) -> dict[StageTask, int]:
    """The position of each task in the global order, by start time."""
    moments = start_times(schedule)
    return {task: turn for turn, task in enumerate(sorted(moments, key=lambda task: (moments[task], task.stage)))}


def incoming(task: StageTask, schedule: Schedule) -> Channel | None:
    """The channel on which this task's input arrives from another stage, if any."""
    sender = source(task, schedule)
    return None if sender is None else Channel(task.phase, sender.stage, task.stage)


def outgoing(task: StageTask, schedule: Schedule) -> Channel | None:
    """The channel on which this task's output goes to another stage, if any."""
    other = reader(task, schedule)
    return None if other is None else Channel(other.phase, task.stage, other.stage)


def channels_of(stages: int, *, share_head: bool) -> list[Channel]:
    """Every channel used by programs with this number of stages."""
    last = stages - 1
    chain = [channel for stage in range(last) for channel in (Channel("F", stage, stage + 1), Channel("B", stage + 1, stage))]
    return chain + [channel for stage in range(last) if share_head for channel in (Channel("H", last, stage), Channel("B", stage, last))]


def pairs_of(channels: Iterable[Channel]) -> list[Pair]:
    """The pairs of stages that exchange messages on these channels, in the order in which they connect."""
    return sorted({channel.pair for channel in channels})


def _steps(schedule: Schedule, stage: int, turns: dict[StageTask, int], ahead: int) -> tuple[ProgramStep, ...]:
    steps: list[ProgramStep] = []
    inboxes = _inboxes(schedule, stage)
    due, posted = [0] * len(inboxes), [0] * len(inboxes)
    for task in schedule.stages[stage]:
        for channel, inbox in enumerate(inboxes):
            while due[channel] < len(inbox) and turns[inbox[due[channel]][0]] < turns[task]:
                due[channel] += 1
            post = min(due[channel] + ahead, len(inbox))
            steps += [ProgramStep("receive", reading) for _, reading in inbox[posted[channel] : post]]
            posted[channel] = post
        steps.append(ProgramStep("run", task))
        if outgoing(task, schedule) is not None:
            steps.append(ProgramStep("send", task))
    return tuple(steps)


def _in_order(schedule: Schedule, stage: int, turns: dict[StageTask, int]) -> tuple[ProgramStep, ...]:
    """The steps of a stage with its messages in the global send order."""
    inbox = sorted((turns[task], reading) for messages in _inboxes(schedule, stage) for task, reading in messages)
    steps: list[ProgramStep] = []
    posted = 0
    for task in schedule.stages[stage]:
        while posted < len(inbox) and inbox[posted][0] < turns[task]:
            steps.append(ProgramStep("receive", inbox[posted][1]))
            posted += 1
        steps.append(ProgramStep("run", task))
        if outgoing(task, schedule) is not None:
            steps.append(ProgramStep("send", task))
    return tuple(steps)


def _inboxes(schedule: Schedule, stage: int) -> list[list[tuple[StageTask, StageTask]]]:
    """The messages to this stage, per channel: (sending task, reading task) pairs in send order."""
    by_channel: defaultdict[Channel, list[tuple[StageTask, StageTask]]] = defaultdict(list)
    for tasks in schedule.stages:
        for task in tasks:
            reading = reader(task, schedule)
            if reading is not None and reading.stage == stage:
                by_channel[Channel(reading.phase, task.stage, stage)].append((task, reading))
    return [by_channel[channel] for channel in sorted(by_channel, key=lambda channel: ("FBH".index(channel.phase), channel.sender))]
