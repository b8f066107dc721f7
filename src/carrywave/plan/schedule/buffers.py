"""Counts the buffers that messages need when a sender writes them straight into the receiver's memory, and proves that they suffice.

There, a send does not wait for a posted receive: it needs a free place. Each channel has *slots*, each of which holds all messages of one
micro-batch, next to each other. Micro-batch m, counted by first messages, uses slot m modulo their number, and may be written once the
receiver has finished micro-batch m - slots altogether: it reads messages in place, some of them until the weight gradients are computed.
And each channel has *signals*, by which the sender tells that a message has arrived, unless one that it sends later is read before: whoever
has waited for that one need not wait again. So a shared head, which reads the last chunks first, needs few of them. The n-th message that
is told of uses signal n modulo their number, which must have been read before it is raised again.

Both numbers are counted along one global order of the tasks: as many as keep a send from ever waiting if tasks run in that order. Whatever
order they run in, the task that is earliest in the global order never waits for a later one, so nothing can deadlock; `prove_in_place`
shows it by execution.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from carrywave.errors import PlanError
from carrywave.plan.schedule.messages import Channel, Program, global_order, incoming, outgoing
from carrywave.plan.schedule.schedule import StageTask, name, reader, source

LEAST_BYTES = 1 << 20  # of memory that two stages share


def shared_bytes(size: int, *, least: int = LEAST_BYTES) -> int:
    """The size of shared memory that is made for `size` bytes: a power of two, so that batches of other shapes find it large enough."""
    return 1 << (max(size, least, 1) - 1).bit_length()


@dataclass(frozen=True)
class Places:
    """The buffers of one channel."""

    slots: int  # micro-batches whose messages are held at once
    signals: int  # messages that may be told of before the first of them is read
    told: tuple[int, ...]  # the messages that are told of, each by its place among those sent


def places(program: Program) -> dict[Channel, Places]:
    """The fewest buffers with which no send waits, if tasks run in the global order."""
    order = global_order(program.schedule)
    ends: defaultdict[tuple[int, int], int] = defaultdict(int)  # the last turn of each (stage, micro-batch)
    for task, turn in order.items():
        at = task.stage, task.micro_batch
        ends[at] = max(ends[at], turn)
    found: dict[Channel, Places] = {}
    for line, sent in sends(program).items():
        reads = [order[cast(StageTask, reader(task, program.schedule))] for task in sent]
        begun: dict[int, int] = {}  # the turn of each micro-batch's first message
        for task in sent:
            begun.setdefault(task.micro_batch, order[task])
        told = _told(reads)
        signals = _fewest([reads[number] for number in told], [order[sent[number]] for number in told])
        slots = _fewest([ends[line.receiver, part] for part in begun], list(begun.values()))
        found[line] = Places(slots, signals, told)
    return found


def _told(reads: Sequence[int]) -> tuple[int, ...]:
    """The messages before which no later one is read, given when each of them is."""
    found: list[int] = []
    for number in reversed(range(len(reads))):
        if not found or reads[number] < reads[found[-1]]:
            found.append(number)
    return tuple(reversed(found))


def _fewest(freed: list[int], taken: list[int]) -> int:
    """The smallest ring in which place n - ring is freed before place n is taken, for all n."""
    for ring in range(1, len(taken)):
        if all(freed[n - ring] < taken[n] for n in range(ring, len(taken))):
            return ring
    return len(taken)


def sends(program: Program) -> dict[Channel, list[StageTask]]:
    """The tasks whose outputs travel on each channel, in the order in which they are sent."""
    found: defaultdict[Channel, list[StageTask]] = defaultdict(list)
    for steps in program.stages:
        for step in steps:
            if step.kind == "send":
                found[cast(Channel, outgoing(step.task, program.schedule))].append(step.task)
    return dict(found)


def prove_in_place(program: Program, held: dict[Channel, Places] | None = None) -> None:
    """Reject a program that would deadlock with these buffers. Waits only ever end, so one execution stands for all."""
    _Proof(program, places(program) if held is None else held).execute()


class _Proof:
    def __init__(self, program: Program, held: dict[Channel, Places]) -> None:
        self.program, self.held = program, held
        self.at = [0] * len(program.stages)
        self.sent: defaultdict[Channel, list[StageTask]] = defaultdict(list)
        self.read: defaultdict[Channel, set[StageTask]] = defaultdict(set)  # by sending task: a shared head may read out of order
        self.awaited: defaultdict[Channel, int] = defaultdict(lambda: -1)  # the last message that was waited for
        self.numbers = {(line, task): number for line, tasks in sends(program).items() for number, task in enumerate(tasks)}
        self.left: defaultdict[tuple[int, int], int] = defaultdict(int)  # tasks yet to run, by stage and micro-batch
        for steps in program.stages:
            for step in steps:
                self.left[step.task.stage, step.task.micro_batch] += step.kind == "run"

    def execute(self) -> None:
        stages = self.program.stages
        moved = True
        while moved:
            moved = False
            for stage, steps in enumerate(stages):
                while self.at[stage] < len(steps) and self._take(steps[self.at[stage]].kind, steps[self.at[stage]].task):
                    self.at[stage] += 1
                    moved = True
        stuck = [steps[at] for steps, at in zip(stages, self.at, strict=True) if at < len(steps)]
        if stuck:
            waits = ", ".join(f"stage {step.task.stage} waits to {step.kind} {name(step.task, self.program.schedule)}" for step in stuck)
            raise PlanError(f"messages in device memory deadlock: {waits}; give their channels more buffers")

    def _take(self, kind: str, task: StageTask) -> bool:
        """Try one step; False if it waits."""
        if kind == "receive":
            return True
        if kind == "send":
            return self._send(task)
        line = incoming(task, self.program.schedule)
        if line is not None:
            message = cast(StageTask, source(task, self.program.schedule))
            number = self.numbers[line, message]
            if _has(self.held[line].told, number):
                if message not in self.sent[line]:
                    return False
                self.awaited[line] = max(number, self.awaited[line])
            elif self.awaited[line] < number:
                what = f"{name(message, self.program.schedule)} from stage {line.sender}"
                raise PlanError(f"stage {line.receiver} does not wait for {what}, nor for a later message; tell it of this one")
            self.read[line].add(message)
        self.left[task.stage, task.micro_batch] -= 1
        return True

    def _send(self, task: StageTask) -> bool:
        line = cast(Channel, outgoing(task, self.program.schedule))
        sent, room = self.sent[line], self.held[line]
        parts = list(dict.fromkeys(each.micro_batch for each in sent))
        place = bisect_left(room.told, len(sent)) - room.signals  # of the message that had the same signal before
        if _has(room.told, len(sent)) and place >= 0 and (not room.signals or sent[room.told[place]] not in self.read[line]):
            return False
        if task.micro_batch not in parts and len(parts) >= room.slots and self.left[line.receiver, parts[len(parts) - room.slots]]:
            return False
        sent.append(task)
        return True


def _has(told: Sequence[int], number: int) -> bool:
    place = bisect_left(told, number)
    return place < len(told) and told[place] == number
