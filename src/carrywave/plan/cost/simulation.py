"""Simulates a `Program` with given task times: when each task starts and ends, how long stages wait, how many bytes are sent.

The program is the one the runtime executes, under the runtime's rules: a stage executes its steps in order; posting a receive never
blocks; a message is transferred once it has been sent and its receive posted, one at a time per channel; a run waits for its message.
Where messages are written into the receiver's memory, the sender copies them itself, and nothing waits for a receive.
Each step is visited once or twice, so the simulation is linear in the number of tasks.
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
    """An interval of a worker's time: a task, `reduce` (gradient all-reduce) or `update`."""

    label: str
    start: float
    end: float
    task: StageTask | None = None


@dataclass(frozen=True)
class TaskTimes:
    """The durations and message sizes that drive a simulation."""

    run: Callable[[StageTask], float]
    num_bytes: Callable[[StageTask], int] = lambda task: 0  # size of the message this task sends to another stage
    link: Callable[[Channel], Link] = lambda channel: INSTANT
    message_seconds: float = 0.0  # of a stage's own time, per message sent or received
    copied: bool = False  # the sender itself copies its messages into the receiver's memory


@dataclass(frozen=True)
class Timeline:
    """What each stage does when; all replicas are the same."""

    rows: tuple[tuple[TaskSpan, ...], ...]
    sent_bytes: tuple[int, ...]  # per stage

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


class _Step(NamedTuple):
    """A step with the number of its message, or -1 for a run that reads none."""

    kind: str
    task: StageTask
    message: int


class Compiled:
    """A program with numbered messages: built once, simulated many times."""

    def __init__(self, program: Program) -> None:
        self.program = program
        schedule = program.schedule
        numbers: dict[StageTask, int] = {}
        self.channels: list[Channel] = []  # the channel of each message
        self.readers: list[StageTask] = []

        def number(reading: StageTask) -> int:
            if reading not in numbers:
                channel = incoming(reading, schedule)
                if channel is None:
                    return -1
                numbers[reading] = len(self.channels)
                self.channels.append(channel)
                self.readers.append(reading)
            return numbers[reading]

        self.stages: list[list[_Step]] = []
        for stage, steps in enumerate(program.stages):
            row = []
            for kind, task in steps:
                reading = reader(task, schedule) if kind == "send" else task
                message = -1 if reading is None else number(reading)
                if message < 0 and kind != "run":
                    raise PlanError(f"stage {stage} has no neighbour for {kind} {name(task, schedule)}; remove it")
                row.append(_Step(kind, task, message))
            self.stages.append(row)


def simulate(program: Program | Compiled, times: TaskTimes) -> Timeline:
    """Simulate a program; rejects one that deadlocks."""
    return _Simulated(program if isinstance(program, Compiled) else Compiled(program), times).execute()


class _Simulated:
    def __init__(self, program: Compiled, times: TaskTimes) -> None:
        self.program, self.times = program, times
        self.rows: list[list[TaskSpan]] = [[] for _ in program.stages]
        self.sent_bytes = [0] * len(program.stages)
        messages = len(program.channels)
        self.posted = [-1.0] * messages  # when the receive was posted; negative: not yet
        self.offered = [-1.0] * messages
        self.sizes = [0] * messages
        self.arrived = [-1.0] * messages
        self.links = {channel: times.link(channel) for channel in set(program.channels)}
        self.free = dict.fromkeys(self.links, 0.0)
        self.waiting: dict[int, int] = {}  # message -> the stage waiting for it
        self.ready = deque(range(len(program.stages)))

    def execute(self) -> Timeline:
        walks = [self._walk(stage) for stage in range(len(self.program.stages))]
        while self.ready:
            stage = self.ready.popleft()
            waits = next(walks[stage], None)
            if waits is not None:
                self.waiting[waits] = stage
        if self.waiting:
            schedule = self.program.program.schedule
            stuck = sorted((stage, self.program.readers[message]) for message, stage in self.waiting.items())
            waits_text = ", ".join(f"stage {stage} waits for the message of {name(task, schedule)}" for stage, task in stuck)
            raise PlanError(f"the program deadlocks: {waits_text}; send the messages that are waited for, in the order of the schedule")
        return Timeline(tuple(map(tuple, self.rows)), tuple(self.sent_bytes))

    def _walk(self, stage: int) -> Iterator[int]:
        """Execute the steps of a stage, yielding the awaited message at each run whose message has not arrived."""
        times, row, clock = self.times, self.rows[stage], 0.0
        for kind, task, message in self.program.stages[stage]:
            if kind == "receive":
                clock += times.message_seconds
                self.posted[message] = clock
                self._meet(message)
            elif kind == "send":
                clock += times.message_seconds
                self.sizes[message] = times.num_bytes(task)
                self.sent_bytes[stage] += self.sizes[message]
                if times.copied:
                    clock += self.sizes[message] / self.links[self.program.channels[message]].bytes_per_second
                self.offered[message] = clock
                self._meet(message)
            else:
                if message >= 0:
                    if self.arrived[message] < 0:
                        yield message
                    clock = max(clock, self.arrived[message])
                start, clock = clock, clock + times.run(task)
                row.append(TaskSpan(task.phase, start, clock, task))

    def _meet(self, message: int) -> None:
        """Transfer a message if both of its ends are ready, and wake the stage waiting for it."""
        posted, offered = self.posted[message], self.offered[message]
        channel = self.program.channels[message]
        link = self.links[channel]
        if self.times.copied:
            if offered < 0:
                return
            self.arrived[message] = offered + link.latency_seconds
        else:
            if posted < 0 or offered < 0:
                return
            self.free[channel] = max(offered, posted, self.free[channel]) + self.sizes[message] / link.bytes_per_second
            self.arrived[message] = self.free[channel] + link.latency_seconds
        if (stage := self.waiting.pop(message, None)) is not None:
            self.ready.append(stage)
