"""Proves that a program runs on a device that does one thing at a time, in the order in which the host issues it.

This is the strictest of the devices that NCCL's messages may meet. Each pair of stages has a communicator of its own, whose messages run
in order; those of several pairs usually run at once, beside the tasks, but may also have to wait for each other: for multiprocessors, or
because something synchronises the device. The rules:

- the host issues tasks and batches of messages without waiting, and the device carries them out one at a time, in that order: each
  starts when everything that its stage issued before it has completed;
- a batch holds consecutive messages of a stage with one other stage, with no task between them, and ends with its first receive
  (`joins`): a task that waits for its message then waits for no later one;
- a message completes once the batches at both of its ends have started; nothing is buffered. A batch completes with its last message;
- the receive of a task's message is issued before the task;
- messages from one stage to another match by order alone, whatever they are for.

A device that does more at once waits for less: tasks start without the messages of others, batches without those of other pairs. Whatever
happens there happens no later than here, so that a program that is proved here cannot hang there.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from carrywave.errors import PlanError
from carrywave.parallel.links.group_links import MessageEnd, joins
from carrywave.plan.schedule.messages import Program, incoming, outgoing
from carrywave.plan.schedule.schedule import StageTask, name, reader


class Message(NamedTuple):
    """Identified by sender, receiver, and its index among all messages from that sender to that receiver."""

    sender: int
    receiver: int
    place: int


@dataclass
class MessageBatch:
    """Messages of a stage that are issued together."""

    last: MessageEnd
    messages: list[Message] = field(default_factory=list)


Issued = StageTask | MessageBatch


@dataclass
class IssueQueue:
    """What a stage issues, in order."""

    items: list[Issued] = field(default_factory=list)
    waits: dict[StageTask, int] = field(default_factory=dict)  # for each task with a message: the index of the batch that brings it

    def at(self, place: int) -> Issued | None:
        """What is issued at this place; None after the last."""
        return self.items[place] if place < len(self.items) else None


def prove_in_order(program: Program) -> None:
    """Reject a program that would deadlock or mismatch messages under the rules above."""
    queues = issue_queues(program)
    at = [0] * len(queues)  # how many items of each stage have completed
    done: set[Message] = set()
    moved = True
    while moved:
        moved = False
        for stage, queue in enumerate(queues):
            while isinstance(item := queue.at(at[stage]), StageTask) and _arrived(item, queue, at[stage], program):
                at[stage] += 1
                moved = True
        issued = [queue.at(place) for queue, place in zip(queues, at, strict=True)]
        open_ = [item if isinstance(item, MessageBatch) else None for item in issued]
        for batch in open_:
            for message in batch.messages if batch is not None else []:
                ends = open_[message.sender], open_[message.receiver]
                if message not in done and all(end is not None and message in end.messages for end in ends):
                    done.add(message)
                    moved = True
        for stage, batch in enumerate(open_):
            if batch is not None and done.issuperset(batch.messages):
                at[stage] += 1
                moved = True
    stuck = [stage for stage, queue in enumerate(queues) if at[stage] < len(queue.items)]
    if stuck:
        waits = ", ".join(_says(stage, queues[stage].items[at[stage]], program) for stage in stuck)
        raise PlanError(f"messages in order deadlock: {waits}")


def issue_queues(program: Program) -> list[IssueQueue]:
    """What each stage issues; rejects messages that would be paired with the wrong receive."""
    sent: defaultdict[tuple[int, int], list[StageTask]] = defaultdict(list)
    received: defaultdict[tuple[int, int], list[StageTask]] = defaultdict(list)
    found: list[IssueQueue] = []
    for number, steps in enumerate(program.stages):
        queue = IssueQueue()
        for step in steps:
            if step.kind == "run":
                queue.items.append(step.task)
                continue
            channel = (outgoing if step.kind == "send" else incoming)(step.task, program.schedule)
            assert channel is not None, f"stage {number} has no neighbour for {step.kind} {step.task}"
            known = (sent if step.kind == "send" else received)[channel.sender, channel.receiver]
            known.append(step.task if step.kind == "receive" else cast(StageTask, reader(step.task, program.schedule)))
            message = Message(channel.sender, channel.receiver, len(known) - 1)
            end = MessageEnd(message.sender if step.kind == "receive" else message.receiver, step.kind == "receive")
            batch = queue.items[-1] if queue.items else None
            if not isinstance(batch, MessageBatch) or not joins(batch.last, end):
                batch = MessageBatch(end)
                queue.items.append(batch)
            batch.messages.append(message)
            batch.last = end
            if step.kind == "receive":
                queue.waits[step.task] = len(queue.items) - 1
        found.append(queue)
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


def _arrived(task: StageTask, queue: IssueQueue, at: int, program: Program) -> bool:
    """True if the task's message, if any, has come."""
    return incoming(task, program.schedule) is None or queue.waits.get(task, at) < at


def _says(stage: int, item: Issued, program: Program) -> str:
    if isinstance(item, StageTask):
        return f"stage {stage} waits to run {name(item, program.schedule)}"
    return f"stage {stage} waits for messages with stage {item.last.peer}"
