"""Proves that a program runs on a transport that executes messages strictly in order, as NCCL does within a communicator.

The rules are those of the device, not of the host, and are the strictest we support:

- the host enqueues work without waiting: tasks on one queue, messages on another, each executed in order;
- the messages between two tasks form one batch: it starts when all tasks enqueued before it and all earlier batches have completed;
  its messages then proceed concurrently, in any order;
- a message completes once the batches at both of its ends have started; nothing is buffered;
- a task starts only when the whole batch that contains its message has completed;
- messages from one stage to another match by order alone, whatever they are for.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from carrywave.errors import PlanError
from carrywave.plan.schedule.messages import Program, ProgramStep, incoming, outgoing
from carrywave.plan.schedule.schedule import StageTask, name, reader


class Message(NamedTuple):
    """Identified by sender, receiver, and its index among all messages from that sender to that receiver."""

    sender: int
    receiver: int
    place: int


@dataclass
class MessageBatch:
    """The messages of a stage between two of its tasks."""

    tasks: int  # number of tasks enqueued before it
    messages: list[Message] = field(default_factory=list)


@dataclass
class _Stage:
    tasks: list[StageTask] = field(default_factory=list)
    batches: list[MessageBatch] = field(default_factory=list)
    waits: dict[StageTask, int] = field(default_factory=dict)  # index of the batch that each task waits for
    ran: int = 0  # completed tasks
    through: int = 0  # completed batches

    @property
    def open(self) -> MessageBatch | None:
        """The batch that has started and not completed, if any."""
        at = self.batches[self.through] if self.through < len(self.batches) else None
        return at if at is not None and at.tasks <= self.ran else None


def prove_in_order(program: Program) -> None:
    """Reject a program that would deadlock or mismatch messages under the rules above."""
    stages = _stages(program)
    done: set[Message] = set()
    moved = True
    while moved:
        moved = False
        for stage in stages:
            while stage.ran < len(stage.tasks) and stage.waits.get(stage.tasks[stage.ran], -1) < stage.through:
                stage.ran += 1
                moved = True
        begun = [stage.open for stage in stages]
        for number, batch in enumerate(begun):
            for message in batch.messages if batch is not None else []:
                other = begun[message.receiver if number == message.sender else message.sender]
                if message not in done and other is not None and message in other.messages:
                    done.add(message)
                    moved = True
        for stage in stages:
            if stage.open is not None and done.issuperset(stage.open.messages):
                stage.through += 1
                moved = True
    stuck = [number for number, stage in enumerate(stages) if stage.ran < len(stage.tasks) or stage.through < len(stage.batches)]
    if stuck:
        raise PlanError(f"messages in order deadlock: {', '.join(_says(number, stages[number], program) for number in stuck)}")


def _stages(program: Program) -> list[_Stage]:
    """The queues of each stage; rejects messages that would be paired with the wrong receive."""
    sent: defaultdict[tuple[int, int], list[StageTask]] = defaultdict(list)
    received: defaultdict[tuple[int, int], list[StageTask]] = defaultdict(list)
    found: list[_Stage] = []
    for number, steps in enumerate(program.stages):
        stage = _Stage()
        for step in steps:
            if step.kind == "run":
                stage.tasks.append(step.task)
                continue
            if not stage.batches or stage.batches[-1].tasks < len(stage.tasks):
                stage.batches.append(MessageBatch(len(stage.tasks)))
            stage.batches[-1].messages.append(_message(step, program, number, sent, received))
            if step.kind == "receive":
                stage.waits[step.task] = len(stage.batches) - 1
        found.append(stage)
    for ends in sent.keys() | received.keys():
        for place, (given, wanted) in enumerate(zip(sent[ends], received[ends], strict=False)):
            if given != wanted:
                names = (name(task, program.schedule) for task in (given, wanted))
                raise PlanError(
                    "message {} from stage {} to stage {} is sent for {} but received for {}; use one order".format(place, *ends, *names)
                )
        if len(sent[ends]) != len(received[ends]):
            raise PlanError(f"stage {ends[0]} sends {len(sent[ends])} messages to stage {ends[1]}, but {len(received[ends])} are received")
    return found


def _message(
    step: ProgramStep,
    program: Program,
    number: int,
    sent: defaultdict[tuple[int, int], list[StageTask]],
    received: defaultdict[tuple[int, int], list[StageTask]],
) -> Message:
    line = (outgoing if step.kind == "send" else incoming)(step.task, program.schedule)
    if line is None:
        raise PlanError(f"stage {number} has no neighbour for {step.kind} {name(step.task, program.schedule)}; remove it")
    known = (sent if step.kind == "send" else received)[line.sender, line.receiver]
    known.append(step.task if step.kind == "receive" else cast(StageTask, reader(step.task, program.schedule)))
    return Message(line.sender, line.receiver, len(known) - 1)


def _says(number: int, stage: _Stage, program: Program) -> str:
    if stage.open is not None:
        return f"stage {number} waits for messages with stages {sorted({*_ends(stage.open)} - {number})}"
    task = stage.tasks[stage.ran] if stage.ran < len(stage.tasks) else None
    return f"stage {number} waits to run {name(task, program.schedule)}" if task else f"stage {number} waits"


def _ends(batch: MessageBatch) -> list[int]:
    return [end for message in batch.messages for end in message[:2]]
