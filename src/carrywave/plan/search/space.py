"""Enumerates the plans for a model on a cluster: numbers of replicas, stages, micro-batches and chunks. It knows no times and no bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from carrywave.plan.cost.cluster import Cluster
from carrywave.plan.cost.units import Units
from carrywave.plan.plan import Plan

CHUNKS = (1, 2, 4, 8, 16, 32, 64)  # numbers of chunks per window that are tried
MORE_CHUNKS = (256, 1024, 4096)  # the same for long windows on one stage, where chunks only save memory
LEAST_CHUNK_STEPS = 2
LEAST_LONG_CHUNK_STEPS = 16
LEAST_CHUNKS_TWICE = 64  # with fewer, their carries are no reason to recompute them too
MICRO_BATCHES = (1, 2)  # more micro-batches cost more than the idle time they fill, unless time cannot be cut or memory is short
MORE_MICRO_BATCHES = (4, 8, 16)
ALL_STAGES = 16  # every number of stages is tried up to this, only some beyond

# Up to MOST_NUMBERS candidate numbers of replicas are all tried; of more, only those at least a factor of APART apart.
MOST_NUMBERS, APART = 64, 1.06


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

    def stages(self) -> list[int]:
        """Numbers of stages to try: all up to `ALL_STAGES`, then in steps of about one eighth."""
        most = min(len(self.units), self.cluster.devices)
        numbers = list(range(1, min(most, ALL_STAGES) + 1))
        while numbers[-1] < most:
            numbers.append(min(most, numbers[-1] + max(1, numbers[-1] // 8)))
        return numbers

    def replicas(self, stages: int) -> list[int]:
        """Numbers of replicas to try: the smallest of those with the same largest share of the lanes."""
        devices, most = self.cluster.devices, self.most_lanes
        if self.use_all:
            numbers = [devices // stages] if devices % stages == 0 and devices // stages <= most else []
        else:
            before: tuple[int, ...] = ()
            numbers = []
            for replicas in range(1, min(devices // stages, most) + 1):
                shares = tuple(-(-shape.lanes // replicas) for shape in self.units.shapes)
                if shares != before:
                    numbers.append(replicas)
                before = shares
        return _thinned(numbers)

    def micro_batches(self, replicas: int, numbers: Sequence[int]) -> list[int]:
        """Those of `numbers` that leave at least one lane for every micro-batch of every replica."""
        return [micro_batches for micro_batches in numbers if micro_batches == 1 or replicas * micro_batches <= self.most_lanes]

    def chunk_steps(self) -> list[int | None]:
        """Chunk sizes to try: the whole window (None), then parts of it, longest first."""
        longest = max(shape.steps for shape in self.units.shapes)
        if self.units.whole:
            return [None]
        steps = {-(-longest // chunks) for chunks in CHUNKS}
        return [None, *sorted((each for each in steps if LEAST_CHUNK_STEPS <= each < longest), reverse=True)]

    def recomputed(self) -> list[Plan]:
        """Chunk sizes, and levels of recomputation, to try where one stage does not fit; those of the fewest bytes last."""
        longest = max(shape.steps for shape in self.units.shapes)
        chunk_steps = [steps for steps in self.chunk_steps() if steps is not None]
        if not self.units.whole:
            chunk_steps += [steps for chunks in MORE_CHUNKS if (steps := -(-longest // chunks)) >= LEAST_LONG_CHUNK_STEPS]
        once = [Plan(chunk_steps=steps, recompute=True) for steps in chunk_steps]
        return once + [replace(plan, recompute="twice") for plan in once if plan.chunks(longest) >= LEAST_CHUNKS_TWICE]

    def plans(self, group: Plan) -> Iterator[Plan]:
        """All plans to try with the group's replicas and stages; cuts and recomputation are added later, as needed."""
        if group.stages == 1:
            yield group
            return
        for micro_batches in self.micro_batches(group.replicas, MICRO_BATCHES + MORE_MICRO_BATCHES * self.units.whole):
            for steps in self.chunk_steps():
                for share_head in (False,) if self.units.pooled or self.units.whole_head else (False, True):
                    yield replace(group, chunk_steps=steps, micro_batches=micro_batches, share_head=share_head)

    def leaner(self, plan: Plan) -> Iterator[Plan]:
        """Variants that need less memory than a plan that does not fit: recomputation, more micro-batches, and on one stage also chunks.

        On one stage, micro-batches and chunks have no other benefit.
        """
        if plan.stages > 1:
            yield replace(plan, recompute=True)
            if plan.micro_batches == MICRO_BATCHES[-1] and not self.units.whole:
                for micro_batches in self.micro_batches(plan.replicas, MORE_MICRO_BATCHES):
                    yield replace(plan, micro_batches=micro_batches)
                    yield replace(plan, micro_batches=micro_batches, recompute=True)
        elif plan == Plan(plan.replicas):
            for micro_batches in self.micro_batches(plan.replicas, MICRO_BATCHES + MORE_MICRO_BATCHES):
                if micro_batches > 1:
                    yield replace(plan, micro_batches=micro_batches)
                for each in self.recomputed():
                    yield replace(plan, micro_batches=micro_batches, chunk_steps=each.chunk_steps, recompute=each.recompute)

    def leanest(self) -> Iterator[Plan]:
        """For each number of stages, the plain plan, then those that need the least memory."""
        steps = self.chunk_steps()
        for stages in self.stages():
            replicas = self.replicas(stages)
            for number in sorted({*replicas[:1], *replicas[-1:]}):
                micro_batches = self.micro_batches(number, MICRO_BATCHES + MORE_MICRO_BATCHES)
                yield Plan(number, stages)
                for parts in sorted({1, micro_batches[-1]}):
                    for each in {steps[0]: None, steps[-1]: None}:
                        yield Plan(number, stages, (), each, parts, recompute=True)
                    for recomputed in self.recomputed()[-1:] if stages == 1 else ():
                        yield replace(recomputed, replicas=number, micro_batches=parts)


def _thinned(numbers: list[int]) -> list[int]:
    """All of a few numbers; of many, those at least a factor of `APART` apart, and the last."""
    if len(numbers) <= MOST_NUMBERS:
        return numbers
    kept = [numbers[0]]
    for number in numbers[1:-1]:
        if number <= ALL_STAGES or number >= APART * kept[-1]:
            kept.append(number)
    return [*kept, numbers[-1]]
