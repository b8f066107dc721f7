"""How a plan cuts a batch: the steps of each chunk, and the lanes of each micro-batch on each replica."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from carrywave.data.loader import Share
from carrywave.plan import canonical_shards
from carrywave.plan.plan import Plan
from carrywave.step.micro_batches import bounds, count_of

Axis = Literal["time", "lanes", "both"]
Span = tuple[int, int]  # half-open


class Piece(NamedTuple):
    """Steps [first, end) of lanes [low, high)."""

    first: int
    end: int
    low: int
    high: int


@dataclass(frozen=True)
class Cut:
    """The parts that steps and lanes are cut into; every part of the one meets every part of the other."""

    times: tuple[Span, ...]
    lanes: tuple[Span, ...]

    @staticmethod
    def none(steps: int, lanes: int) -> Cut:
        """Everything in one piece."""
        return Cut(((0, steps),), ((0, lanes),))

    @property
    def pieces(self) -> list[Piece]:
        """The pieces, in the order in which a lane's steps follow each other."""
        return [Piece(*times, *lanes) for lanes in self.lanes for times in self.times]

    @property
    def axis(self) -> Axis | None:
        """What is cut."""
        if len(self.times) > 1:
            return "both" if len(self.lanes) > 1 else "time"
        return "lanes" if len(self.lanes) > 1 else None

    @property
    def alone(self) -> tuple[Cut, ...]:
        """If both are cut, the cut of each with the other left whole."""
        if self.axis != "both":
            return ()
        whole = Cut.none(self.times[-1][1], self.lanes[-1][1])
        return replace(whole, times=self.times), replace(whole, lanes=self.lanes)


class Extent(NamedTuple):
    """How large batches are, how small their pieces where they are cut, and whether something in them is missing."""

    steps: int
    lanes: int
    least_steps: int
    least_lanes: int
    masked: bool

    def joined(self, other: Extent) -> Extent:
        """That of two batches together."""
        return Extent(
            max(self.steps, other.steps),
            max(self.lanes, other.lanes),
            min(self.least_steps, other.least_steps),
            min(self.least_lanes, other.least_lanes),
            self.masked or other.masked,
        )


def extent_of(cut: Cut, *, masked: bool) -> Extent:
    """The extent of a batch that is cut so."""
    steps, lanes = ([end - first for first, end in spans] for spans in (cut.times, cut.lanes))
    least_steps, least_lanes = (min(sizes) if len(sizes) > 1 else sys.maxsize for sizes in (steps, lanes))
    return Extent(sum(steps), sum(lanes), least_steps, least_lanes, masked)


def cut_of(plan: Plan, steps: int, lanes: int, *, whole_time: bool, shards: bool) -> Cut:
    """The pieces that a step makes of a full batch. `whole_time`: time is never cut; `shards`: lanes run in canonical shards."""
    count = 1 if whole_time else plan.chunks(steps)
    size = steps if plan.chunk_steps is None or count == 1 else plan.chunk_steps
    times = tuple((first, min(first + size, steps)) for first in range(0, steps, size))
    if shards:
        held = [canonical_shards.bounds(lanes, shard) for shard in range(canonical_shards.SHARDS)]
    else:
        held = [Share(replica, plan.replicas).bounds(lanes) for replica in range(plan.replicas)]
    spans = [
        (low + first, low + end) for low, high in held if low < high for first, end in bounds(high - low, count_of(plan, high - low, lanes))
    ]
    return Cut(times, tuple(spans))
