"""Predicts the peak memory of each stage of a plan: what it holds between steps, plus the chunks in flight at the worst moment."""

from __future__ import annotations

from dataclasses import dataclass

from carrywave.plan.cost.link_memory import NO_LINKS, Links, link_bytes
from carrywave.plan.cost.units import Units
from carrywave.plan.schedule.schedule import Schedule
from carrywave.plan.schedule.wavefront_order import MOST_WAITING, extra

INDEX_BYTES = 8  # per token index


@dataclass(frozen=True)
class Memory:
    """Bytes of one stage."""

    parameters: int
    gradients: int
    optimizer: int  # its state; and the weights that replicas agreed on, where they do not exchange at every step
    activations: int  # saved for chunks in flight and for deferred weight gradients
    carries: int
    workspace: int  # temporary memory of the running task
    links: int = 0  # buffers of messages and sums in device memory

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.carries + self.workspace + self.links


@dataclass(frozen=True)
class Load:
    """What a stage holds at once, as pairs (chunks in flight, chunks with pending weight gradients). Whatever the memory per chunk of
    each kind, one of the pairs is the worst case.
    """

    pairs: tuple[tuple[int, int], ...]

    @property
    def held(self) -> int:
        """The largest number of chunks in flight."""
        return max(held for held, _ in self.pairs)


def one_micro_batch(chunks: int, *, defer_weights: bool) -> Load:
    """The load with a single micro-batch: every stage runs all chunks forward and then backward, whatever its position."""
    return Load(((chunks, 0), (0, chunks)) if defer_weights and chunks > 1 else ((chunks, 0),))


def most_held(chunks: int, micro_batches: int, distance: int, *, defer_weights: bool) -> Load:
    """An upper bound on the load of a stage `distance` stages before the last, from the wavefront's limits on chunks in flight."""
    held = min(chunks * micro_batches, chunks + extra(chunks, distance))
    return Load(((held, chunks * min(micro_batches, MOST_WAITING) if defer_weights and chunks > 1 else 0),))


def loads(schedule: Schedule) -> tuple[Load, ...]:
    """The load of each stage. A chunk is in flight from its forward to the end of its backward, then its weight gradients, if deferred, are
    pending until the end of its micro-batch's task W.
    """
    stage_loads = []
    for tasks in schedule.stages:
        held = deferred = 0
        most: dict[int, int] = {}  # number pending -> most in flight
        for task in tasks:
            held += task.phase == "F"
            most[deferred] = max(held, most.get(deferred, 0))
            if task.phase == "B":
                held -= 1
                deferred += task.micro_batch in schedule.deferred
            if task.phase == "W":
                deferred -= schedule.chunks[task.micro_batch]
        stage_loads.append(Load(_hull(most)))
    return tuple(stage_loads)


def _hull(most: dict[int, int]) -> tuple[tuple[int, int], ...]:
    """The pairs that are the worst case for some weighting of the two: the upper right of their convex hull."""
    kept: list[tuple[int, int]] = []
    for deferred, held in sorted(most.items(), reverse=True):
        while len(kept) > 1 and _inside(kept[-2], kept[-1], (held, deferred)):
            kept.pop()
        if not kept or held > kept[-1][0]:
            kept.append((held, deferred))
    return tuple(reversed(kept))


def _inside(one: tuple[int, int], middle: tuple[int, int], other: tuple[int, int]) -> bool:
    """True if the middle pair lies on or below the line between the others, with `held` plotted over decreasing `deferred`."""
    return (middle[0] - one[0]) * (one[1] - other[1]) <= (other[0] - one[0]) * (one[1] - middle[1])


@dataclass(frozen=True)
class Split:
    """The properties of a plan that memory depends on, apart from the cuts."""

    lanes: int  # in the largest micro-batch
    steps: int  # per chunk
    window: int  # steps in the whole window
    all_lanes: int  # of the replica
    defer_weights: bool  # weight gradients are deferred
    recompute: bool
    share_head: bool
    reduced: bool  # gradients are all-reduced, in separate buffers
    segment: int = 1  # chunks from one carry that is kept to the next
    links: Links = NO_LINKS  # what lies in device memory that workers share


def stage_memory(units: Units, first: int, last: int, load: Load, split: Split) -> Memory:
    """Bytes of a stage with units [first, last)."""
    parameters, gradients, optimizer = _fixed(units, first, last, split)
    e = units.activation_bytes
    chunk = split.lanes * split.steps
    kept, deferred, entering, carry, work, widest = _numbers(units, first, last, chunk, split.share_head)
    if split.links.messages and first > 0:
        entering = 0  # messages are read in place, in the buffers of the links
    flight = (entering if split.recompute else entering + kept) * chunk * e
    pairs = load.pairs
    if split.defer_weights and units.activation_bytes < units.parameter_bytes:
        # In half precision, on GPUs, kernels hold what they saved of a window until the backward of its first chunk, when all of its
        # gradients are pending.
        pairs = ((load.held, max(pending for _, pending in pairs)),)
    activations = max(held * flight + pending * deferred * chunk * e for held, pending in pairs)
    # The running chunk's temporaries; deferred gradients instead need a second copy of the largest unit's pending rows, over all chunks.
    workspace = (work + (kept * chunk if split.recompute else 0)) * e
    if split.defer_weights:
        workspace = max(workspace, widest * split.lanes * split.window * e)
    # The carries at the starts of segments, and those within the one that is being recomputed.
    entered = -(-load.held // split.segment) + split.segment - 1
    carries = carry * e * (split.all_lanes + split.lanes * (entered + 1))
    if units.activation_bytes < units.parameter_bytes:  # the layers read a lower-precision copy of the weights
        workspace += parameters * units.activation_bytes // units.parameter_bytes
    links = link_bytes(units, first, last, split.links, lanes=split.lanes, window=split.window, share_head=split.share_head)
    return Memory(parameters, gradients, optimizer, activations, carries, workspace, links)


def _fixed(units: Units, first: int, last: int, split: Split) -> tuple[int, int, int]:
    parameters = units.parameters(first, last, share_head=split.share_head) * units.parameter_bytes
    return parameters, parameters * (2 if split.reduced else 1), parameters * (units.outer + units.states)


def _numbers(units: Units, first: int, last: int, chunk: int, share_head: bool) -> tuple[int, int, int, int, int, int]:
    """Elements of a stage: kept, pending and input, per lane and step; carry, per lane; its largest unit's work, for a chunk of this many
    lanes times steps; and its largest unit's pending.
    """
    held = list(units.units[first:last])
    head = units.units[-1]
    if share_head and last == len(units):  # a shared head's logits live only while it runs, on whichever stage that is
        held.pop()
    return (
        sum(unit.kept for unit in held),
        sum(unit.deferred for unit in held),
        units.units[first].width_in or -(-INDEX_BYTES // units.activation_bytes),
        sum(unit.carry for unit in held),
        max([unit.work * chunk for unit in held] + [(head.work + head.kept) * chunk] * share_head, default=0),
        max([unit.deferred for unit in held], default=0),
    )
