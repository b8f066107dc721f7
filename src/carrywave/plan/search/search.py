"""Finds the best plan for a spec on a cluster: over replicas, stages, cuts, chunks, slices, recomputation and a shared head.

Best first: every plan has a time that it takes at least, and only those that could still win are looked at more closely, first by their
cuts, then in the simulator. So the answer is that of simulating all that `space` lists, to within a tolerance, and most plans cost a few
microseconds. Three things are less than everything: `space` lists some of many numbers of replicas, stages and chunks; of many ways to
cut one is looked at; and a search ends after so many simulations. Where it did, the choice says by how much a plan that was left could be
faster.
What changes the answer of training (lanes, steps, precision, accumulation) is the spec's and never touched.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from typing import Literal

from carrywave.errors import PlanError
from carrywave.plan.canonical_shards import REPLICAS
from carrywave.plan.cost.cluster import Cluster
from carrywave.plan.cost.units import Units
from carrywave.plan.plan import Plan, even_cuts
from carrywave.plan.search.memory_advice import explained
from carrywave.plan.search.partition import NoFit, all_cuts, partition, say, span
from carrywave.plan.search.predictor import Prediction, Predictor
from carrywave.plan.search.space import ALL_STAGES, SLICES, Space

GAIN_PER_DOUBLING = 0.05  # twice the devices must save this much of the time to be worth it
TOLERANCE = 0.01  # by which the plan that is found may be slower than the best
FEW_UNITS = 6  # up to which all ways to cut them are looked at; where there are more, the one that balances the stages
MOST_SIMULATED = 40  # plans in one search; bounds are so near that a few are enough, except for shared heads
_RIVALS_SIMULATED, _RIVALS_CUT = 4, 200  # for each kind of plan that is shown beside the chosen one
_SURELY = 0.9  # of the time of all work in one chunk, shared out evenly: no cut into chunks and slices takes less


@dataclass(frozen=True)
class Rival:
    """A plan that was not chosen, and why."""

    plan: Plan
    why: str
    prediction: Prediction | None = None  # none where it does not fit


@dataclass(frozen=True)
class PlanChoice:
    """The plan that was chosen, why, and those that were not."""

    best: Prediction
    why: str
    rivals: tuple[Rival, ...]
    serial: Prediction | None  # on one device, where it fits there
    devices: int  # that were on offer
    left: float = 0.0  # by how much a plan that was not simulated could be faster at most, where the search ended before it was sure

    @property
    def efficiency(self) -> float | None:
        """Seconds of one device over those of all devices together; nothing where one device cannot hold the model."""
        return None if self.serial is None else self.serial.seconds / (self.best.seconds * self.best.plan.workers)


Wanted = Callable[[Plan], bool]
Level = Literal["group", "uncut", "cut"]  # how much of a plan is settled: replicas and stages; all but the cuts; all


def search(units: Units, cluster: Cluster, *, use_all: bool = False, tolerance: float = TOLERANCE) -> PlanChoice:
    """The best plan on these devices or fewer of them; with `use_all`, on all. Refuses a model that fits no plan."""
    found = Search(Predictor(units, cluster), use_all=use_all, tolerance=tolerance)
    best = found.chosen()
    left = found.left
    kinds: tuple[Wanted, ...] = (_serial, _replicas, _stages, _both)
    of_kind = [found.rival(kind) for kind in kinds]
    # By the model's own account nothing on fewer devices may beat what is chosen.
    best = min((each for each in (best, *of_kind) if each is not None), key=lambda each: _score(each.seconds, each.plan, GAIN_PER_DOUBLING))
    used = best.plan.workers
    more = found.rival(lambda plan: plan.workers > used) if used < cluster.devices else None
    rivals = [Rival(each.plan, _why(each, best), each) for each in (*of_kind, more, *found.variants(best.plan)) if each is not None]
    rivals += [
        Rival(plan, said)
        for kind, each in zip(kinds, of_kind, strict=True)
        if each is None and (plan := found.lacking(kind))
        for said in [found.lack(plan)]
    ]
    shown: dict[Plan, Rival] = {}
    for rival in rivals:
        if rival.plan != best.plan:
            shown.setdefault(rival.plan, rival)
    ordered = sorted(shown.values(), key=lambda rival: math.inf if rival.prediction is None else rival.prediction.seconds)
    why = _reason(best, ordered, cluster.devices, use_all=use_all)
    if left:
        why += f" ({MOST_SIMULATED} plans were simulated; one that was not could be faster by {left:.1%} at most)"
    return PlanChoice(best, why, tuple(ordered), of_kind[0] or found.serial(), cluster.devices, left)


def describe(plan: Plan) -> str:
    """A plan in words."""
    if plan.workers == 1:
        parts = ["1 device"]
    else:
        parts = [
            f"{number} {name}{'s' if number > 1 else ''}"
            for number, name in ((plan.replicas, "replica"), (plan.stages, "stage"))
            if number > 1
        ]
        parts = [" x ".join(parts)]
    if plan.chunk_steps is not None:
        parts.append(f"chunks of {plan.chunk_steps} steps")
    if plan.slices > 1:
        parts.append(f"{plan.slices} slices")
    parts += ["recompute"] * plan.recompute + ["the head shared"] * plan.shares_head
    return ", ".join(parts)


class Search:
    """One search, with all that it has found out; `best` may be asked again for other plans."""

    def __init__(self, predictor: Predictor, *, use_all: bool, tolerance: float) -> None:
        self.predictor, self.units, self.cluster = predictor, predictor.units, predictor.cluster
        self.space, self.tolerance = Space(self.units, self.cluster, use_all), tolerance
        self.cuts: dict[Plan, list[tuple[int, ...]]] = {}  # those that fit
        # Worked out once for each plan. One of one stage is the same plan before it is cut and after, so that each has its own cache.
        self._shared_out, self._least = cache(predictor.shared_out), cache(predictor.least)
        self._bound, self._predict = cache(predictor.bound), cache(predictor.predict)
        self.misfits: dict[Plan, None] = {}
        self.left = 0.0  # of the last `best`: by how much a plan that was not simulated could be better at most

    def rival(self, wanted: Wanted) -> Prediction | None:
        """The best of the plans that are wanted, or one that is near it: only shown beside the chosen one."""
        return self.best(wanted, gain=0.0, most=_RIVALS_SIMULATED, most_cut=_RIVALS_CUT)

    def best(self, wanted: Wanted, *, gain: float, most: int = MOST_SIMULATED, most_cut: float = math.inf) -> Prediction | None:
        """The best of the plans that are wanted, where twice the devices must gain this much; none where no plan fits.

        `most` are simulated, and `most_cut` of a sort looked at with their cuts; beyond that the best of them is taken.
        """
        number = count()
        heap: list[tuple[float, int, Level, Plan]] = []  # least score, a tie-break
        best: Prediction | None = None
        limit, simulated = math.inf, 0
        cut: Counter[tuple[bool, bool]] = Counter()  # by whether there are stages, and slices, whose bounds are not as near

        def push(plan: Plan, seconds: float, level: Level) -> None:
            score = _score(seconds, plan, gain)
            if score < limit:
                heapq.heappush(heap, (score, next(number), level, plan))

        for stages in self.space.stages():
            for replicas in self.space.replicas(stages):
                if wanted(plan := Plan(replicas, stages)):
                    push(plan, _SURELY * self._shared_out(plan), "group")
        while heap and heap[0][0] * (1 + self.tolerance) < limit and simulated < most:
            _, _, level, plan = heapq.heappop(heap)
            if level == "group":
                for each in self.space.plans(plan):
                    push(each, self._least(each), "uncut")
            elif level == "uncut":
                sort = plan.stages > 1, plan.slices > 1
                if cut[sort] >= most_cut:
                    continue
                for cuts in self._cuts(plan):
                    whole = replace(plan, cuts=cuts)
                    push(whole, self._bound(whole), "cut")
                    cut[sort] += 1
                if not self.cuts[plan] and not plan.recompute and plan.slices <= SLICES[-1]:
                    for each in self.space.leaner(plan):
                        push(each, self._least(each), "uncut")
            else:
                simulated += 1
                found = self._predict(plan)
                if (score := _score(found.seconds, plan, gain)) < limit:
                    best, limit = found, score
        sure = not heap or heap[0][0] * (1 + self.tolerance) >= limit
        self.left = 0.0 if sure else limit / heap[0][0] - 1
        return best

    def _cuts(self, plan: Plan) -> list[tuple[int, ...]]:
        """Ways to cut that fit: all of them where they are few, else the one that balances the stages."""
        if plan not in self.cuts:
            units = len(self.units)
            limits = self.predictor.limits(plan)
            if not self.predictor.may_fit(plan):
                self.misfits[plan] = None
                self.cuts[plan] = []
                return []
            even = None if units <= FEW_UNITS else self.predictor.balanced(plan)
            if units <= FEW_UNITS:
                found = [cuts for cuts in all_cuts(units, plan.stages) if self.predictor.fits(replace(plan, cuts=cuts))]
            elif even is not None and self.predictor.fits(replace(plan, cuts=even)):
                found = [even]
            else:
                try:
                    found = [
                        partition(
                            units,
                            plan.stages,
                            lambda s, a, b: self.predictor.slowest(plan, s, a, b),
                            lambda s, a, b: self.predictor.memory(plan, s, a, b).total,
                            limits,
                        )
                    ]
                except NoFit:
                    found = []
            self.cuts[plan] = found
            if not found:
                self.misfits[plan] = None
        return self.cuts[plan]

    def variants(self, plan: Plan) -> list[Prediction]:
        """The chosen plan with one thing changed, where that fits: other chunks, even cuts, the head shared or not, recomputation."""
        steps = sorted(each for each in self.space.chunk_steps() if each is not None)
        near: list[Plan] = []
        if plan.stages > 1:
            at = steps.index(plan.chunk_steps) if plan.chunk_steps in steps else len(steps)
            near += [replace(plan, chunk_steps=each) for each in (*steps[max(0, at - 1) : at], *steps[at + 1 : at + 2])]
            near.append(replace(plan, cuts=even_cuts(len(self.units), plan.stages)))
            near += [replace(plan, share_head=not plan.share_head)] * (not self.units.pooled)
            near += [replace(plan, slices=2)] * (plan.slices == 1 and 2 in self.space.slices(plan.replicas, SLICES))
        return [self._predict(each) for each in near if each != plan and self.predictor.fits(each)]

    def chosen(self) -> Prediction:
        """The best of all plans, where more devices must pay; refuses a model that fits no plan, and says what would make it fit."""
        try:
            self.check_room()
            best = self.best(_any, gain=GAIN_PER_DOUBLING, most=MOST_SIMULATED)
            if best is None:
                raise self.nothing()
        except NoFit as error:
            raise explained(error, self.space) from None
        return best

    def serial(self) -> Prediction | None:
        """One device, to compare with, where it can hold the model."""
        return self._predict(Plan.serial()) if self.predictor.fits(Plan.serial()) else None

    def check_room(self) -> None:
        """Refuse a model for which even the leanest plan has no room, before thousands are tried."""
        lean = list(self.space.leanest())
        if not lean:
            raise self.nothing()
        nearest: NoFit | None = None
        for plan in lean:
            if self._cuts(plan):
                return
            missing = self.predictor.missing(plan)
            if nearest is None or missing.missing_bytes < nearest.missing_bytes:
                nearest = missing
        assert nearest is not None
        raise nearest

    def nothing(self) -> PlanError:
        """There is no plan at all, or none that fits."""
        devices, most = self.cluster.devices, self.space.most_lanes
        if self.misfits:
            return min((self.predictor.missing(plan) for plan in list(self.misfits)[:64]), key=lambda error: error.missing_bytes)
        allowed = f", and replicas must be one of {', '.join(map(str, REPLICAS))}" if self.units.reproducible else ""
        return PlanError(
            f"{devices} devices cannot all be used by {most} lanes and {len(self.units)} units (encoder, {self.units.layers} layers, head)"
            f"{allowed}; use fewer devices"
        )

    def lacking(self, wanted: Wanted) -> Plan | None:
        """The first of the plans that were wanted and did not fit."""
        return next((plan for plan in self.misfits if wanted(plan)), None)

    def lack(self, plan: Plan) -> str:
        """What a plan lacks."""
        limits, units = self.predictor.limits(plan), len(self.units)
        missing = self.predictor.missing(plan).missing_bytes
        return (
            f"does not fit: {say(missing)} more than the {say(min(limits))} of {'a device' if plan.stages > 1 else span(0, units, units)}"
        )


def _any(plan: Plan) -> bool:
    return True


def _serial(plan: Plan) -> bool:
    return plan.workers == 1


def _replicas(plan: Plan) -> bool:
    return plan.replicas > 1 and plan.stages == 1


def _stages(plan: Plan) -> bool:
    # Only shown beside the chosen plan: schedules of many stages take long to make.
    return plan.replicas == 1 and 1 < plan.stages <= ALL_STAGES


def _both(plan: Plan) -> bool:
    return plan.replicas > 1 and plan.stages > 1


def price(devices: int, gain: float) -> float:
    """What seconds on so many devices are multiplied by, where each doubling must save this much."""
    return math.pow(1 - gain, -math.log2(devices))


def _score(seconds: float, plan: Plan, gain: float) -> float:
    """Seconds, made longer by what more devices must save."""
    return seconds * price(plan.workers, gain)


def _why(rival: Prediction, best: Prediction) -> str:
    """Why a plan that fits is not the one that is shown."""
    ratio = rival.seconds / best.seconds
    more = rival.plan.workers / best.plan.workers
    if ratio < price(best.plan.workers, GAIN_PER_DOUBLING) / price(rival.plan.workers, GAIN_PER_DOUBLING) and ratio < 1 - TOLERANCE:
        return f"faster by {1 / ratio - 1:.1%}"
    if ratio < 1 and more > 1:
        return f"{1 - ratio:.1%} less time for {more:.3g} times the devices: below the {GAIN_PER_DOUBLING:.0%} that each doubling must save"
    if ratio < 1 + TOLERANCE:
        return "as fast" + (", on more devices" if more > 1 else ", on fewer devices" if more < 1 else "")
    return f"slower by {ratio - 1:.1%}"


def asked_for(plan: Plan, predictor: Predictor, choice: PlanChoice) -> PlanChoice:
    """A plan that the user asks for in the place of the chosen one, which becomes one of its rivals."""
    edges = plan.edges(len(predictor.units))
    for stage, (memory, limit) in enumerate(zip(predictor.memories(plan), predictor.limits(plan), strict=True)):
        if memory.total > limit:
            where = span(edges[stage], edges[stage + 1], len(predictor.units))
            over = say(memory.total - limit)
            raise PlanError(
                f"stage {stage} of the plan that is asked for ({where}) is {over} over the {say(limit)} of its device; "
                f"this fits: {describe(choice.best.plan)}"
            )
    asked = predictor.predict(plan)
    if asked.plan == choice.best.plan:
        return replace(choice, why=f"{describe(asked.plan)}: asked for, and what the planner would choose")
    rivals = [Rival(choice.best.plan, f"what the planner would choose: {_why(choice.best, asked)}", choice.best)]
    rivals += [
        rival if rival.prediction is None else replace(rival, why=_why(rival.prediction, asked))
        for rival in choice.rivals
        if rival.plan != asked.plan
    ]
    why = f"{describe(asked.plan)}: asked for; the planner would choose {describe(choice.best.plan)}, {_why(choice.best, asked)}"
    return replace(choice, best=asked, why=why, rivals=tuple(rivals))


def _reason(best: Prediction, rivals: Sequence[Rival], offered: int, *, use_all: bool = False) -> str:
    """The choice in a sentence."""
    used = best.plan.workers
    if use_all and offered > 1:
        return f"{describe(best.plan)}: the fastest found that uses all {offered} devices"
    if used == offered:
        return f"{describe(best.plan)}: the fastest found on {offered} device{'s' if offered > 1 else ''}"
    faster = [rival.prediction for rival in rivals if rival.prediction is not None and rival.prediction.plan.workers > used]
    fastest = min(faster, key=lambda each: each.seconds, default=None)
    if fastest is None or fastest.seconds >= best.seconds:
        beyond = (
            ""
            if fastest is None
            else f"; the best on more, {describe(fastest.plan)}, is slower by {fastest.seconds / best.seconds - 1:.1%}"
        )
        return f"{describe(best.plan)}: uses {used} of {offered} devices, and more would not help{beyond}"
    saved = 1 - fastest.seconds / best.seconds
    return (
        f"{describe(best.plan)}: uses {used} of {offered} devices, for {describe(fastest.plan)} saves only {saved:.1%} "
        f"with {fastest.plan.workers}, below the {GAIN_PER_DOUBLING:.0%} that each doubling must save"
    )
