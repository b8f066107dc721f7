"""Bytes of each stage of a plan: what it holds between steps, and what the chunks in flight add at the worst moment."""

from __future__ import annotations

from dataclasses import dataclass

from carrywave.plan.cost.units import Units
from carrywave.plan.schedule.schedule import Schedule, extra

INDEX_BYTES = 8  # of a token


@dataclass(frozen=True)
class Memory:
    """Bytes of one stage."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int  # of chunks in flight, and what put-off gradients wait for
    carries: int
    workspace: int  # of the task at work

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.carries + self.workspace


@dataclass(frozen=True)
class Load:
    """What a stage has to hold at once: chunks in flight, and chunks whose weights' gradients are owed. One of the pairs is the worst,
    whatever a chunk of each kind takes.
    """

    pairs: tuple[tuple[int, int], ...]

    @property
    def held(self) -> int:
        """The most chunks in flight."""
        return max(held for held, _ in self.pairs)


def one_slice(chunks: int, *, put_off: bool) -> Load:
    """Where there is one slice, a stage takes all its chunks forward and then back, wherever it stands."""
    return Load(((chunks, 0), (1, chunks - 1)) if put_off and chunks > 1 else ((chunks, 0),))


def most_held(chunks: int, slices: int, distance: int, *, put_off: bool) -> Load:
    """What a stage that stands so far before the last holds at most, by the limits that a wavefront keeps to."""
    held = min(chunks * slices, chunks + extra(chunks, distance))
    return Load(((held, chunks - 1 if put_off else 0),))


def loads(schedule: Schedule, *, put_off: bool) -> tuple[Load, ...]:
    """What each stage holds. A chunk is in flight from its forward to its backward's end, and owed until that of its slice is through."""
    found = []
    for tasks in schedule.stages:
        held = owed = 0
        most: dict[int, int] = {}  # in flight, for each number owed
        for task in tasks:
            held += task.phase == "F"
            most[owed] = max(held, most.get(owed, 0))
            if task.phase == "B":
                held -= 1
                owed = 0 if task.chunk == 0 or not put_off else owed + 1
        found.append(Load(_hull(most)))
    return tuple(found)


def _hull(most: dict[int, int]) -> tuple[tuple[int, int], ...]:
    """The pairs that are the worst for some weights of the two: the upper right of their convex hull."""
    kept: list[tuple[int, int]] = []
    for owed, held in sorted(most.items(), reverse=True):
        while len(kept) > 1 and _inside(kept[-2], kept[-1], (held, owed)):
            kept.pop()
        if not kept or held > kept[-1][0]:
            kept.append((held, owed))
    return tuple(reversed(kept))


def _inside(one: tuple[int, int], middle: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether the middle pair lies on or below the line between the others, held over falling owed."""
    return (middle[0] - one[0]) * (one[1] - other[1]) <= (other[0] - one[0]) * (one[1] - middle[1])


@dataclass(frozen=True)
class Split:
    """What of a plan memory depends on, beside the cuts."""

    lanes: int  # of the largest slice
    steps: int  # of a chunk
    window: int  # steps of a slice
    all_lanes: int  # of the replica
    put_off: bool
    recompute: bool
    share_head: bool
    reduced: bool  # gradients are summed over workers, in buffers of their own


def stage_memory(units: Units, first: int, last: int, load: Load, split: Split) -> Memory:
    """The bytes of units [first, last)."""
    fixed = _fixed(units, first, last, split.share_head, split.reduced)
    kept, owed, entering, carry, work, owing = _numbers(units, first, last, split.share_head)
    e = units.activation_bytes
    chunk = split.lanes * split.steps
    flight = (entering if split.recompute else entering + kept) * chunk * e
    activations = max(held * flight + debts * owed * chunk * e for held, debts in load.pairs)
    # One more chunk at work; when gradients are paid, the rows of the largest layer once more, all of the slice together.
    workspace = (work + (kept if split.recompute else 0)) * chunk * e
    if split.put_off:
        workspace = max(workspace, owing * split.lanes * split.window * e)
    carries = carry * e * (split.all_lanes + split.lanes * (load.held + 1))
    parameters, gradients, optimizer = fixed
    if units.activation_bytes < units.parameter_bytes:  # the layers read a shorter copy of the weights
        workspace += parameters * units.activation_bytes // units.parameter_bytes
    return Memory(parameters, gradients, optimizer, activations, carries, workspace)


def _fixed(units: Units, first: int, last: int, share_head: bool, reduced: bool) -> tuple[int, int, int]:
    parameters = units.parameters(first, last, share_head=share_head) * units.parameter_bytes
    return parameters, parameters * (2 if reduced else 1), parameters * units.states


def _numbers(units: Units, first: int, last: int, share_head: bool) -> tuple[int, int, int, int, int, int]:
    """A lane and step of a stage: kept, owed, entering; of a lane: carry; and of the unit that needs most: work, owed."""
    own = list(units.units[first:last])
    head = units.units[-1]
    if share_head and last == len(units):  # its logits live only while it is at work, on whichever stage that is
        own.pop()
    return (
        sum(unit.kept for unit in own),
        sum(unit.owed for unit in own),
        units.units[first].width_in or -(-INDEX_BYTES // units.activation_bytes),
        sum(unit.carry for unit in own),
        max([unit.work for unit in own] + [head.work + head.kept] * share_head, default=0),
        max([unit.owed for unit in own], default=0),
    )
