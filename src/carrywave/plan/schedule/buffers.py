"""Counts the buffers that messages need when a sender writes them straight into the receiver's memory.

There, a send does not wait for a posted receive: it needs a free place. Each channel has *slots*, each of which holds all messages of one
micro-batch, next to each other. Micro-batch m, counted by first messages, uses slot m modulo their number, and may be written once the
receiver has finished micro-batch m - slots altogether: it reads messages in place, some of them until the weight gradients are computed.
And each channel has *signals*, by which the sender says that a message has arrived, unless one that it sends later is read before: whoever
has waited for that one need not wait again. So a shared head, which reads the last chunks first, needs few of them. The n-th message that
is signalled uses signal n modulo their number, which must have been read before it is raised again.

Both numbers are counted along one global order of the tasks: as many as keep a send from ever waiting if tasks run in that order. Whatever
order they run in, the task that is earliest in the global order never waits for a later one, so nothing can deadlock; the tests show it by
execution.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from carrywave.plan.schedule.messages import Channel, Program, global_order, outgoing
from carrywave.plan.schedule.schedule import StageTask, reader


@dataclass(frozen=True)
class Places:
    """The buffers of one channel."""

    slots: int  # micro-batches whose messages are held at once
    signals: int  # messages that may be signalled before the first of them is read
    signalled: tuple[int, ...]  # the messages that are signalled, each by its place among those sent


def places(program: Program) -> dict[Channel, Places]:
    """The fewest buffers with which no send waits, if tasks run in the global order."""
    order = global_order(program.schedule)
    ends: defaultdict[tuple[int, int], int] = defaultdict(int)  # the last turn of each (stage, micro-batch)
    for task, turn in order.items():
        at = task.stage, task.micro_batch
        ends[at] = max(ends[at], turn)
    by_channel: dict[Channel, Places] = {}
    for channel, sent in sends(program).items():
        reads = [order[cast(StageTask, reader(task, program.schedule))] for task in sent]
        begun: dict[int, int] = {}  # the turn of each micro-batch's first message
        for task in sent:
            begun.setdefault(task.micro_batch, order[task])
        signalled = _signalled(reads)
        signals = _fewest([reads[number] for number in signalled], [order[sent[number]] for number in signalled])
        slots = _fewest([ends[channel.receiver, part] for part in begun], list(begun.values()))
        by_channel[channel] = Places(slots, signals, signalled)
    return by_channel


def _signalled(reads: Sequence[int]) -> tuple[int, ...]:
    """The messages before which no later one is read, given when each of them is."""
    signalled: list[int] = []
    for number in reversed(range(len(reads))):
        if not signalled or reads[number] < reads[signalled[-1]]:
            signalled.append(number)
    return tuple(reversed(signalled))


def _fewest(freed: list[int], taken: list[int]) -> int:
    """The smallest ring in which place n - ring is freed before place n is taken, for all n."""
    for ring in range(1, len(taken)):
        if all(freed[n - ring] < taken[n] for n in range(ring, len(taken))):
            return ring
    return len(taken)


def sends(program: Program) -> dict[Channel, list[StageTask]]:
    """The tasks whose outputs travel on each channel, in the order in which they are sent."""
    by_channel: defaultdict[Channel, list[StageTask]] = defaultdict(list)
    for steps in program.stages:
        for step in steps:
            if step.kind == "send":
                by_channel[cast(Channel, outgoing(step.task, program.schedule))].append(step.task)
    return dict(by_channel)
