"""Runs a `Program` on given times: when each task of each stage starts and ends, how long stages wait, what is sent.

It is the object that the runtime executes, under the runtime's rules: a stage takes its steps in order; a receive is posted and never
blocks; a message is under way once it is sent and its receive is posted, one after the other on each channel; a run waits for its
message. Each step is looked at once or twice, so that time grows with the number of tasks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from carrywave.errors import PlanError
from carrywave.plan.cost.profile import Link
from carrywave.plan.schedule.messages import Channel, Program, incoming
from carrywave.plan.schedule.schedule import StageTask, name, reader

INSTANT = Link(0.0, float("inf"))


class TaskSpan(NamedTuple):
    """What a worker does from one moment to another: a task, or `pay` (put-off gradients), `reduce`, `update`."""

    label: str
    start: float
    end: float
    task: StageTask | None = None


@dataclass(frozen=True)
class TaskTimes:
    """How long things take."""

    run: Callable[[StageTask], float]
    pay: Callable[[StageTask], float] = lambda task: 0.0  # after this task, and after what it sends
    num_bytes: Callable[[StageTask], int] = lambda task: 0  # of what this task gives another stage
    link: Callable[[Channel], Link] = lambda line: INSTANT
    message_seconds: float = 0.0  # of a stage's own time, for each message


@dataclass(frozen=True)
class Timeline:
    """What each stage does when; replicas do the same."""

    rows: tuple[tuple[TaskSpan, ...], ...]
    sent_bytes: tuple[int, ...]  # by each stage

    @property
    def seconds(self) -> float:
        """From the start to the end of the last."""
        return max((row[-1].end for row in self.rows if row), default=0.0)

    @property
    def ends(self) -> tuple[float, ...]:
        """When each stage is through."""
        return tuple(row[-1].end if row else 0.0 for row in self.rows)

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each stage works."""
        return tuple(sum(span.end - span.start for span in row if span.label != "reduce") for row in self.rows)

    @property
    def bubble(self) -> float:
        """The share of the stages' time that is not work."""
        return 1 - sum(self.busy) / (self.seconds * len(self.rows)) if self.seconds else 0.0

    def then(self, label: str, spans: list[tuple[float, float]]) -> Timeline:
        """The same with one more span on each stage that has something to do."""
        rows = [(*row, TaskSpan(label, start, end)) if end > start else row for row, (start, end) in zip(self.rows, spans, strict=True)]
        return replace(self, rows=tuple(rows))


class _Step(NamedTuple):
    """A step with its message: the number of it, or -1 where a run reads none."""

    kind: str
    task: StageTask
    message: int


class Compiled:
    """A program with its messages numbered: made once, simulated often."""

    def __init__(self, program: Program) -> None:
        self.program = program
        schedule = program.schedule
        numbers: dict[StageTask, int] = {}
        self.lines: list[Channel] = []  # of each message
        self.readers: list[StageTask] = []

        def number(reading: StageTask) -> int:
            if reading not in numbers:
                line = incoming(reading, schedule)
                if line is None:
                    return -1
                numbers[reading] = len(self.lines)
                self.lines.append(line)
                self.readers.append(reading)
            return numbers[reading]

        self.stages: list[list[_Step]] = []
        for stage, steps in enumerate(program.stages):
            row = []
            for kind, task in steps:
                reading = reader(task, schedule) if kind == "send" else task
                message = -1 if reading is None else number(reading)
                if message < 0 and kind != "run":
                    raise PlanError(f"stage {stage} has no neighbour to {kind} {name(task, schedule)}; take it away")
                row.append(_Step(kind, task, message))
            self.stages.append(row)


def simulate(program: Program | Compiled, times: TaskTimes) -> Timeline:
    """Run a program; refuses one that cannot go on."""
    return _Run(program if isinstance(program, Compiled) else Compiled(program), times).carry_out()


class _Run:
    def __init__(self, program: Compiled, times: TaskTimes) -> None:
        self.program, self.times = program, times
        self.rows: list[list[TaskSpan]] = [[] for _ in program.stages]
        self.sent_bytes = [0] * len(program.stages)
        messages = len(program.lines)
        self.posted = [-1.0] * messages  # when the receive was posted; below zero: not yet
        self.offered = [-1.0] * messages
        self.sizes = [0] * messages
        self.arrived = [-1.0] * messages
        self.links = {line: times.link(line) for line in set(program.lines)}
        self.free = dict.fromkeys(self.links, 0.0)
        self.waiting: dict[int, int] = {}  # stages that wait for a message
        self.ready = deque(range(len(program.stages)))

    def carry_out(self) -> Timeline:
        walks = [self._walk(stage) for stage in range(len(self.program.stages))]
        while self.ready:
            stage = self.ready.popleft()
            waits = next(walks[stage], None)
            if waits is not None:
                self.waiting[waits] = stage
        if self.waiting:
            schedule = self.program.program.schedule
            stuck = sorted((stage, self.program.readers[message]) for message, stage in self.waiting.items())
            said = ", ".join(f"stage {stage} waits for the message of {name(task, schedule)}" for stage, task in stuck)
            raise PlanError(f"the program cannot go on: {said}; send what is waited for, in the order of the schedule")
        return Timeline(tuple(map(tuple, self.rows)), tuple(self.sent_bytes))

    def _walk(self, stage: int) -> Iterator[int]:
        """Take the steps of a stage; stops at each run whose message has not come, and gives the message."""
        times, row, clock = self.times, self.rows[stage], 0.0
        done: StageTask | None = None
        for kind, task, message in self.program.stages[stage]:
            if kind == "receive":
                clock += times.message_seconds
                self.posted[message] = clock
                self._meet(message)
            elif kind == "send":
                clock += times.message_seconds
                self.offered[message], self.sizes[message] = clock, times.num_bytes(task)
                self.sent_bytes[stage] += self.sizes[message]
                self._meet(message)
            else:
                clock = self._pay(stage, done, clock)
                if message >= 0:
                    if self.arrived[message] < 0:
                        yield message
                    clock = max(clock, self.arrived[message])
                start, clock = clock, clock + times.run(task)
                row.append(TaskSpan(task.phase, start, clock, task))
                done = task
        self._pay(stage, done, clock)

    def _pay(self, stage: int, done: StageTask | None, clock: float) -> float:
        seconds = 0.0 if done is None else self.times.pay(done)
        if seconds > 0:
            self.rows[stage].append(TaskSpan("pay", clock, clock + seconds, done))
        return clock + seconds

    def _meet(self, message: int) -> None:
        """A message is under way as soon as both ends are there."""
        posted, offered = self.posted[message], self.offered[message]
        if posted < 0 or offered < 0:
            return
        line = self.program.lines[message]
        link = self.links[line]
        self.free[line] = max(offered, posted, self.free[line]) + self.sizes[message] / link.bytes_per_second
        self.arrived[message] = self.free[line] + link.latency_seconds
        if (stage := self.waiting.pop(message, None)) is not None:
            self.ready.append(stage)
