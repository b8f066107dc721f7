"""Times one plan on one batch shape: the duration of each task, and of the whole step.

`simulate` runs the schedule; `plan.search.bounds` gives lower bounds without running it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

from carrywave.plan.cost.cluster import Cluster, Placed, reduce_seconds
from carrywave.plan.cost.footprint import Footprint
from carrywave.plan.cost.interpolation import NOTHING, Seconds
from carrywave.plan.cost.link_memory import BUCKET_BYTES, DEVICE_BUCKET_BYTES
from carrywave.plan.cost.profile import Link, Overheads, Piped, Profile
from carrywave.plan.cost.programs import program_of
from carrywave.plan.cost.simulation import TaskTimes, Timeline, simulate
from carrywave.plan.cost.stage_costs import Costs
from carrywave.plan.cost.transports import DEVICE_MEMORY, transports_of
from carrywave.plan.cost.units import BatchShape, Units
from carrywave.plan.plan import Plan
from carrywave.plan.schedule.messages import Channel
from carrywave.plan.schedule.schedule import StageTask

_AGREED_BYTES = 48  # loss, count, norm and other scalars, all-reduced over all workers at every step


class CostsOf(Protocol):
    """Looks up the costs of the units on one kind of device."""

    def __call__(self, profile: Profile, *, piped: Piped, crowd: int) -> Costs: ...


class PlanCase(Footprint):
    """One plan, without its cuts, on one batch shape, on the devices of a cluster."""

    def __init__(self, plan: Plan, shape: BatchShape, units: Units, cluster: Cluster, placed: Placed, costs: CostsOf) -> None:
        super().__init__(plan, shape, units, transports_of(plan, units, cluster, placed))
        self.cluster, self.placed = cluster, placed
        # Chunks of a recorded window cost what their kernels do. Those that do not defer weight gradients run as if each were a window.
        chunked: Piped = "recorded" if self.defer_weights else ""
        self.piped: Piped = chunked if self.transports.recorded else "launched" if plan.stages > 1 else ""
        self.kinds = [[costs(profile, piped=self.piped, crowd=placed.crowd) for profile in kinds] for kinds in placed.profiles]
        self.overheads = _slowest([costs.profile.overheads for kinds in self.kinds for costs in kinds])
        # The host has no part in recorded work, but its launches take as long as any task where nothing is recorded.
        recorded = self.overheads.recorded_seconds if self.transports.recorded else None
        self.task_seconds = self.overheads.task_seconds if recorded is None else recorded
        self.message_seconds = self.overheads.message_seconds if recorded is None else self.overheads.recorded_message_seconds
        self.crowds = [[costs.crowding for costs in kinds] for kinds in self.kinds]
        # All replicas of a stage wait for each other at the gradient all-reduce.
        self.lag = max(costs.lag for kinds in self.kinds for costs in kinds) if plan.replicas > 1 else 0.0
        # For each stage, the first stage on the same kinds of devices: both have the same costs.
        first: dict[tuple[int, ...], int] = {}
        self.like = [first.setdefault(tuple(map(id, kinds)), stage) for stage, kinds in enumerate(self.placed.profiles)]
        self.links = [self.link(stage, stage + 1) for stage in range(plan.stages - 1)]
        self._tasks: dict[tuple[int, int, int, int, bool], tuple[float, float]] = {}
        self._busy: dict[tuple[int, int, int], float] = {}
        self._reduced: dict[tuple[int, int], float] = {}

    # Single tasks.

    def steps(self, chunk: int) -> int:
        """Steps in a chunk; the last chunk may be shorter."""
        return min(self.chunk_steps, self.shape.steps - chunk * self.chunk_steps)

    def of_stage(self, stage: int, first: int, last: int, lanes: int, steps: int) -> Seconds:
        """Seconds of units [first, last) on a chunk, on the slowest of this stage's devices."""
        pairs = zip(self.kinds[stage], self.crowds[stage], strict=True)
        each = [costs.stage(first, last, lanes, steps).times(crowd) for costs, crowd in pairs]
        return each[0] if len(each) == 1 else Seconds(*(max(part) for part in zip(*each, strict=True)))

    def last_unit(self, last: int, chunk: int) -> int:
        """The end (exclusive) of the units that run with a chunk: without a shared head, and with a pooled head only on the last chunk."""
        without = self.share_head or (self.units.pooled and chunk < self.chunks - 1)
        return last - 1 if without and last == len(self.units) else last

    def forward(self, stage: int, first: int, last: int, lanes: int, chunk: int) -> float:
        """Seconds of a forward task."""
        return self.task(stage, first, last, lanes, chunk)[0]

    def backward(self, stage: int, first: int, last: int, lanes: int, chunk: int) -> float:
        """Seconds of a backward task."""
        return self.task(stage, first, last, lanes, chunk)[1]

    def task(self, stage: int, first: int, last: int, lanes: int, chunk: int) -> tuple[float, float]:
        """Seconds of the forward and the backward task."""
        key = self.like[stage], first, last, lanes, chunk == self.chunks - 1  # all chunks but the last are equal
        seconds = self._tasks.get(key)
        if seconds is None:
            last = self.last_unit(last, chunk)
            work = self.of_stage(stage, first, last, lanes, self.steps(chunk)) if last > first else NOTHING
            # Where carries are recomputed too, all chunks of a segment but its last run forward once more.
            segment = self.plan.segment(self.chunks)
            again = work.forward * (2 - 1 / segment) if self.plan.recompute else 0.0
            backward = self.task_seconds + again + work.backward + (0.0 if self.defer_weights else work.deferred)
            seconds = self._tasks[key] = self.task_seconds + work.forward, backward
        return seconds

    def weight_gradients(self, stage: int, first: int, last: int, lanes: int, scored: int = 0) -> float:
        """Seconds of a micro-batch's deferred weight gradients, including a shared head's for the `scored` chunks of the last stage."""
        if not self.defer_weights:
            return 0.0
        last = self.last_unit(last, self.chunks - 1)
        stage_seconds = self._deferred(stage, first, last, lanes) if last > first else 0.0
        head = len(self.units) - 1
        return stage_seconds + (self._deferred(stage, head, head + 1, lanes) * scored / self.chunks if scored else 0.0)

    def _deferred(self, stage: int, first: int, last: int, lanes: int) -> float:
        """Seconds of the deferred weight gradients of units [first, last), on the slowest of this stage's devices."""
        pairs = zip(self.kinds[stage], self.crowds[stage], strict=True)
        return max(costs.deferred(first, last, lanes, self.shape.steps, self.chunk_steps) * crowd for costs, crowd in pairs)

    def _head(self, stage: int, lanes: int, steps: int) -> Seconds:
        return self.of_stage(stage, len(self.units) - 1, len(self.units), lanes, steps)

    def score(self, stage: int, lanes: int, chunk: int) -> float:
        """Seconds of a shared-head task. Only the last stage defers its weight gradients."""
        work = self._head(stage, lanes, self.steps(chunk))
        defers = self.defer_weights and stage == self.plan.stages - 1
        return self.task_seconds + work.forward + work.backward + (0.0 if defers else work.deferred)

    def num_bytes(self, unit: int, lanes: int, chunk: int) -> int:
        """Bytes of a unit's input for one chunk, which is the size of a message."""
        return self.units.units[unit].width_in * lanes * self.steps(chunk) * self.units.activation_bytes

    def link(self, one: int, other: int) -> Link:
        """The link between two stages."""
        low, high = min(one, other), max(one, other)
        kinds = tuple(profile for stage in (one, other) for profile in self.placed.profiles[stage])
        crosses = any(self.placed.crossing[low:high])
        return self.cluster.link_between(kinds) if crosses else self.cluster.link_within(kinds)

    # The whole step.

    def busy(self, stage: int, first: int, last: int) -> float:
        """Seconds a stage spends computing in one step, not counting a shared head."""
        first, last = self.units.alike(first, last)
        key = self.like[stage], first, last
        total = self._busy.get(key)
        if total is not None:
            return total
        total = 0.0
        for lanes in set(self.lanes):
            times = self.lanes.count(lanes)
            one = self.weight_gradients(stage, first, last, lanes)
            # All chunks but the last are equal.
            for chunk, count in ((0, self.chunks - 1), (self.chunks - 1, 1)):
                if count:
                    one += count * (self.forward(stage, first, last, lanes, chunk) + self.backward(stage, first, last, lanes, chunk))
            total += times * one
        self._busy[key] = total
        return total

    def spans(self, edges: tuple[int, ...]) -> list[tuple[int, int]]:
        """The units of each stage, or an identical span of units."""
        return [self.units.alike(first, last) for first, last in pairwise(edges)]

    def hop(self, stage: int, edges: tuple[int, ...], lanes: int, chunk: int) -> float:
        """Seconds of a message between a stage and the next one."""
        return self.message_seconds + _message(self.links[stage], self.num_bytes(edges[stage + 1], lanes, chunk))

    def simulate(self, edges: tuple[int, ...]) -> Timeline:
        """Simulate the step, task by task."""
        program = program_of(self.plan.stages, self.counts, self.share_head, self.defer_weights)
        last = self.plan.stages - 1
        unit_ranges = self.spans(edges)
        seconds: dict[tuple[str, int, int, bool, int], float] = {}
        self_scored: dict[int, int] = {}  # for each micro-batch, the number of chunks that the last stage scores itself
        for (_, part), stage in program.program.schedule.scorers.items():
            self_scored[part] = self_scored.get(part, 0) + (stage == last)

        def run(task: StageTask) -> float:
            lanes = self.lanes[task.micro_batch]
            scored = self_scored.get(task.micro_batch, 0) if task.phase == "W" and task.stage == last else 0
            key = task.phase, task.stage, lanes, task.chunk == self.chunks - 1, scored
            if key not in seconds:
                match task.phase:
                    case "H":
                        seconds[key] = self.score(task.stage, lanes, task.chunk)
                    case "W":
                        seconds[key] = self.weight_gradients(task.stage, *unit_ranges[task.stage], lanes, scored)
                    case _:
                        of_phase = self.forward if task.phase == "F" else self.backward
                        seconds[key] = of_phase(task.stage, *unit_ranges[task.stage], lanes, task.chunk)
            return seconds[key]

        def num_bytes(task: StageTask) -> int:
            # A forward sends the next stage's input, a backward the gradient of its own input. A shared head's messages, both ways,
            # have the size of the head's input.
            shared = task.phase == "H" or (task.phase == "F" and task.stage == last)
            unit = len(self.units) - 1 if shared else edges[task.stage + 1] if task.phase == "F" else edges[task.stage]
            return self.num_bytes(unit, self.lanes[task.micro_batch], task.chunk)

        def link(line: Channel) -> Link:
            return self.link(line.sender, line.receiver)

        timeline = simulate(program, TaskTimes(run, num_bytes, link, self.message_seconds, self.transports.messages == DEVICE_MEMORY))
        reduced, updated = self.after(edges, timeline.ends)
        return timeline.then("reduce", reduced).then("update", updated)

    def whole_step(self, seconds: float) -> float:
        """Seconds from one step to the next, if its passes and updates take `seconds`: the host prepares a recorded step during another."""
        tensors = self.units.tensors(0, len(self.units)) / self.plan.stages
        least = self.overheads.least_step_seconds + tensors * self.overheads.least_tensor_seconds
        return max(seconds + self.overheads.step_seconds, least if self.transports.recorded else 0.0)

    def parameters(self, edges: tuple[int, ...]) -> list[int]:
        """Number of parameters held by each stage."""
        return [self.units.parameters(a, b, share_head=self.share_head) for a, b in pairwise(edges)]

    def after(self, edges: tuple[int, ...], ends: Sequence[float]) -> list[list[tuple[float, float]]]:
        """(start, end) on each stage of what follows its last task: the gradient all-reduces, then the update."""
        replicas, stages = self.plan.replicas, self.plan.stages
        held = self.parameters(edges)
        tensors = [self.units.tensors(a, b, share_head=self.share_head) for a, b in pairwise(edges)]
        shared, members = self.units.common(edges, share_head=self.share_head)
        done = []
        for stage, end in enumerate(ends):
            reduced = (held[stage] - (shared if stage in members else 0)) * self.units.parameter_bytes
            window = self._window(stage, *self.units.alike(edges[stage], edges[stage + 1]))
            done.append(end * (1 + self.lag) + self._exposed(reduced, window))
        if shared:
            agreed = max(done[stage] for stage in members)
            seconds = self._reduce(replicas * len(members), shared * self.units.parameter_bytes)
            done = [agreed + seconds if stage in members else each for stage, each in enumerate(done)]
        agreed = max(done) + self.agree()
        updates = []
        for stage in range(stages):
            pairs = zip(self.kinds[stage], self.crowds[stage], strict=True)
            unit_range, passes = (edges[stage], edges[stage + 1]), len(self.lanes)  # every pass drops weights anew
            seconds = max(
                (costs.update(held[stage], tensors[stage]) + passes * costs.weight_drop(*unit_range)) * crowd for costs, crowd in pairs
            )
            updates.append((agreed, agreed + seconds))
        return [[(end, max(end, each)) for end, each in zip(ends, done, strict=True)], updates]

    def agree(self) -> float:
        """Seconds to all-reduce loss, count, norm and other scalars over all workers."""
        workers = self.plan.replicas * self.plan.stages
        return self._reduce(workers, _AGREED_BYTES + 8 * workers)

    def _window(self, stage: int, first: int, last: int) -> float:
        """Seconds during which gradients become final one after another: the deferred weight gradients, or else the last backward."""
        lanes = self.lanes[-1]
        return self.weight_gradients(stage, first, last, lanes) if self.defer_weights else self.backward(stage, first, last, lanes, 0)

    def _exposed(self, num_bytes: int, window: float) -> float:
        """Seconds by which the all-reduce over replicas outlasts the last task; buckets are reduced while later gradients are computed."""
        replicas = self.plan.replicas
        if replicas == 1 or num_bytes == 0:
            return 0.0
        buckets = -(-num_bytes // (DEVICE_BUCKET_BYTES if self.transports.sums == DEVICE_MEMORY else BUCKET_BYTES))
        each = self._reduce(replicas, num_bytes // buckets)
        hidden = max(each, buckets * each - window * (1 - 1 / buckets))
        # In a pipeline on GPUs, only stage-to-stage messages may be in flight: all-reduces run after them. So do those after a recorded
        # pass. Sums in device memory follow the other work of a step on one stream; those over NCCL have their own.
        alone = self.transports.recorded == "passes" or self.transports.sums == DEVICE_MEMORY
        overlap = self.overheads.overlap if self.plan.stages == 1 and not alone else 0.0
        return overlap * hidden + (1 - overlap) * buckets * each

    def link_of_host(self) -> Link:
        """The link between devices of one host."""
        return self.cluster.link_within(tuple(profile for kinds in self.placed.profiles for profile in kinds))

    def _reduce(self, workers: int, num_bytes: int) -> float:
        # All stages reduce over their replicas at about the same time and compete for the link.
        key = workers, num_bytes
        if key not in self._reduced:
            groups = min(self.plan.stages, self.placed.crowd)
            self._reduced[key] = reduce_seconds(self.cluster, self.placed, workers, num_bytes, groups)
        return self._reduced[key]


def _message(link: Link, num_bytes: int) -> float:
    return link.latency_seconds + num_bytes / link.bytes_per_second


def _slowest(overheads: Sequence[Overheads]) -> Overheads:
    if len(set(overheads)) == 1:
        return overheads[0]
    return Overheads(
        task_seconds=max(each.task_seconds for each in overheads),
        message_seconds=max(each.message_seconds for each in overheads),
        step_seconds=max(each.step_seconds for each in overheads),
        overlap=min(each.overlap for each in overheads),
        recorded_seconds=None
        if any(each.recorded_seconds is None for each in overheads)
        else max(each.recorded_seconds or 0.0 for each in overheads),
        least_step_seconds=max(each.least_step_seconds for each in overheads),
        least_tensor_seconds=max(each.least_tensor_seconds for each in overheads),
        recorded_message_seconds=max(each.recorded_message_seconds for each in overheads),
    )
