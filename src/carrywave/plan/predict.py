"""Predicts the seconds of an optimizer step and the bytes of each stage of a plan, before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from carrywave.plan.cluster import Cluster, Placement
from carrywave.plan.cost import PlanCost, UnitCosts
from carrywave.plan.memory import Memory
from carrywave.plan.plan import Plan
from carrywave.plan.profile import Profile
from carrywave.plan.simulation import Timeline
from carrywave.plan.transports import Transports
from carrywave.plan.units import Units

_HALVINGS = 30  # of the range in which the time of the slowest stage is looked for


@dataclass(frozen=True)
class StagePrediction:
    """One stage of a plan: its units [first, last), its seconds of work per step, and its memory."""

    first: int
    last: int
    seconds: float
    memory: Memory
    limit_bytes: int


@dataclass(frozen=True)
class Prediction:
    """The predicted time, memory and traffic of a plan."""

    plan: Plan
    seconds: float  # per optimizer step
    tokens_per_second: float
    stages: tuple[StagePrediction, ...]
    timeline: Timeline  # for the batch shape with the largest share of all steps
    bubble: float
    sent_bytes: int  # between stages, by all workers, per step
    reduced_bytes: int  # gradients that a worker all-reduces with other replicas, on the largest stage
    transports: Transports  # how workers reach each other, and what of a step is recorded
    counted: str = "tokens"  # what one step of a lane is called

    @property
    def speed(self) -> str:
        """Speed as text."""
        return f"{self.tokens_per_second:,.0f} {self.counted}/s"


class Predictor:
    """Predicts plans for one model on one cluster, and keeps intermediate results."""

    def __init__(self, units: Units, cluster: Cluster) -> None:
        self.units, self.cluster = units, cluster
        self._costs: dict[tuple[int, int], UnitCosts] = {}
        self._placed: dict[tuple[int, int], Placement] = {}
        self._cases: dict[tuple[object, ...], tuple[PlanCost, ...]] = {}

    def cases(self, plan: Plan) -> tuple[PlanCost, ...]:
        """The plan on each batch shape; independent of the cuts."""
        key = plan.replicas, plan.stages, plan.chunk_steps, plan.micro_batches, plan.recompute, plan.share_head
        if key not in self._cases:
            placed = self._place(plan)
            costs = [self._unit_costs(kind, placed.crowd) for kind in placed.kinds]
            self._cases[key] = tuple(PlanCost(plan, shape, self.units, self.cluster, placed, costs) for shape in self.units.shapes)
        return self._cases[key]

    def predict(self, plan: Plan) -> Prediction:
        """Simulate a step of a plan. Memory is reported, not checked."""
        edges = plan.edges(len(self.units))
        plan = replace(plan, cuts=edges[1:-1])
        cases, limit = self.cases(plan), self.limit(plan)
        lines = [case.simulate(edges) for case in cases]
        passes = self._mean([line.seconds for line in lines])
        seconds = passes + max(kind.step_seconds for kind in self._place(plan).kinds)
        most = max(range(len(cases)), key=lambda i: self.units.shapes[i].share)
        stages = tuple(
            StagePrediction(
                first, last, self._mean([case.busy(first, last) for case in cases]), self.memory(plan, stage, first, last), limit
            )
            for stage, (first, last) in enumerate(pairwise(edges))
        )
        return Prediction(
            plan,
            seconds,
            self.units.tokens / seconds,
            stages,
            lines[most],
            self._mean([line.bubble * line.seconds for line in lines]) / passes,
            round(plan.replicas * self._mean([float(case.sent_bytes(edges)) for case in cases])),
            max(cases[0].parameters(edges)) * self.units.parameter_bytes if plan.replicas > 1 else 0,
            cases[0].transports,
            self.units.counted,
        )

    def estimate(self, plan: Plan) -> float:
        """Seconds of a step by a formula, a little less exactly than `predict`."""
        edges = plan.edges(len(self.units))
        return self._mean([case.estimate(edges) for case in self.cases(plan)])

    def shared_out(self, plan: Plan) -> float:
        """Seconds of a step with this many replicas and stages if all work were divided evenly, without messages and sums."""
        return self._mean([case.busy(0, len(self.units)) for case in self.cases(plan)]) / plan.stages

    def memory(self, plan: Plan, stage: int, first: int, last: int) -> Memory:
        """Memory of units [first, last) as this stage of a plan, for the batch shape that needs the most."""
        return max((case.memory(stage, first, last) for case in self.cases(plan)), key=lambda memory: memory.total)

    def limit(self, plan: Plan) -> int:
        """Bytes available to each stage: those of the smallest device."""
        placed = self._place(plan)
        return min(kind.memory_bytes // (placed.crowd if kind.common_memory else 1) - kind.reserved_bytes for kind in placed.kinds)

    def lack(self, plan: Plan) -> tuple[int, int]:
        """The stage of a plan that exceeds its device's memory most, and by how many bytes; these are 0 or less if the plan fits."""
        limit = self.limit(plan)
        over = [self.memory(plan, stage, *span).total - limit for stage, span in enumerate(pairwise(plan.edges(len(self.units))))]
        stage = over.index(max(over))
        return stage, over[stage]

    def fits(self, plan: Plan) -> bool:
        """True if every stage fits on its device."""
        return self.lack(plan)[1] <= 0

    def cut(self, plan: Plan, *, by_memory: bool = False) -> Plan:
        """The plan with the cuts that balance the time of its stages, each within its device's memory; with `by_memory`, or if there are
        none, with those that balance memory.
        """
        units, limit = len(self.units), self.limit(plan)

        def num_bytes(stage: int, first: int, last: int) -> float:
            return float(self.memory(plan, stage, first, last).total)

        if by_memory:
            return replace(plan, cuts=balanced(units, plan.stages, num_bytes))
        each = [self._mean([case.busy(unit, unit + 1) for case in self.cases(plan)]) for unit in range(units)]
        sums = list(accumulate(each, initial=0.0))  # the overhead of tasks, which counts for each unit here, is small

        def seconds(stage: int, first: int, last: int) -> float:
            return sums[last] - sums[first]

        cuts = balanced(units, plan.stages, seconds)
        if not self.fits(replace(plan, cuts=cuts)):
            cuts = balanced(units, plan.stages, seconds, lambda *where: num_bytes(*where) <= limit)
        return replace(plan, cuts=cuts) if cuts or plan.stages == 1 else self.cut(plan, by_memory=True)

    def _unit_costs(self, profile: Profile, crowd: int) -> UnitCosts:
        key = id(profile), crowd
        if key not in self._costs:
            self._costs[key] = UnitCosts(self.units, profile, crowd)
        return self._costs[key]

    def _place(self, plan: Plan) -> Placement:
        key = plan.replicas, plan.stages
        if key not in self._placed:
            self._placed[key] = self.cluster.place(*key)
        return self._placed[key]

    def _mean(self, times: Sequence[float]) -> float:
        """The mean over batch shapes, weighted by the number of batches: a shape's share of the steps over the steps in a batch."""
        weights = [shape.share / (shape.lanes * shape.steps) for shape in self.units.shapes]
        return sum(weight * time for weight, time in zip(weights, times, strict=True)) / sum(weights)


OfUnits = Callable[[int, int, int], float]  # (stage, first unit, last unit + 1)


def balanced(units: int, stages: int, cost: OfUnits, allowed: Callable[[int, int, int], bool] = lambda *where: True) -> tuple[int, ...]:
    """The first unit of every stage but the first, such that the largest cost is smallest; empty if there is none that is allowed.

    Costs do not decrease with more units, so that whether a limit can be kept is seen by filling one stage after another; the smallest
    limit is found by halving.
    """

    def filled(limit: float) -> tuple[int, ...] | None:
        edges = [0]
        for stage in range(stages):
            first, most = edges[-1], units - (stages - stage - 1)
            last = first
            while last < most and cost(stage, first, last + 1) <= limit and allowed(stage, first, last + 1):
                last += 1
            if last == first:
                return None
            edges.append(last)
        return tuple(edges[1:-1]) if edges[-1] == units else None

    low, high = 0.0, max(cost(stage, 0, units) for stage in range(stages))
    best = filled(high)
    if best is None:
        return ()
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        found = filled(middle)
        if found is None:
            low = middle
        else:
            high, best = middle, found
    return best
