"""Times one plan on one batch shape: each task from the constants of a profile, and from these the whole step.

Sums of gradients count in full, even where some of them run beside backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from carrywave.plan.cluster import Cluster, Placement
from carrywave.plan.memory import Footprint
from carrywave.plan.plan import Plan
from carrywave.plan.profile import Profile
from carrywave.plan.rates import NOTHING, CallKind, CallSize, Seconds
from carrywave.plan.schedule.schedule import StageTask, wavefront
from carrywave.plan.simulation import Timeline, simulate
from carrywave.plan.units import BatchShape, Units

_AGREED_BYTES = 48  # loss, count, norm and other scalars, all-reduced over all workers at every step


class UnitCosts:
    """What each unit of a model takes on a kind of device; `workers`: those of its host that work at once."""

    def __init__(self, units: Units, profile: Profile, workers: int) -> None:
        self.units, self.profile, self.workers = units, profile, workers
        self._seconds: dict[tuple[int, int, int], Seconds] = {}

    def __call__(self, number: int, lanes: int, steps: int) -> Seconds:
        """Seconds of one unit on one chunk, with the dropout and norm that follow it."""
        key = number, lanes, steps
        if key not in self._seconds:
            self._seconds[key] = self._unit(number, lanes, steps)
        return self._seconds[key]

    def update(self, parameters: int) -> float:
        """Seconds of norm, clipping and optimizer for this many parameters."""
        return self._of("update", CallSize(0, parameters, 1, 1)).all if parameters else 0.0

    def _of(self, kind: CallKind, size: CallSize) -> Seconds:
        return self.profile.rate(kind, self.units.precision, self.workers).of(size)

    def _unit(self, number: int, lanes: int, steps: int) -> Seconds:
        unit, seconds = self.units.units[number], NOTHING
        if unit.kind != "numbers":
            kind: CallKind = "layer" if unit.cell is not None else "embedding" if unit.kind == "embedding" else "head"
            # A pooled head has one row per lane.
            seconds = self._of(kind, unit.call(lanes, self.units.rows_of(unit, steps))).times(unit.directions)
        between = [(unit.dropout, steps), (unit.norm, steps)]
        for layer in unit.front:  # a convolution counts as the product that it is
            seconds = seconds.plus(self._of("head", CallSize(layer.inputs, layer.channels, lanes, steps * layer.times)))
            between.append((layer.channels, steps * layer.times))
        for width, rows in between:
            if width:
                seconds = seconds.plus(self._of("plain", CallSize(0, width, lanes, rows)))
        return seconds


class PlanCost(Footprint):
    """The times of one plan, without its cuts, on one batch shape, on the devices of a cluster."""

    def __init__(self, plan: Plan, shape: BatchShape, cluster: Cluster, placed: Placement, costs: UnitCosts) -> None:
        super().__init__(plan, shape, costs.units)
        self.cluster, self.placed, self.costs = cluster, placed, costs
        self._tasks: dict[tuple[int, int, int, bool], Seconds] = {}

    def steps(self, chunk: int) -> int:
        """Steps in a chunk; the last chunk may be shorter."""
        return min(self.chunk_steps, self.shape.steps - chunk * self.chunk_steps)

    def work(self, first: int, last: int, lanes: int, chunk: int) -> Seconds:
        """Seconds of the forward, the backward and the weight gradients of units [first, last) on a chunk."""
        final = chunk == self.chunks - 1  # all chunks but the last are equal
        key = first, last, lanes, final
        if key not in self._tasks:
            # The head is another task if it is shared, and one that pools runs on the last chunk alone.
            without = last == len(self.units) and (self.share_head or (self.units.pooled and not final))
            work = NOTHING
            for unit in range(first, last - without):
                work = work.plus(self.costs(unit, lanes, self.steps(chunk)))
            # Where carries are recomputed too, all chunks of a segment but its last run forward once more.
            again = work.forward * (2 - 1 / self.plan.segment(self.chunks)) if self.plan.recompute else 0.0
            task, now, later = self.costs.profile.task_seconds, work.deferred, 0.0
            if self.defer_weights:
                now, later = later, now
            self._tasks[key] = Seconds(task + work.forward, task + again + work.backward + now, later)
        return self._tasks[key]

    def score(self, lanes: int, chunk: int) -> float:
        """Seconds of a shared head's forward and backward on a chunk."""
        return self.costs.profile.task_seconds + self.costs(len(self.units) - 1, lanes, self.steps(chunk)).all

    def weights(self, first: int, last: int, lanes: int) -> float:
        """Seconds of the deferred weight gradients of a micro-batch."""
        return (self.chunks - 1) * self.work(first, last, lanes, 0).deferred + self.work(first, last, lanes, self.chunks - 1).deferred

    def message(self, edge: int, unit: int, lanes: int, chunk: int) -> float:
        """Seconds of a message over the edge between two stages: the input of a unit for one chunk."""
        return self.cluster.link(crossing=self.placed.crossing[edge]).seconds(self._num_bytes(unit, lanes, self.steps(chunk)))

    def _num_bytes(self, unit: int, lanes: int, steps: int) -> int:
        """Bytes of a unit's input."""
        return self.units.units[unit].width_in * lanes * steps * self.units.activation_bytes

    def estimate(self, edges: tuple[int, ...]) -> float:
        """Seconds of the step by a formula, in place of a simulation: each stage's first chunk, then the rest on the slowest stage."""
        lanes, count = self.lanes[0], sum(self.counts)
        works = [self.work(first, last, lanes, 0) for first, last in pairwise(edges)]
        shared = self.score(lanes, 0) / self.plan.stages if self.share_head else 0.0
        way = sum(2 * self.message(edge, edges[edge + 1], lanes, 0) for edge in range(self.plan.stages - 1))
        if len(self.lanes) == 1:
            slowest = max(work.forward for work in works) + max(work.backward for work in works)
        else:
            slowest = max(work.forward + work.backward for work in works)
        passes = sum(work.forward + work.backward for work in works) + way + (count - 1) * slowest + count * shared
        weights = len(self.lanes) * max(self.weights(first, last, lanes) for first, last in pairwise(edges))
        return self._after(edges, [passes + weights] * self.plan.stages)[1][-1][1]

    def simulate(self, edges: tuple[int, ...]) -> Timeline:
        """Simulate the step, task by task."""
        schedule = wavefront(self.plan.stages, self.counts, share_head=self.share_head, defer_weights=self.defer_weights)
        spans, last = list(pairwise(edges)), self.plan.stages - 1

        def run(task: StageTask) -> float:
            lanes, span = self.lanes[task.micro_batch], spans[task.stage]
            match task.phase:
                case "H":
                    return self.score(lanes, task.chunk)
                case "W":
                    return self.weights(*span, lanes)
                case "F":
                    return self.work(*span, lanes, task.chunk).forward
                case _:
                    return self.work(*span, lanes, task.chunk).backward

        def message(task: StageTask) -> float:
            # A shared head's messages, both ways, have the size of the head's input.
            shared = task.phase == "H" or (task.phase == "F" and task.stage == last)
            unit = len(self.units) - 1 if shared else edges[task.stage + (task.phase == "F")]
            edge = last - 1 if shared else task.stage - (task.phase != "F")
            return self.message(edge, unit, self.lanes[task.micro_batch], task.chunk)

        timeline = simulate(schedule, run, message)
        reduced, updated = self._after(edges, timeline.ends)
        return timeline.then("reduce", reduced).then("update", updated)

    def sent_bytes(self, edges: tuple[int, ...]) -> int:
        """Bytes that the stages of a replica send each other in a step, without those of a shared head."""
        return sum(2 * self._num_bytes(unit, lanes, self.shape.steps) for unit in edges[1:-1] for lanes in self.lanes)

    def parameters(self, edges: tuple[int, ...]) -> list[int]:
        """Number of parameters held by each stage."""
        return [self.units.parameters(a, b, share_head=self.share_head) for a, b in pairwise(edges)]

    def _after(self, edges: tuple[int, ...], ends: Sequence[float]) -> list[list[tuple[float, float]]]:
        """(start, end) on each stage of what follows its last task: the gradient all-reduces, then the update."""
        replicas, held, size = self.plan.replicas, self.parameters(edges), self.units.parameter_bytes
        shared, members = self.units.common(edges, share_head=self.share_head)
        own = [many - (shared if stage in members else 0) for stage, many in enumerate(held)]
        done = [end + self._sum(replicas, many * size) for end, many in zip(ends, own, strict=True)]
        if shared:
            agreed = max(done[stage] for stage in members) + self._sum(replicas * len(members), shared * size)
            done = [agreed if stage in members else each for stage, each in enumerate(done)]
        agreed = max(done) + self._sum(self.plan.workers, _AGREED_BYTES + 8 * self.plan.workers)
        return [list(zip(ends, done, strict=True)), [(agreed, agreed + self.costs.update(each)) for each in held]]

    def _sum(self, workers: int, num_bytes: int) -> float:
        # All stages sum over their replicas at about the same time and compete for the link.
        return self.cluster.sum_seconds(self.placed, workers, num_bytes, min(self.plan.stages, self.placed.crowd))
