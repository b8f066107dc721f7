"""Predicts the seconds of an optimizer step and the bytes of each stage of a plan, before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from carrywave.plan.cost.case import PlanCase
from carrywave.plan.cost.cluster import Cluster, Placed
from carrywave.plan.cost.memory import Memory, one_micro_batch
from carrywave.plan.cost.profile import Piped, Profile
from carrywave.plan.cost.simulation import Timeline
from carrywave.plan.cost.stage_costs import Costs
from carrywave.plan.cost.transports import Transports
from carrywave.plan.cost.units import Units
from carrywave.plan.plan import Plan
from carrywave.plan.search import bounds
from carrywave.plan.search.partition import NoFit, balanced, no_fit


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
    """Predicts plans for one model on one cluster, and caches intermediate results."""

    def __init__(self, units: Units, cluster: Cluster, costs: dict[tuple[int, Piped, int], Costs] | None = None) -> None:
        self.units, self.cluster = units, cluster
        self._one_kind = all(host.profile is cluster.hosts[0].profile for host in cluster.hosts)
        self._costs = {} if costs is None else costs  # keyed by the profile's id; may be shared between clusters
        self._balanced: dict[tuple[object, ...], list[tuple[int, ...]]] = {}
        self._placed: dict[tuple[int, int], Placed] = {}
        self._cases: dict[tuple[object, ...], tuple[PlanCase, ...]] = {}

    def cases(self, plan: Plan) -> tuple[PlanCase, ...]:
        """The plan on each batch shape; independent of the cuts."""
        key = plan.replicas, plan.stages, plan.chunk_steps, plan.micro_batches, plan.recompute, plan.share_head
        of_plan = self._cases.get(key)
        if of_plan is None:
            of_plan = self._cases[key] = tuple(
                PlanCase(plan, shape, self.units, self.cluster, self.placed(plan.replicas, plan.stages), self.costs)
                for shape in self.units.shapes
            )
        return of_plan

    def predict(self, plan: Plan) -> Prediction:
        """Simulate a step of a plan. Memory is reported, not checked."""
        edges = plan.edges(len(self.units))
        plan = replace(plan, cuts=edges[1:-1])
        cases = self.cases(plan)
        lines = [case.simulate(edges) for case in cases]
        seconds = self._mean([case.whole_step(line.seconds) for line, case in zip(lines, cases, strict=True)])
        most = max(range(len(cases)), key=lambda i: self.units.shapes[i].share)
        # Idle time is averaged over the batch shapes, relative to the average step.
        bubble = self._mean([line.bubble * line.seconds for line in lines]) / self._mean([line.seconds for line in lines])
        memories = self.memories(plan)
        limits = self.limits(plan)
        stages = tuple(
            StagePrediction(first, last, self._mean([case.busy(stage, first, last) for case in cases]), memories[stage], limits[stage])
            for stage, (first, last) in enumerate(pairwise(edges))
        )
        sent = plan.replicas * self._mean([float(sum(line.sent_bytes)) for line in lines])
        reduced = max(cases[0].parameters(edges)) * self.units.parameter_bytes if plan.replicas > 1 else 0
        speed, counted, transports = self.units.tokens / seconds, self.units.counted, cases[0].transports
        return Prediction(plan, seconds, speed, stages, lines[most], bubble, round(sent), reduced, transports, counted)

    def bound(self, plan: Plan) -> float:
        """Lower bound on the seconds of a step."""
        edges = plan.edges(len(self.units))
        return self._mean([case.whole_step(bounds.bound(case, edges)) for case in self.cases(plan)])

    def least(self, plan: Plan) -> float:
        """Lower bound on the seconds of a step, over all possible cuts."""
        return self._mean([bounds.least(case) for case in self.cases(plan)])

    def shared_out(self, plan: Plan) -> float:
        """Seconds of a step with this many replicas and stages if all work were divided evenly."""
        return self._mean([bounds.shared_out(case) for case in self.cases(plan)])

    def balanced(self, plan: Plan) -> tuple[int, ...] | None:
        """The cuts that balance a plan's stages, ignoring memory; None if devices differ, since stages then differ in speed."""
        if not self._one_kind:
            return None
        cases = self.cases(plan)
        timed_with = cases[0].kinds[0][0].workers
        piped = tuple(case.piped for case in cases)
        how = plan.chunk_steps, plan.recompute, cases[0].share_head
        key = tuple(tuple(case.lanes) for case in cases), *how, piped, timed_with
        if key not in self._balanced:
            most = min(len(self.units), self.cluster.devices)
            self._balanced[key] = balanced(len(self.units), most, self._seconds_of(plan))
        return self._balanced[key][plan.stages - 1]

    def _seconds_of(self, plan: Plan) -> Callable[[int, int], float]:
        """A fast `slowest`, from prefix sums over the units where they give the same result: a search calls it thousands of times."""
        if any(case.kinds[0][0].side_by_side for case in self.cases(plan)):
            return lambda first, last: self.slowest(plan, 0, first, last)
        each = [self.slowest(plan, 0, unit, unit + 1) for unit in range(len(self.units))]
        tasks = self._mean([2 * sum(case.counts) * case.task_seconds for case in self.cases(plan)])
        sums = list(accumulate((seconds - tasks for seconds in each), initial=0.0))
        return lambda first, last: sums[last] - sums[first] + tasks

    def slowest(self, plan: Plan, stage: int, first: int, last: int) -> float:
        """Seconds of work per step of units [first, last) as this stage of a plan."""
        return self._mean([case.busy(stage, first, last) for case in self.cases(plan)])

    def memories(self, plan: Plan) -> tuple[Memory, ...]:
        """Memory of each stage, for the batch shape that needs the most."""
        edges = plan.edges(len(self.units))
        return tuple(self.memory(plan, stage, first, last) for stage, (first, last) in enumerate(pairwise(edges)))

    def memory(self, plan: Plan, stage: int, first: int, last: int) -> Memory:
        """Memory of units [first, last) as this stage of a plan, for the batch shape that needs the most."""
        return max((case.memory(stage, first, last) for case in self.cases(plan)), key=_total)

    def limits(self, plan: Plan) -> tuple[int, ...]:
        """Bytes available to each stage: those of the smallest device among its replicas."""
        placed = self.placed(plan.replicas, plan.stages)
        return tuple(
            min(profile.memory_bytes // (placed.crowd if profile.common_memory else 1) - profile.reserved_bytes for profile in kinds)
            for kinds in placed.profiles
        )

    def fits(self, plan: Plan) -> bool:
        """True if every stage fits on its device. An upper bound is tried first, as it needs no schedule."""
        edges, limits = plan.edges(len(self.units)), self.limits(plan)
        rough = all(
            case.memory(stage, first, last, case.most_held(stage)).total <= limits[stage]
            for stage, (first, last) in enumerate(pairwise(edges))
            for case in self.cases(plan)
        )
        return rough or all(memory.total <= limit for memory, limit in zip(self.memories(plan), limits, strict=True))

    def may_fit(self, plan: Plan) -> bool:
        """Necessary condition for fitting: all memory, divided evenly over the stages, fits. Every stage holds at least one micro-batch."""
        room = sum(self.limits(plan))
        for case in self.cases(plan):
            whole = case.memory(0, 0, len(self.units), one_micro_batch(case.chunks, defer_weights=case.defer_weights))
            if whole.total - whole.workspace > room:
                return False
        return True

    def missing(self, plan: Plan) -> NoFit:
        """By how much the best cuts into this plan's stages exceed memory; `missing_bytes` is 0 if they fit."""
        return no_fit(len(self.units), plan.stages, lambda s, a, b: self.memory(plan, s, a, b).total, self.limits(plan))

    def placed(self, replicas: int, stages: int) -> Placed:
        """The placement of the workers."""
        key = replicas, stages
        if key not in self._placed:
            self._placed[key] = self.cluster.place(replicas, stages)
        return self._placed[key]

    def costs(self, profile: Profile, *, piped: Piped, crowd: int) -> Costs:
        """Costs of the model's units on one kind of device, with `crowd` workers on its host."""
        key = id(profile), piped, crowd
        of_device = self._costs.get(key)
        if of_device is None:
            of_device = self._costs[key] = Costs(self.units, profile, piped=piped, crowd=crowd)
        return of_device

    def _mean(self, values: Sequence[float]) -> float:
        """Mean over all batches of an epoch: shapes with fewer tokens occur more often."""
        shapes = self.units.shapes
        if len(shapes) == 1:
            return values[0]
        weights = [shape.share / (shape.lanes * shape.steps) for shape in shapes]
        return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


def _total(memory: Memory) -> int:
    return memory.total
