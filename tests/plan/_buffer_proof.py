"""Proves that the buffers that are counted for messages in device memory suffice, by executing a program with them."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from typing import cast

from carrywave.errors import PlanError
from carrywave.plan.schedule.buffers import Places, places, sends
from carrywave.plan.schedule.messages import Channel, Program, incoming, outgoing
from carrywave.plan.schedule.schedule import StageTask, name, source


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
        self.numbers = {(channel, task): number for channel, tasks in sends(program).items() for number, task in enumerate(tasks)}
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
        channel = incoming(task, self.program.schedule)
        if channel is not None:
            message = cast(StageTask, source(task, self.program.schedule))
            number = self.numbers[channel, message]
            if _has(self.held[channel].signalled, number):
                if message not in self.sent[channel]:
                    return False
                self.awaited[channel] = max(number, self.awaited[channel])
            elif self.awaited[channel] < number:
                what = f"{name(message, self.program.schedule)} from stage {channel.sender}"
                raise PlanError(f"stage {channel.receiver} does not wait for {what}, nor for a later message; tell it of this one")
            self.read[channel].add(message)
        self.left[task.stage, task.micro_batch] -= 1
        return True

    def _send(self, task: StageTask) -> bool:
        channel = cast(Channel, outgoing(task, self.program.schedule))
        sent, room = self.sent[channel], self.held[channel]
        parts = list(dict.fromkeys(each.micro_batch for each in sent))
        place = bisect_left(room.signalled, len(sent)) - room.signals  # of the message that had the same signal before
        if _has(room.signalled, len(sent)) and place >= 0 and (not room.signals or sent[room.signalled[place]] not in self.read[channel]):
            return False
        if task.micro_batch not in parts and len(parts) >= room.slots and self.left[channel.receiver, parts[len(parts) - room.slots]]:
            return False
        sent.append(task)
        return True


def _has(signalled: Sequence[int], number: int) -> bool:
    place = bisect_left(signalled, number)
    return place < len(signalled) and signalled[place] == number
