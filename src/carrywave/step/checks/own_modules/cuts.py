"""How a plan cuts a batch: the steps of each chunk, and the lanes of each micro-batch on each replica; and how pieces are joined again."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from carrywave.data.loader import Share
from carrywave.plan.plan import Plan
from carrywave.step.passes.micro_batches import bounds

Axis = Literal["time", "lanes", "both"]
Span = tuple[int, int]  # half-open
MOST_RESETS = 8  # steps with which new sequences begin inside a lane, at which time is cut


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

    def at_resets(self, resets_TB: Tensor) -> Cut:
        """The cut with time also cut where new sequences begin inside a lane, at some of these steps."""
        begins = [step for step in resets_TB.any(1).nonzero().flatten().tolist() if step]
        some = begins[:: max(1, len(begins) // MOST_RESETS)]
        edges = sorted({*some, *(first for first, _ in self.times), self.times[-1][1]})
        return replace(self, times=tuple(pairwise(edges)))

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


def cut_of(plan: Plan, steps: int, lanes: int, *, whole_time: bool) -> Cut:
    """The pieces that a step makes of a full batch. `whole_time`: time is never cut."""
    count = 1 if whole_time else plan.chunks(steps)
    size = steps if plan.chunk_steps is None or count == 1 else plan.chunk_steps
    times = tuple((first, min(first + size, steps)) for first in range(0, steps, size))
    held = [Share(replica, plan.replicas).bounds(lanes) for replica in range(plan.replicas)]
    spans = [
        (low + first, low + end)
        for low, high in held
        if low < high
        for first, end in bounds(high - low, min(plan.micro_batches, high - low))
    ]
    return Cut(times, tuple(spans))


def joined(whole: Tensor, parts: Sequence[Tensor], cut: Cut) -> list[Tensor]:
    """The ways in which the parts can be put together to something of the shape of the whole. A head that pools gives a part for each range
    of lanes, not for each piece.
    """
    steps, spans = cut.times[-1][1], [high - low for low, high in cut.lanes]
    each = len(parts) // len(spans)
    if len(parts) not in (len(spans), len(cut.pieces)):
        return []
    lanes = [_catenated(parts[at * each : (at + 1) * each], span) for at, span in enumerate(spans)]
    shared = [way for way in lanes[0] if all(way in other for other in lanes)]
    found = [one for way in shared for one in _catenated([other[way] for other in lanes], steps).values()]
    return [one for one in found if one.shape == whole.shape]


def _catenated(parts: Sequence[Tensor], other: int) -> dict[tuple[int, bool], Tensor]:
    """The parts joined along each axis that allows it. `other` is the size of the axis that is not joined, which may have been flattened
    together with the one that is: they are then joined inside each of its rows.
    """
    if len(parts) == 1:
        return {(0, False): parts[0]}
    found: dict[tuple[int, bool], Tensor] = {}
    for dim in range(min(part.dim() for part in parts)):
        if len({(*part.shape[:dim], -1, *part.shape[dim + 1 :]) for part in parts}) > 1:
            continue
        found[dim, False] = torch.cat(list(parts), dim=dim)
        if all(part.shape[dim] and part.shape[dim] % other == 0 for part in parts):
            rows = [torch.unflatten(part, dim, (other, -1)) for part in parts]
            found[dim, True] = torch.cat(rows, dim=dim + 1).flatten(dim, dim + 1)
    return found
