"""Finds the best plan for a spec on a cluster: over replicas, stages, cuts, chunks, micro-batches, recomputation, a shared head and, where
a model does not fit otherwise, a split vocabulary.

This is a best-first branch and bound: every plan has a lower bound on its time, and only plans that could still win are examined more
closely, first with their cuts, then in the simulator. The result is that of simulating everything `space` lists, to within a tolerance,
and most plans cost a few microseconds. The search is incomplete in three ways: of many numbers of replicas, stages and chunks, `space`
lists only some; of many possible cuts, only one is examined; and a search ends after a fixed number of simulations. If it ends early, the
choice says how much faster a remaining plan could be.

Settings that change the result of training (lanes, steps, precision, accumulation) belong to the spec and are never touched.
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
from carrywave.plan.cost.cluster import Cluster
from carrywave.plan.cost.units import Units
from carrywave.plan.plan import Plan, even_cuts
from carrywave.plan.search.memory_advice import explained
from carrywave.plan.search.partition import NoFit, all_cuts, partition, say, units_text
from carrywave.plan.search.predictor import Prediction, Predictor
from carrywave.plan.search.space import ALL_STAGES, MICRO_BATCHES, Space

GAIN_PER_DOUBLING = 0.05  # fraction of the time that doubling the devices must save to be worth it
TOLERANCE = 0.01  # how much slower than the best the plan found may be
FEW_UNITS = 6  # up to this many units, all cuts are tried; beyond, only those that balance the stages
MOST_SIMULATED = 40  # plans per search; the bounds are tight enough for a few to suffice, except with a shared head
_RIVALS_SIMULATED, _RIVALS_CUT = 4, 200  # limits for each kind of alternative shown beside the chosen plan
_SURELY = 0.9  # makes `shared_out` a safe lower bound: chunks can be faster than the whole window, but by less than 10%


@dataclass(frozen=True)
class Rival:
    """A plan that was not chosen, and why."""

    plan: Plan
    why: str
    prediction: Prediction | None = None  # None if it does not fit


@dataclass(frozen=True)
class PlanChoice:
    """The chosen plan, the reason, and the alternatives."""

    best: Prediction
    why: str
    rivals: tuple[Rival, ...]
    serial: Prediction | None  # on one device; None if the model does not fit there
    devices: int  # available devices
    left: float = 0.0  # if the search ended early: the most by which a plan that was not simulated could be faster

    @property
    def efficiency(self) -> float | None:
        """Step seconds on one device over device-seconds per step of the plan; None if one device cannot hold the model."""
        return None if self.serial is None else self.serial.seconds / (self.best.seconds * self.best.plan.workers)


Wanted = Callable[[Plan], bool]
Level = Literal["group", "uncut", "cut"]  # how much of a plan is decided: replicas and stages; all but the cuts; everything


def search(units: Units, cluster: Cluster, *, use_all: bool = False, tolerance: float = TOLERANCE) -> PlanChoice:
    """The best plan on at most these devices or, with `use_all`, on all of them; raises `NoFit` if the model fits no plan."""
    searched = Search(Predictor(units, cluster), use_all=use_all, tolerance=tolerance)
    best = searched.chosen()
    left = searched.left
    kinds: tuple[Wanted, ...] = (_serial, _replicas, _stages, _both)
    of_kind = [searched.rival(kind) for kind in kinds]
    # An alternative may have turned out better than the search's result: then choose it, so that no plan shown beats the choice.
    best = min((each for each in (best, *of_kind) if each is not None), key=lambda each: _score(each.seconds, each.plan, GAIN_PER_DOUBLING))
    used = best.plan.workers
    more = searched.rival(lambda plan: plan.workers > used) if used < cluster.devices else None
    rivals = [Rival(each.plan, _why(each, best), each) for each in (*of_kind, more, *searched.variants(best.plan)) if each is not None]
    rivals += [
        Rival(plan, lack)
        for kind, each in zip(kinds, of_kind, strict=True)
        if each is None and (plan := searched.lacking(kind))
        for lack in [searched.lack(plan)]
    ]
    shown: dict[Plan, Rival] = {}
    for rival in rivals:
        if rival.plan != best.plan:
            shown.setdefault(rival.plan, rival)
    ordered = sorted(shown.values(), key=lambda rival: math.inf if rival.prediction is None else rival.prediction.seconds)
    why = _reason(best, ordered, cluster.devices, use_all=use_all)
    if left:
        why += f" ({MOST_SIMULATED} plans were simulated; any other could be faster by at most {left:.1%})"
    return PlanChoice(best, why, tuple(ordered), of_kind[0] or searched.serial(), cluster.devices, left)


def describe(plan: Plan) -> str:
    """Describe a plan in words."""
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
    if plan.micro_batches > 1:
        parts.append(f"{plan.micro_batches} micro-batches")
    parts += ["recompute twice" if plan.recompute == "twice" else "recompute"] * bool(plan.recompute) + ["shared head"] * plan.shares_head
    return ", ".join(parts)


class Search:
    """The state of a search; `best` can be called repeatedly, for different subsets of the plans."""

    def __init__(self, predictor: Predictor, *, use_all: bool, tolerance: float) -> None:
        self.predictor, self.units, self.cluster = predictor, predictor.units, predictor.cluster
        self.space, self.tolerance = Space(self.units, self.cluster, use_all), tolerance
        self.cuts: dict[Plan, list[tuple[int, ...]]] = {}  # cuts that fit, per plan
        # One cache per function, because a one-stage plan is the same key before and after it is cut.
        self._shared_out, self._least = cache(predictor.shared_out), cache(predictor.least)
        self._bound, self._predict = cache(predictor.bound), cache(predictor.predict)
        self.misfits: dict[Plan, None] = {}
        self.left = 0.0  # after the last `best`: the most by which a plan that was not simulated could be better

    def rival(self, wanted: Wanted) -> Prediction | None:
        """The best of the wanted plans, or nearly so: it is only shown beside the chosen plan."""
        return self.best(wanted, gain=0.0, most=_RIVALS_SIMULATED, most_cut=_RIVALS_CUT)

    def best(self, wanted: Wanted, *, gain: float, most: int = MOST_SIMULATED, most_cut: float = math.inf) -> Prediction | None:
        """The best of the wanted plans, where doubling the devices must save the fraction `gain`; None if no plan fits.

        At most `most` plans are simulated, and at most `most_cut` of each sort are examined with their cuts; the best of those is returned.
        """
        number = count()
        heap: list[tuple[float, int, Level, Plan]] = []  # lower bound on the score, tie-break, level, plan
        best: Prediction | None = None
        limit, simulated = math.inf, 0
        cut: Counter[tuple[bool, bool]] = Counter()  # by (several stages, several micro-batches): bounds are less tight with micro-batches

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
                sort = plan.stages > 1, plan.micro_batches > 1
                if cut[sort] >= most_cut:
                    continue
                for cuts in self._cuts(plan):
                    whole = replace(plan, cuts=cuts)
                    push(whole, self._bound(whole), "cut")
                    cut[sort] += 1
                if not self.cuts[plan] and not plan.recompute and plan.micro_batches <= MICRO_BATCHES[-1]:
                    for each in self.space.leaner(plan):
                        push(each, self._least(each), "uncut")
            else:
                simulated += 1
                prediction = self._predict(plan)
                if (score := _score(prediction.seconds, plan, gain)) < limit:
                    best, limit = prediction, score
        sure = not heap or heap[0][0] * (1 + self.tolerance) >= limit
        self.left = 0.0 if sure else limit / heap[0][0] - 1
        return best

    def _cuts(self, plan: Plan) -> list[tuple[int, ...]]:
        """The cuts that fit: all of them for a few units, otherwise only those that balance the stages."""
        if plan not in self.cuts:
            units = len(self.units)
            limits = self.predictor.limits(plan)
            if not self.predictor.may_fit(plan):
                self.misfits[plan] = None
                self.cuts[plan] = []
                return []
            even = None if units <= FEW_UNITS else self.predictor.balanced(plan)
            if units <= FEW_UNITS:
                fitting = [cuts for cuts in all_cuts(units, plan.stages) if self.predictor.fits(replace(plan, cuts=cuts))]
            elif even is not None and self.predictor.fits(replace(plan, cuts=even)):
                fitting = [even]
            else:
                try:
                    fitting = [
                        partition(
                            units,
                            plan.stages,
                            lambda s, a, b: self.predictor.slowest(plan, s, a, b),
                            lambda s, a, b: self.predictor.memory(plan, s, a, b).total,
                            limits,
                        )
                    ]
                except NoFit:
                    fitting = []
            self.cuts[plan] = fitting
            if not fitting:
                self.misfits[plan] = None
        return self.cuts[plan]

    def variants(self, plan: Plan) -> list[Prediction]:
        """The chosen plan with one thing changed, if that fits: chunk size, even cuts, the head shared or not, two micro-batches."""
        steps = sorted(each for each in self.space.chunk_steps() if each is not None)
        near: list[Plan] = []
        if plan.stages > 1:
            at = steps.index(plan.chunk_steps) if plan.chunk_steps in steps else len(steps)
            near += [replace(plan, chunk_steps=each) for each in (*steps[max(0, at - 1) : at], *steps[at + 1 : at + 2])]
            near.append(replace(plan, cuts=even_cuts(len(self.units), plan.stages)))
            near += [replace(plan, share_head=not plan.share_head)] * (not self.units.pooled and not self.units.whole_head)
            near += [replace(plan, micro_batches=2)] * (
                plan.micro_batches == 1 and 2 in self.space.micro_batches(plan.replicas, MICRO_BATCHES)
            )
        return [self._predict(each) for each in near if each != plan and self.predictor.fits(each)]

    def chosen(self) -> Prediction:
        """The best of all plans, where more devices must pay off; if none fits, raises an error that says what would make the model fit."""
        try:
            self.check_room()
            best = self.best(_any, gain=GAIN_PER_DOUBLING, most=MOST_SIMULATED)
            if best is None:
                raise self.nothing()
        except NoFit as error:
            raise explained(error, self.space) from None
        return best

    def serial(self) -> Prediction | None:
        """The prediction for one device, for comparison; None if it cannot hold the model."""
        return self._predict(Plan.serial()) if self.predictor.fits(Plan.serial()) else None

    def check_room(self) -> None:
        """Reject a model that does not fit even with the leanest plan, before thousands are tried."""
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
        """The error when there is no plan at all, or none that fits."""
        devices, most = self.cluster.devices, self.space.most_lanes
        if self.misfits:
            return min((self.predictor.missing(plan) for plan in list(self.misfits)[:64]), key=lambda error: error.missing_bytes)
        return PlanError(
            f"{most} lanes and {len(self.units)} units (encoder, {self.units.layers} layers, head) cannot use all {devices} devices; "
            "use fewer devices"
        )

    def lacking(self, wanted: Wanted) -> Plan | None:
        """The first of the wanted plans that did not fit."""
        return next((plan for plan in self.misfits if wanted(plan)), None)

    def lack(self, plan: Plan) -> str:
        """Says how much memory a plan lacks."""
        limits, units = self.predictor.limits(plan), len(self.units)
        missing = self.predictor.missing(plan).missing_bytes
        held = "a stage" if plan.stages > 1 else units_text(0, units, units)
        return f"does not fit: {say(missing)} over the {say(min(limits))} limit of {held}"


def _any(plan: Plan) -> bool:
    return True


def _serial(plan: Plan) -> bool:
    return plan.workers == 1


def _replicas(plan: Plan) -> bool:
    return plan.replicas > 1 and plan.stages == 1


def _stages(plan: Plan) -> bool:
    # Only shown beside the chosen plan, and schedules of many stages take long to build.
    return plan.replicas == 1 and 1 < plan.stages <= ALL_STAGES


def _both(plan: Plan) -> bool:
    return plan.replicas > 1 and plan.stages > 1


def price(devices: int, gain: float) -> float:
    """The factor by which seconds on this many devices are penalized if each doubling must save the fraction `gain`."""
    return math.pow(1 - gain, -math.log2(devices))


def _score(seconds: float, plan: Plan, gain: float) -> float:
    """Seconds, penalized for the number of devices."""
    return seconds * price(plan.workers, gain)


def _why(rival: Prediction, best: Prediction) -> str:
    """Why a plan that fits was not chosen."""
    ratio = rival.seconds / best.seconds
    more = rival.plan.workers / best.plan.workers
    if ratio < price(best.plan.workers, GAIN_PER_DOUBLING) / price(rival.plan.workers, GAIN_PER_DOUBLING) and ratio < 1 - TOLERANCE:
        return f"faster by {1 / ratio - 1:.1%}"
    if ratio < 1 and more > 1:
        return f"{1 - ratio:.1%} less time for {more:.3g} times the devices: below the {GAIN_PER_DOUBLING:.0%} that each doubling must save"
    if ratio < 1 + TOLERANCE:
        return "equally fast" + (", on more devices" if more > 1 else ", on fewer devices" if more < 1 else "")
    return f"slower by {ratio - 1:.1%}"


def asked_for(plan: Plan, predictor: Predictor, choice: PlanChoice) -> PlanChoice:
    """The choice with the user's plan instead of the chosen one, which becomes one of the alternatives."""
    edges = plan.edges(len(predictor.units))
    for stage, (memory, limit) in enumerate(zip(predictor.memories(plan), predictor.limits(plan), strict=True)):
        if memory.total > limit:
            where = units_text(edges[stage], edges[stage + 1], len(predictor.units))
            over = say(memory.total - limit)
            raise PlanError(
                f"stage {stage} of the requested plan ({where}) exceeds the {say(limit)} of its device by {over}; "
                f"this plan fits: {describe(choice.best.plan)}"
            )
    asked = predictor.predict(plan)
    if asked.plan == choice.best.plan:
        return replace(choice, why=f"{describe(asked.plan)}: requested, and also the planner's choice")
    rivals = [Rival(choice.best.plan, f"the planner's choice: {_why(choice.best, asked)}", choice.best)]
    rivals += [
        rival if rival.prediction is None else replace(rival, why=_why(rival.prediction, asked))
        for rival in choice.rivals
        if rival.plan != asked.plan
    ]
    why = f"{describe(asked.plan)}: requested; the planner would choose {describe(choice.best.plan)}, {_why(choice.best, asked)}"
    return replace(choice, best=asked, why=why, rivals=tuple(rivals))


def _reason(best: Prediction, rivals: Sequence[Rival], offered: int, *, use_all: bool = False) -> str:
    """The reason for the choice, in one sentence."""
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
            else f"; the best on more devices, {describe(fastest.plan)}, is slower by {fastest.seconds / best.seconds - 1:.1%}"
        )
        return f"{describe(best.plan)}: uses {used} of {offered} devices, and more would not help{beyond}"
    saved = 1 - fastest.seconds / best.seconds
    return (
        f"{describe(best.plan)}: uses {used} of {offered} devices, because {describe(fastest.plan)} saves only {saved:.1%} "
        f"with {fastest.plan.workers}, below the {GAIN_PER_DOUBLING:.0%} that each doubling must save"
    )
