"""What a plan takes: the seconds of an optimizer step and the bytes of each stage, before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from carrywave.plan.cost.case import PlanCase
from carrywave.plan.cost.cluster import Cluster, Placed
from carrywave.plan.cost.memory import Memory, one_slice
from carrywave.plan.cost.profile import Profile
from carrywave.plan.cost.simulation import Timeline
from carrywave.plan.cost.stage_costs import Costs
from carrywave.plan.cost.units import Units
from carrywave.plan.plan import Plan
from carrywave.plan.search import bounds
from carrywave.plan.search.partition import NoFit, balanced, no_fit


@dataclass(frozen=True)
class StagePrediction:
    """One stage of a plan: its units, what it works in a step, and what it holds."""

    first: int
    last: int
    seconds: float
    memory: Memory
    limit_bytes: int


@dataclass(frozen=True)
class Prediction:
    """What a plan takes, by the model's account."""

    plan: Plan
    seconds: float  # of an optimizer step
    tokens_per_second: float
    stages: tuple[StagePrediction, ...]
    timeline: Timeline  # of the batch that is seen most
    bubble: float
    sent_bytes: int  # between stages, by all workers, in a step
    reduced_bytes: int  # gradients that each worker adds up with others, most of any stage
    counted: str = "tokens"  # what a step of a lane is called

    @property
    def speed(self) -> str:
        """For people."""
        return f"{self.tokens_per_second:,.0f} {self.counted}/s"


class Predictor:
    """Predicts plans for one model on one cluster, and remembers what it has worked out."""

    def __init__(self, units: Units, cluster: Cluster, costs: dict[tuple[int, bool, int], Costs] | None = None) -> None:
        self.units, self.cluster = units, cluster
        self._one_kind = all(host.profile is cluster.hosts[0].profile for host in cluster.hosts)
        self._costs = {} if costs is None else costs  # by the profile's id; may be shared between clusters
        self._balanced: dict[tuple[object, ...], list[tuple[int, ...]]] = {}
        self._placed: dict[tuple[int, int], Placed] = {}
        self._cases: dict[tuple[object, ...], tuple[PlanCase, ...]] = {}

    def cases(self, plan: Plan) -> tuple[PlanCase, ...]:
        """The plan on each shape of batch; cuts do not matter."""
        key = plan.replicas, plan.stages, plan.chunk_steps, plan.slices, plan.recompute, plan.share_head
        found = self._cases.get(key)
        if found is None:
            found = self._cases[key] = tuple(
                PlanCase(plan, shape, self.units, self.cluster, self.placed(plan.replicas, plan.stages), self.costs)
                for shape in self.units.shapes
            )
        return found

    def predict(self, plan: Plan) -> Prediction:
        """The step of a plan, simulated. Memory is told, not judged."""
        edges = plan.edges(len(self.units))
        plan = replace(plan, cuts=edges[1:-1])
        cases = self.cases(plan)
        lines = [case.simulate(edges) for case in cases]
        seconds = self._mean([line.seconds + case.overheads.step_seconds for line, case in zip(lines, cases, strict=True)])
        most = max(range(len(cases)), key=lambda i: self.units.shapes[i].share)
        # A stage waits for all that it does not spend on its own work.
        bubble = self._mean([line.bubble * line.seconds for line in lines]) / self._mean([line.seconds for line in lines])
        memories = self.memories(plan)
        limits = self.limits(plan)
        stages = tuple(
            StagePrediction(first, last, self._mean([case.busy(stage, first, last) for case in cases]), memories[stage], limits[stage])
            for stage, (first, last) in enumerate(pairwise(edges))
        )
        sent = plan.replicas * self._mean([float(sum(line.sent_bytes)) for line in lines])
        reduced = max(cases[0].parameters(edges)) * self.units.parameter_bytes if plan.replicas > 1 else 0
        return Prediction(plan, seconds, self.units.tokens / seconds, stages, lines[most], bubble, round(sent), reduced, self.units.counted)

    def bound(self, plan: Plan) -> float:
        """Seconds that a step takes at least."""
        edges = plan.edges(len(self.units))
        return self._mean([bounds.bound(case, edges) + case.overheads.step_seconds for case in self.cases(plan)])

    def least(self, plan: Plan) -> float:
        """Seconds that a step takes at least, however the units are cut."""
        return self._mean([bounds.least(case) for case in self.cases(plan)])

    def shared_out(self, plan: Plan) -> float:
        """Seconds that a step of so many replicas and stages takes if all work could be shared out evenly."""
        return self._mean([bounds.shared_out(case) for case in self.cases(plan)])

    def balanced(self, plan: Plan) -> tuple[int, ...] | None:
        """The cuts that balance a plan's stages, whatever memory they need; none where devices differ, so that stages do."""
        if not self._one_kind:
            return None
        cases = self.cases(plan)
        timed_with = cases[0].kinds[0][0].workers
        key = tuple(tuple(case.lanes) for case in cases), plan.chunk_steps, plan.recompute, cases[0].share_head, plan.stages > 1, timed_with
        if key not in self._balanced:
            most = min(len(self.units), self.cluster.devices)
            self._balanced[key] = balanced(len(self.units), most, self._seconds_of(plan))
        return self._balanced[key][plan.stages - 1]

    def _seconds_of(self, plan: Plan) -> Callable[[int, int], float]:
        """As `slowest` of a stage, by sums over units where that is the same: a search asks for thousands."""
        crowd = self.placed(plan.replicas, plan.stages).crowd
        if self.costs(self.cluster.hosts[0].profile, piped=plan.stages > 1, crowd=crowd).side_by_side:
            return lambda first, last: self.slowest(plan, 0, first, last)
        each = [self.slowest(plan, 0, unit, unit + 1) for unit in range(len(self.units))]
        tasks = self._mean([2 * sum(case.counts) * case.task_seconds for case in self.cases(plan)])
        sums = list(accumulate((seconds - tasks for seconds in each), initial=0.0))
        return lambda first, last: sums[last] - sums[first] + tasks

    def slowest(self, plan: Plan, stage: int, first: int, last: int) -> float:
        """Seconds of work in a step, of units [first, last) as this stage of a plan."""
        return self._mean([case.busy(stage, first, last) for case in self.cases(plan)])

    def memories(self, plan: Plan) -> tuple[Memory, ...]:
        """The bytes of each stage, for the batch that needs most."""
        edges = plan.edges(len(self.units))
        return tuple(self.memory(plan, stage, first, last) for stage, (first, last) in enumerate(pairwise(edges)))

    def memory(self, plan: Plan, stage: int, first: int, last: int) -> Memory:
        """The bytes of units [first, last) as this stage of a plan, for the batch that needs most."""
        return max((case.memory(stage, first, last) for case in self.cases(plan)), key=_total)

    def limits(self, plan: Plan) -> tuple[int, ...]:
        """The bytes that each stage's device has; the smallest of its replicas'."""
        placed = self.placed(plan.replicas, plan.stages)
        return tuple(
            min(profile.memory_bytes // (placed.crowd if profile.common_memory else 1) - profile.reserved_bytes for profile in kinds)
            for kinds in placed.profiles
        )

    def fits(self, plan: Plan) -> bool:
        """Whether every stage has room on its device."""
        edges, limits = plan.edges(len(self.units)), self.limits(plan)
        rough = all(
            case.memory(stage, first, last, case.most_held(stage)).total <= limits[stage]
            for stage, (first, last) in enumerate(pairwise(edges))
            for case in self.cases(plan)
        )
        return rough or all(memory.total <= limit for memory, limit in zip(self.memories(plan), limits, strict=True))

    def may_fit(self, plan: Plan) -> bool:
        """Whether all that the stages hold would fit if it could be shared out evenly. Each holds a slice, at least."""
        room = sum(self.limits(plan))
        for case in self.cases(plan):
            whole = case.memory(0, 0, len(self.units), one_slice(case.chunks, put_off=case.put_off))
            if whole.total - whole.workspace > room:
                return False
        return True

    def missing(self, plan: Plan) -> NoFit:
        """Why no way to cut the units into this plan's stages fits."""
        return no_fit(len(self.units), plan.stages, lambda s, a, b: self.memory(plan, s, a, b).total, self.limits(plan))

    def placed(self, replicas: int, stages: int) -> Placed:
        """Where the workers stand."""
        key = replicas, stages
        if key not in self._placed:
            self._placed[key] = self.cluster.place(replicas, stages)
        return self._placed[key]

    def costs(self, profile: Profile, *, piped: bool, crowd: int) -> Costs:
        """Of the model's units on a kind of device, with so many workers on a host."""
        key = id(profile), piped, crowd
        found = self._costs.get(key)
        if found is None:
            found = self._costs[key] = Costs(self.units, profile, piped=piped, crowd=crowd)
        return found

    def _mean(self, values: Sequence[float]) -> float:
        """Over all steps of an epoch: shapes with fewer tokens come more often."""
        shapes = self.units.shapes
        if len(shapes) == 1:
            return values[0]
        weights = [shape.share / (shape.lanes * shape.steps) for shape in shapes]
        return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


def _total(memory: Memory) -> int:
    return memory.total
