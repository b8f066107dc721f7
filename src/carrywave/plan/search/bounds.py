"""Lower bounds on the time of a step, computed without running its schedule, so that a search need not simulate every plan.

From loose to tight: `shared_out` uses only replicas and stages, `least` everything but the cuts, `bound` the cuts too: the work of a
stage, plus the time to reach it and to return from it. None exceeds the simulated time, except `shared_out` by up to a few percent, since
chunks can be slightly faster than the whole window.
"""

from __future__ import annotations

from collections.abc import Callable

from carrywave.plan.cost.case import PlanCase
from carrywave.plan.cost.programs import scored_by, through
from carrywave.plan.schedule.wavefront_order import MOST_WAITING

OfUnits = Callable[[int, int, int], float]  # (stage, first unit, last unit + 1) -> seconds


def shared_out(case: PlanCase) -> float:
    """Seconds of a step if all its work were divided evenly over the stages; chunks and micro-batches only add to that."""
    return _with_rest(case, _all_units(case, case.busy, 2 * sum(case.counts)) / case.plan.stages)


def least(case: PlanCase) -> float:
    """Lower bound on the seconds of a step, over all possible cuts."""
    stages, last = case.plan.stages, case.chunks - 1
    # Some stage has at least an equal share of all work, and some stage at least an equal share, rounded up, of each run of equal layers.
    parts = [(first, first + -(-(end - first) // stages)) for first, end in case.units.runs]
    parts = [(first, end) for first, end in parts if case.last_unit(end, last) > first]
    work = (_all_units(case, case.busy, 2 * sum(case.counts)) + heads(case)) / stages
    work = max(work, *(_fastest(case, case.busy, *part) for part in parts))
    if len(case.lanes) == 1:
        # The last chunk passes through all stages, forward and backward; the slowest stage also has to process all other chunks.
        lanes = case.lanes[0]

        def once(stage: int, first: int, end: int) -> float:
            return sum(case.task(stage, first, end, lanes, last))

        def each(stage: int, first: int, end: int) -> float:
            return sum(case.task(stage, first, end, lanes, 0))

        slowest = max(_all_units(case, each, 2) / stages, *(_fastest(case, each, *part) for part in parts))
        work = max(work, _all_units(case, once, 2) + last * slowest)
    return _with_rest(case, work)


def bound(case: PlanCase, edges: tuple[int, ...]) -> float:
    """Lower bound on the seconds of a step with these cuts."""
    ends = _ends(case, edges)
    if len(case.lanes) == 1:
        ends = [max(pair) for pair in zip(ends, _wave(case, edges), strict=True)]
    return max(end for _, end in case.after(edges, ends)[-1])


def heads(case: PlanCase) -> float:
    """Total seconds of a shared head on all chunks, each on the fastest stage."""
    if not case.share_head:
        return 0.0
    places, last = {*case.like, case.plan.stages - 1}, case.chunks - 1

    def score(lanes: int, chunk: int) -> float:
        return min(case.score(stage, lanes, chunk) for stage in places)

    each = {lanes: last * score(lanes, 0) + score(lanes, last) for lanes in set(case.lanes)}
    return sum(each[lanes] for lanes in case.lanes)


def _with_rest(case: PlanCase, work: float) -> float:
    """Add what follows the last task, as far as it is the same for all cuts."""
    if case.plan.stages == 1:
        return max(end for _, end in case.after((0, len(case.units)), [work])[-1])
    return work * (1 + case.lag) + case.agree()


def _fastest(case: PlanCase, seconds: OfUnits, first: int, last: int) -> float:
    """Seconds of units [first, last) on the kind of device that is fastest for them."""
    return min(seconds(stage, first, last) for stage in set(case.like))


def _all_units(case: PlanCase, seconds: OfUnits, tasks: int) -> float:
    """Seconds of all units; if devices differ, each run of equal units on its fastest device. The overhead of `tasks` tasks counts once."""
    if len(set(case.like)) == 1:
        return seconds(case.like[0], 0, len(case.units))
    overhead = tasks * case.task_seconds
    return overhead + sum(_fastest(case, seconds, *run) - overhead for run in case.units.runs)


def _ends(case: PlanCase, edges: tuple[int, ...]) -> list[float]:
    """The earliest time at which each stage can finish: its own work, plus the time to reach it and to return from later stages."""
    stages, units = case.plan.stages, case.spans(edges)
    first, final = case.lanes[0], case.lanes[-1]
    # Weight gradients after the last backward: those of its own micro-batch, and of others that may still wait.
    late = [case.weight_gradients(stage, *units[stage], final) for stage in range(stages)]
    waiting = [sum(case.weight_gradients(stage, *each, lanes) for lanes in case.lanes[-MOST_WAITING:]) for stage, each in enumerate(units)]
    sends = case.message_seconds * sum(case.counts)  # receives cost nothing here: they may be posted while the stage is idle
    lead = back = all_work = waits = 0.0  # lead: time to reach a stage; back: time to return from it
    stage_ends = []  # the earliest end of each stage's tasks, without those weight gradients that may come after its last backward
    for stage in range(stages):
        work = case.busy(stage, *units[stage]) - waiting[stage] + sends * ((stage > 0) + (stage < stages - 1))
        all_work += work + waiting[stage]
        waits += lead + max(0.0, back - waiting[stage])
        if case.share_head:
            # Chunks differ little, and micro-batches by at most one lane: the fewest lanes and the cheaper chunk keep it a lower bound.
            scores = (case.score(stage, min(case.lanes), chunk) for chunk in (0, case.chunks - 1))
            work += scored_by(stages, case.counts, case.defer_weights)[stage] * min(scores)
        stage_ends.append(lead + work)
        if stage < stages - 1:
            lead += case.forward(stage, *units[stage], first, 0) + case.hop(stage, edges, first, 0)
            back += case.backward(stage, *units[stage], final, 0) + case.hop(stage, edges, final, 0)
    # The last backward of a stage is followed by those of all earlier stages; `hop` already includes its send.
    ends = [stage_ends[-1] + waiting[-1]]
    after = stage_ends[-1] - case.message_seconds
    for stage in range(stages - 2, -1, -1):
        after += case.hop(stage, edges, final, 0) + case.backward(stage, *units[stage], final, 0)
        ends.append(max(after + late[stage], stage_ends[stage] + waiting[stage]))
        after = max(after, stage_ends[stage] - case.message_seconds)
    ends.reverse()
    if case.share_head:  # whichever stages run the head, the stages together must do all the work
        ends[0] = max(ends[0], (all_work + waits + heads(case)) / stages)
    return ends


def _wave(case: PlanCase, edges: tuple[int, ...]) -> list[float]:
    """When each stage finishes a single micro-batch: all chunks forward, then all backward. This is the critical path through a grid of
    stages and chunks in which all chunks but the last are equal: it follows one stage, the slowest, and crosses to the last chunk where
    that is latest.
    """
    stages, units, lanes, last = case.plan.stages, case.spans(edges), case.lanes[0], case.chunks - 1
    send = case.message_seconds
    hop, short_hop = ([case.hop(stage, edges, lanes, chunk) for stage in range(stages - 1)] for chunk in (0, last))
    whole, short = ([case.forward(stage, *units[stage], lanes, chunk) for stage in range(stages)] for chunk in (0, last))
    forward = through(whole, short, hop, short_hop, last, [send] * (stages - 1) + [0.0])
    if case.share_head:  # no backward starts before the last chunk is scored
        forward += min(case.score(stage, lanes, last) for stage in range(stages))
    whole, short = ([case.backward(stage, *units[stage], lanes, chunk) for stage in range(stages)] for chunk in (0, last))
    ends = []
    for stage in range(stages):
        # The backward starts with the short chunk: the same path, reversed.
        sends = [send if each else 0.0 for each in range(stage, stages)]
        back = through(whole[stage:], short[stage:], hop[stage:], short_hop[stage:], last, sends)
        ends.append(forward + back + case.weight_gradients(stage, *units[stage], lanes))
    return ends
