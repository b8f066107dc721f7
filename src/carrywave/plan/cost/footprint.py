"""Computes the memory of a plan on one batch shape from its micro-batches, chunks and load. Needs no times, so no profile."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise

from carrywave.plan.cost.link_memory import Links
from carrywave.plan.cost.memory import Load, Memory, Split, most_held, one_micro_batch, stage_memory
from carrywave.plan.cost.programs import loads_of, slots_of
from carrywave.plan.cost.transports import DEVICE_MEMORY, Transports
from carrywave.plan.cost.units import BatchShape, Units
from carrywave.plan.plan import Plan


class Footprint:
    """One plan, without its cuts, on one batch shape."""

    def __init__(self, plan: Plan, shape: BatchShape, units: Units, transports: Transports | None = None) -> None:
        self.plan, self.shape, self.units, self.transports = plan, shape, units, transports or Transports()
        lanes = max(1, -(-shape.lanes // plan.replicas))
        self.lanes = units.micro_batches(plan, lanes) * units.accumulate
        self.chunk_steps = shape.steps if units.whole or plan.chunk_steps is None else min(plan.chunk_steps, shape.steps)
        self.chunks = -(-shape.steps // self.chunk_steps)
        self.counts = (self.chunks,) * len(self.lanes)
        self.defer_weights = self.chunks > 1 and not plan.recompute
        self.share_head = plan.shares_head and not units.pooled
        self._memory: dict[tuple[Load, int, int], Memory] = {}

    def most_held(self, stage: int) -> Load:
        """An upper bound on a stage's load, without building a schedule."""
        if self.plan.stages == 1 or len(self.counts) == 1:
            return one_micro_batch(self.chunks, defer_weights=self.defer_weights)
        return most_held(self.chunks, len(self.counts), self.plan.stages - 1 - stage, defer_weights=self.defer_weights)

    def memory(self, stage: int, first: int, last: int, load: Load | None = None) -> Memory:
        """Bytes of units [first, last) as this stage, with the given load or, by default, that of the schedule."""
        if load is None:
            # A single stage runs batches and micro-batches one after another and holds one at a time.
            counts = self.counts if self.plan.stages > 1 else self.counts[:1]
            load = loads_of(self.plan.stages, counts, self.share_head, self.defer_weights)[stage]
        first, last = self.units.alike(first, last)
        key = load, first, last
        needed = self._memory.get(key)
        if needed is None:
            needed = self._memory[key] = stage_memory(self.units, first, last, load, self.split)
        return needed

    @cached_property
    def split(self) -> Split:
        """The properties of the plan that memory depends on, apart from the cuts."""
        return Split(
            max(self.lanes),
            self.chunk_steps,
            self.shape.steps,
            sum(self.lanes) // self.units.accumulate,
            self.defer_weights,
            bool(self.plan.recompute),
            self.share_head,
            reduced=self.plan.replicas > 1 and not self.units.outer,
            segment=self.plan.segment(self.chunks),
            links=self.shared,
        )

    @cached_property
    def shared(self) -> Links:
        """What of the plan's traffic lies in device memory."""
        messages, sums = (way == DEVICE_MEMORY for way in (self.transports.messages, self.transports.sums))
        slots = slots_of(self.plan.stages, self.counts, self.share_head, self.defer_weights) if messages else 1
        return Links(messages, self.plan.replicas if sums else 1, self.plan.stages, slots)


def largest_stage(units: Units, plan: Plan, transports: Transports | None = None) -> Memory:
    """Bytes of the stage that needs the most memory, on the batch shape that needs the most. `transports`: how workers reach each other."""
    spans = list(pairwise(plan.edges(len(units))))
    cases = [Footprint(plan, shape, units, transports) for shape in units.shapes]
    each = (case.memory(stage, first, last) for case in cases for stage, (first, last) in enumerate(spans))
    return max(each, key=lambda memory: memory.total)
