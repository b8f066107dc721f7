"""What a step takes at least, without running its schedule, so that a search need not simulate every plan.

From rough to near: `shared_out` knows replicas and stages, `least` all but the cuts, `bound` the cuts too: the work of a stage, after the
way to it and before the way back from it. None is more than the simulator says; `shared_out` up to a few percent, since chunks may be a
little faster than the whole.
"""

from __future__ import annotations

from collections.abc import Callable

from carrywave.plan.cost.case import PlanCase
from carrywave.plan.cost.programs import scored_by, through

OfUnits = Callable[[int, int, int], float]  # (stage, first unit, unit after the last) -> seconds


def shared_out(case: PlanCase) -> float:
    """Seconds of a step if all its work could be shared out evenly over the stages; chunks and slices add to that."""
    return _with_rest(case, _all_units(case, case.busy, 2 * sum(case.counts)) / case.plan.stages)


def least(case: PlanCase) -> float:
    """Seconds of a step, at least, however the units are cut."""
    stages, last = case.plan.stages, case.chunks - 1
    # A stage has an equal part of all work, or more; and of equal layers one stage has as many as an equal part has, rounded up.
    parts = [(first, first + -(-(end - first) // stages)) for first, end in case.units.runs]
    parts = [(first, end) for first, end in parts if case.last_unit(end, last) > first]
    work = (_all_units(case, case.busy, 2 * sum(case.counts)) + heads(case)) / stages
    work = max(work, *(_fastest(case, case.busy, *part) for part in parts))
    if len(case.lanes) == 1:
        # A chunk goes through all stages, there and back; the slowest has all others to do besides.
        lanes = case.lanes[0]

        def once(stage: int, first: int, end: int) -> float:
            return sum(case.task(stage, first, end, lanes, last))

        def each(stage: int, first: int, end: int) -> float:
            return sum(case.task(stage, first, end, lanes, 0))

        slowest = max(_all_units(case, each, 2) / stages, *(_fastest(case, each, *part) for part in parts))
        work = max(work, _all_units(case, once, 2) + last * slowest)
    return _with_rest(case, work)


def bound(case: PlanCase, edges: tuple[int, ...]) -> float:
    """Seconds of a step, at least, cut like this."""
    ends = _ends(case, edges)
    if len(case.lanes) == 1:
        ends = [max(pair) for pair in zip(ends, _wave(case, edges), strict=True)]
    return max(end for _, end in case.after(edges, ends)[-1])


def heads(case: PlanCase) -> float:
    """Seconds of a shared head, all of it, by whoever is fastest."""
    if not case.share_head:
        return 0.0
    places, last = {*case.like, case.plan.stages - 1}, case.chunks - 1

    def score(lanes: int, chunk: int) -> float:
        return min(case.score(stage, lanes, chunk) for stage in places)

    each = {lanes: last * score(lanes, 0) + score(lanes, last) for lanes in set(case.lanes)}
    return sum(each[lanes] for lanes in case.lanes)


def _with_rest(case: PlanCase, work: float) -> float:
    """With what follows the last task, as far as it is the same for all cuts."""
    if case.plan.stages == 1:
        return max(end for _, end in case.after((0, len(case.units)), [work])[-1])
    return work * (1 + case.lag) + case.agree()


def _fastest(case: PlanCase, seconds: OfUnits, first: int, last: int) -> float:
    """Of units on the kind of device that is fastest at them."""
    return min(seconds(stage, first, last) for stage in set(case.like))


def _all_units(case: PlanCase, seconds: OfUnits, tasks: int) -> float:
    """Of all units, with so many tasks in it; where devices differ, of each run of equal units where it is fastest."""
    if len(set(case.like)) == 1:
        return seconds(case.like[0], 0, len(case.units))
    own = tasks * case.task_seconds
    return own + sum(_fastest(case, seconds, *run) - own for run in case.units.runs)


def _ends(case: PlanCase, edges: tuple[int, ...]) -> list[float]:
    """When each stage is through, at the earliest: its own work, after the way to it and before the way back from it."""
    stages, span = case.plan.stages, case.spans(edges)
    first, final = case.lanes[0], case.lanes[-1]
    pays = [case.pay(stage, *span[stage], final) for stage in range(stages)]
    sends = case.overheads.message_seconds * sum(case.counts)  # receives may be posted before there is anything to do
    lead = back = all_work = waits = 0.0  # the way to a stage, the way back from it
    own = []
    for stage in range(stages):
        work = case.busy(stage, *span[stage]) - pays[stage] + sends * ((stage > 0) + (stage < stages - 1))
        all_work += work + pays[stage]
        waits += lead + max(0.0, back - pays[stage])
        if case.share_head:
            # Chunks differ little from each other, lanes by one at most: the fewest, and the shortest, so that it stays a bound.
            scores = (case.score(stage, min(case.lanes), chunk) for chunk in (0, case.chunks - 1))
            work += scored_by(stages, case.counts)[stage] * min(scores)
        own.append(lead + work)
        if stage < stages - 1:
            lead += case.forward(stage, *span[stage], first, 0) + case.hop(stage, edges, first, 0)
            back += case.backward(stage, *span[stage], final, 0) + case.hop(stage, edges, final, 0)
    # The last backward of a stage is followed by those of all before it; its send is part of the way.
    ends = [own[-1] + pays[-1]]
    after = own[-1] - case.overheads.message_seconds
    for stage in range(stages - 2, -1, -1):
        after += case.hop(stage, edges, final, 0) + case.backward(stage, *span[stage], final, 0)
        ends.append(max(after, own[stage]) + pays[stage])
        after = max(after, own[stage] - case.overheads.message_seconds)
    ends.reverse()
    if case.share_head:  # whoever does it, all that is to be done is done by all stages together
        ends[0] = max(ends[0], (all_work + waits + heads(case)) / stages)
    return ends


def _wave(case: PlanCase, edges: tuple[int, ...]) -> list[float]:
    """When each stage is through with one slice: all chunks forward, then all back. The longest way through a grid of stages and
    chunks, in which all chunks are alike but the last: along the slowest stage, and over to the last chunk where that is latest.
    """
    stages, span, lanes, last = case.plan.stages, case.spans(edges), case.lanes[0], case.chunks - 1
    send = case.overheads.message_seconds
    hop, short_hop = ([case.hop(stage, edges, lanes, chunk) for stage in range(stages - 1)] for chunk in (0, last))
    whole, short = ([case.forward(stage, *span[stage], lanes, chunk) for stage in range(stages)] for chunk in (0, last))
    forward = through(whole, short, hop, short_hop, last, [send] * (stages - 1) + [0.0])
    if case.share_head:  # nothing goes back before the last chunk is scored
        forward += min(case.score(stage, lanes, last) for stage in range(stages))
    whole, short = ([case.backward(stage, *span[stage], lanes, chunk) for stage in range(stages)] for chunk in (0, last))
    ends = []
    for stage in range(stages):
        # Back comes the short chunk first: the same way, seen from its end.
        sends = [send if each else 0.0 for each in range(stage, stages)]
        back = through(whole[stage:], short[stage:], hop[stage:], short_hop[stage:], last, sends)
        ends.append(forward + back + case.pay(stage, *span[stage], lanes))
    return ends
