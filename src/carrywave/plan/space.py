"""Enumerates the plans for a model on a cluster: numbers of replicas, stages, micro-batches and chunks. It knows no times and no bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from carrywave.plan.cluster import Cluster
from carrywave.plan.plan import Plan
from carrywave.plan.units import Units

CHUNKS = (2, 4, 8, 16, 32, 64)  # numbers of chunks per window that are tried, besides one
LONG_CHUNKS = (16, 64, 256, 1024)  # the same on one stage, where chunks only save memory, with recomputation
LEAST_CHUNK_STEPS = 2
LEAST_CHUNKS_TWICE = 64  # with fewer, their carries are no reason to recompute them too
MORE_MICRO_BATCHES = (4, 8, 16)  # they cost more than the idle time they fill, unless time cannot be cut or memory is short
ALL_STAGES = 16  # every number of stages is tried up to this, only some beyond


@dataclass(frozen=True)
class Space:
    """The plans for one model on one cluster; with `use_all`, only those that use every device."""

    units: Units
    cluster: Cluster
    use_all: bool = False

    @property
    def most_lanes(self) -> int:
        """Lanes of the largest batch."""
        return max(shape.lanes for shape in self.units.shapes)

    @property
    def longest(self) -> int:
        """Steps of the longest batch."""
        return max(shape.steps for shape in self.units.shapes)

    def groups(self) -> list[Plan]:
        """Numbers of replicas and stages to try: all numbers of a few stages, then in steps of about one eighth; replicas double."""
        most = min(len(self.units), self.cluster.devices)
        numbers = list(range(1, min(most, ALL_STAGES) + 1))
        while numbers[-1] < most:
            numbers.append(min(most, numbers[-1] + max(1, numbers[-1] // 8)))
        return [Plan(replicas, stages) for stages in numbers for replicas in self._replicas(stages)]

    def _replicas(self, stages: int) -> list[int]:
        most = min(self.cluster.devices // stages, self.most_lanes)
        if self.use_all:
            return [most] if most * stages == self.cluster.devices else []
        return sorted({most, *(1 << power for power in range(most.bit_length()))})

    def plans(self, group: Plan) -> Iterator[Plan]:
        """The plans to try with the group's replicas and stages."""
        if group.stages == 1:
            yield group
            return
        share = (False,) if self.units.pooled or self.units.whole_head else (False, True)
        for micro_batches in self._micro_batches(group, (1, 2, *(MORE_MICRO_BATCHES if self.units.whole else ()))):
            for steps in self._chunk_steps(CHUNKS):
                for share_head in share:
                    yield replace(group, chunk_steps=steps, micro_batches=micro_batches, share_head=share_head)

    def leaner(self, group: Plan) -> Iterator[Plan]:
        """Plans that need less memory than those of `plans`: recomputation, more micro-batches, and on one stage also chunks."""
        for micro_batches in self._micro_batches(group, (1, 2, *MORE_MICRO_BATCHES)):
            for steps in self._chunk_steps(CHUNKS if group.stages > 1 else LONG_CHUNKS):
                plan = replace(group, micro_batches=micro_batches, chunk_steps=steps)
                if group.stages > 1 or steps is None:
                    yield plan
                if group.stages > 1 or steps is not None:
                    yield replace(plan, recompute=True)
                if plan.chunks(self.longest) >= LEAST_CHUNKS_TWICE:
                    yield replace(plan, recompute="twice")

    def _chunk_steps(self, numbers: tuple[int, ...]) -> list[int | None]:
        """Chunk sizes to try: the whole window (None), then parts of it, longest first."""
        steps = set() if self.units.whole else {-(-self.longest // chunks) for chunks in numbers}
        return [None, *sorted((each for each in steps if LEAST_CHUNK_STEPS <= each < self.longest), reverse=True)]

    def _micro_batches(self, group: Plan, numbers: tuple[int, ...]) -> list[int]:
        """Those of `numbers` that leave at least one lane for every micro-batch of every replica."""
        return [number for number in numbers if number == 1 or group.replicas * number <= self.most_lanes]
