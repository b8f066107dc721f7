"""Predicts the seconds of an optimizer step and the bytes of each stage of a plan, before anything runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from carrywave.plan.cluster import Cluster
from carrywave.plan.cost import PlanCost, UnitCosts
from carrywave.plan.memory import Memory
from carrywave.plan.plan import Plan
from carrywave.plan.simulation import Timeline
from carrywave.plan.units import Units


@dataclass(frozen=True)
class Prediction:
    """The predicted time, memory and traffic of a plan."""

    plan: Plan
    seconds: float  # per optimizer step
    tokens_per_second: float
    memory: tuple[Memory, ...]  # of each stage
    limit_bytes: int  # of each device
    timeline: Timeline  # for the batch shape with the largest share of all steps
    sent_bytes: int  # between stages, by all workers, per step
    reduced_bytes: int  # gradients that a worker all-reduces with other replicas, on the largest stage


class Predictor:
    """Predicts plans for one model on one cluster, and keeps intermediate results."""

    def __init__(self, units: Units, cluster: Cluster) -> None:
        self.units, self.cluster = units, cluster
        self._costs: dict[int, UnitCosts] = {}
        self._cases: dict[Plan, tuple[PlanCost, ...]] = {}
        self._cuts: dict[tuple[object, ...], tuple[int, ...]] = {}

    def cases(self, plan: Plan) -> tuple[PlanCost, ...]:
        """The plan on each batch shape; independent of the cuts."""
        key = replace(plan, cuts=())
        if key not in self._cases:
            placed = self.cluster.place(plan.replicas, plan.stages)
            if placed.crowd not in self._costs:
                self._costs[placed.crowd] = UnitCosts(self.units, self.cluster.profile, placed.crowd)
            costs = self._costs[placed.crowd]
            self._cases[key] = tuple(PlanCost(plan, shape, self.cluster, placed, costs) for shape in self.units.shapes)
        return self._cases[key]

    def predict(self, plan: Plan) -> Prediction:
        """Simulate a step of a plan. Memory is reported, not checked."""
        edges = plan.edges(len(self.units))
        plan = replace(plan, cuts=edges[1:-1])
        cases, most = self.cases(plan), max(range(len(self.units.shapes)), key=lambda i: self.units.shapes[i].share)
        lines = [case.simulate(edges) for case in cases]
        seconds = self._mean([line.seconds for line in lines]) + self.cluster.profile.step_seconds
        return Prediction(
            plan,
            seconds,
            self.units.tokens / seconds,
            tuple(self.memory(plan, stage, *span) for stage, span in enumerate(pairwise(edges))),
            self.limit(plan),
            lines[most],
            round(plan.replicas * self._mean([float(case.sent_bytes(edges)) for case in cases])),
            max(cases[0].parameters(edges)) * self.units.parameter_bytes if plan.replicas > 1 else 0,
        )

    def estimate(self, plan: Plan) -> float:
        """Seconds of a step by a formula, a little less exactly than `predict`."""
        edges = plan.edges(len(self.units))
        return self._mean([case.estimate(edges) for case in self.cases(plan)])

    def memory(self, plan: Plan, stage: int, first: int, last: int) -> Memory:
        """Memory of units [first, last) as this stage of a plan, for the batch shape that needs the most."""
        return max((case.memory(stage, first, last) for case in self.cases(plan)), key=lambda memory: memory.total)

    def limit(self, plan: Plan) -> int:
        """Bytes available to each stage."""
        profile = self.cluster.profile
        sharing = self.cases(plan)[0].placed.crowd if profile.common_memory else 1
        return profile.memory_bytes // sharing - profile.reserved_bytes

    def lack(self, plan: Plan) -> tuple[int, int]:
        """The stage of a plan that exceeds its device's memory most, and by how many bytes; these are 0 or less if the plan fits."""
        limit = self.limit(plan)
        over = [self.memory(plan, stage, *span).total - limit for stage, span in enumerate(pairwise(plan.edges(len(self.units))))]
        stage = over.index(max(over))
        return stage, over[stage]

    def fits(self, plan: Plan) -> bool:
        """True if every stage fits on its device."""
        return self.lack(plan)[1] <= 0

    def cut(self, plan: Plan) -> Plan:
        """The plan with the cuts that balance the time of its stages; with those that balance memory if one of these would not fit."""
        key = plan.replicas, plan.stages, plan.micro_batches, plan.shares_head
        if key not in self._cuts:
            sums = list(accumulate(self._unit_seconds(plan), initial=0.0))
            self._cuts[key] = balanced(len(self.units), plan.stages, lambda stage, first, last: sums[last] - sums[first])
        timed = replace(plan, cuts=self._cuts[key])
        if plan.stages == 1 or self.fits(timed):
            return timed
        return replace(plan, cuts=balanced(len(self.units), plan.stages, lambda *where: float(self.memory(plan, *where).total)))

    def _unit_seconds(self, plan: Plan) -> list[float]:
        """Seconds of each unit in a step; a shared head counts for no stage."""
        cases = self.cases(plan)

        def seconds(unit: int) -> float:
            return self._mean([sum(case.costs(unit, lanes, case.shape.steps).all for lanes in case.lanes) for case in cases])

        head = len(self.units) - 1
        return [0.0 if unit == head and cases[0].share_head else seconds(unit) for unit in range(head + 1)]

    def _mean(self, times: Sequence[float]) -> float:
        """The mean over batch shapes, weighted by the number of batches: a shape's share of the steps over the steps in a batch."""
        weights = [shape.share / (shape.lanes * shape.steps) for shape in self.units.shapes]
        return sum(weight * time for weight, time in zip(weights, times, strict=True)) / sum(weights)


def balanced(units: int, stages: int, cost: Callable[[int, int, int], float]) -> tuple[int, ...]:
    """The first unit of every stage but the first, such that the largest cost (of stage, first unit, end) is smallest."""
    best: list[tuple[float, tuple[int, ...]]] = [(cost(0, 0, end), ()) if end else (math.inf, ()) for end in range(units + 1)]
    for stage in range(1, stages):
        best = [
            min(((max(best[first][0], cost(stage, first, end)), (*best[first][1], first)) for first in range(stage, end)), default=best[0])
            for end in range(units + 1)
        ]
    return best[units][1]
