"""Which plans there are for a model on a cluster: numbers of replicas, stages, slices, and chunks of time. No times, no bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from carrywave.plan.canonical_shards import REPLICAS
from carrywave.plan.cost.cluster import Cluster
from carrywave.plan.cost.units import Units
from carrywave.plan.plan import Plan

CHUNKS = (1, 2, 4, 8, 16, 32, 64)  # that a window is cut into
LEAST_CHUNK_STEPS = 2
SLICES = (1, 2)  # more cost more than they fill in, unless time cannot be cut or memory is short
MORE_SLICES = (4, 8, 16)
ALL_STAGES = 16  # up to so many stages all numbers of them are tried, beyond it some

MOST_NUMBERS, APART = 64, 1.06  # of replicas that are all tried; more of them are at least so far apart


@dataclass(frozen=True)
class Space:
    """The plans of one model on one cluster; with `use_all`, those that leave no device idle."""

    units: Units
    cluster: Cluster
    use_all: bool = False

    @property
    def most_lanes(self) -> int:
        """Of the batch that has most."""
        return max(shape.lanes for shape in self.units.shapes)

    def stages(self) -> list[int]:
        """Numbers of stages: all of a few; of many those in steps of about an eighth."""
        # Stages change the order of sums, and a run that is to be reproducible gives the same bytes on any number of devices.
        most = 1 if self.units.reproducible else min(len(self.units), self.cluster.devices)
        found = list(range(1, min(most, ALL_STAGES) + 1))
        while found[-1] < most:
            found.append(min(most, found[-1] + max(1, found[-1] // 8)))
        return found

    def replicas(self, stages: int) -> list[int]:
        """Numbers of replicas: of those whose largest share of the lanes is the same, the smallest."""
        devices, most = self.cluster.devices, self.most_lanes
        if self.use_all:
            found = [devices // stages] if devices % stages == 0 and devices // stages <= most else []
        else:
            before: tuple[int, ...] = ()
            found = []
            for replicas in range(1, min(devices // stages, most) + 1):
                shares = tuple(-(-shape.lanes // replicas) for shape in self.units.shapes)
                if shares != before:
                    found.append(replicas)
                before = shares
        if self.units.reproducible:
            return [replicas for replicas in found if replicas in REPLICAS]
        return _thinned(found)

    def slices(self, replicas: int, numbers: Sequence[int]) -> list[int]:
        """Those numbers of slices of which each has a lane on every replica."""
        if self.units.reproducible:
            return [1]
        return [slices for slices in numbers if slices == 1 or replicas * slices <= self.most_lanes]

    def chunk_steps(self) -> list[int | None]:
        """Steps of a chunk: all of the window, or a part of it, the longest first."""
        longest = max(shape.steps for shape in self.units.shapes)
        if self.units.whole:
            return [None]
        steps = {-(-longest // chunks) for chunks in CHUNKS}
        return [None, *sorted((each for each in steps if LEAST_CHUNK_STEPS <= each < longest), reverse=True)]

    def plans(self, group: Plan) -> Iterator[Plan]:
        """All that is tried with so many replicas and stages, without cuts and recomputation, which come where they are needed."""
        if group.stages == 1:
            yield group
            return
        for slices in self.slices(group.replicas, SLICES + MORE_SLICES * self.units.whole):
            for steps in self.chunk_steps():
                for share_head in (False,) if self.units.pooled else (False, True):
                    yield replace(group, chunk_steps=steps, slices=slices, share_head=share_head)

    def leaner(self, plan: Plan) -> Iterator[Plan]:
        """What takes less memory than a plan that does not fit: recomputation; on one stage slices and chunks, which bring nothing else."""
        if plan.stages > 1:
            yield replace(plan, recompute=True)
            if plan.slices == SLICES[-1] and not self.units.whole:
                for slices in self.slices(plan.replicas, MORE_SLICES):
                    yield replace(plan, slices=slices)
                    yield replace(plan, slices=slices, recompute=True)
        elif plan == Plan(plan.replicas):
            for slices in self.slices(plan.replicas, SLICES + MORE_SLICES):
                if slices > 1:
                    yield replace(plan, slices=slices)
                for steps in self.chunk_steps():
                    if steps is not None:
                        yield replace(plan, slices=slices, chunk_steps=steps, recompute=True)

    def leanest(self) -> Iterator[Plan]:
        """The plans that take least memory, the plain one first."""
        steps = self.chunk_steps()
        for stages in self.stages():
            replicas = self.replicas(stages)
            for number in sorted({*replicas[:1], *replicas[-1:]}):
                yield Plan(number, stages)
                slices = self.slices(number, SLICES + MORE_SLICES)
                for parts in sorted({1, slices[-1]}):
                    for each in {steps[0]: None, steps[-1]: None}:
                        yield Plan(number, stages, (), each, parts, recompute=True)


def _thinned(numbers: list[int]) -> list[int]:
    """All of a few numbers; of many those that are some percent apart, and the last."""
    if len(numbers) <= MOST_NUMBERS:
        return numbers
    found = [numbers[0]]
    for number in numbers[1:-1]:
        if number <= ALL_STAGES or number >= APART * found[-1]:
            found.append(number)
    return [*found, numbers[-1]]
