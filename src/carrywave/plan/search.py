"""Finds the best plan for a spec on a cluster: over replicas, stages, cuts, chunks, micro-batches, recomputation and a shared head.

Memory filters; a formula ranks what fits (`PlanCost.estimate`); the first few of each kind are simulated, and the fastest is chosen.
Settings that change the result of training (lanes, steps, precision, accumulation) belong to the spec and are never touched.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from carrywave.errors import PlanError
from carrywave.plan.cluster import Cluster
from carrywave.plan.fitting import explained
from carrywave.plan.memory import say
from carrywave.plan.plan import Plan
from carrywave.plan.predict import Prediction, Predictor
from carrywave.plan.space import Space
from carrywave.plan.units import Units, unit_names

GAIN_PER_DOUBLING = 0.05  # fraction of the time that doubling the devices must save to be worth it
NEAR = 0.01  # times this near to each other count as equal
SIMULATED = 8  # plans of each kind
TRIED = 3  # plans that real steps decide among
_BELOW = 0.9  # an even share of all work, times this, is a lower bound: chunks can be a little faster than the whole window


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
    to_try: tuple[Plan, ...] = ()  # the few that real steps shall decide among, all of them on as many devices

    @property
    def efficiency(self) -> float | None:
        """Step seconds on one device over device-seconds per step of the plan; None if one device cannot hold the model."""
        return None if self.serial is None else self.serial.seconds / (self.best.seconds * self.best.plan.workers)


def search(units: Units, cluster: Cluster, *, use_all: bool = False) -> PlanChoice:
    """The best plan on at most these devices or, with `use_all`, on all of them; raises `NoFit` if the model fits no plan."""
    predictor = Predictor(units, cluster)
    found = sorted(simulated(predictor, Space(units, cluster, use_all)), key=lambda each: each.seconds)
    best = best_paying(found)
    serial = predictor.predict(Plan.serial()) if predictor.fits(Plan.serial()) else None
    kinds: dict[object, Prediction] = {}  # the best of each kind, the chosen one with other chunks, and the best on more devices
    for each in [*found, *([] if serial is None else [serial])]:
        kinds.setdefault(_kind(each.plan), each)
        if _kind(each.plan) == _kind(best.plan) and each.plan.workers == best.plan.workers:
            kinds.setdefault((each.plan.chunk_steps, each.plan.share_head), each)
        if each.plan.workers > best.plan.workers:
            kinds.setdefault("more", each)
    others = {each.plan: each for each in kinds.values() if each.plan != best.plan}
    rivals = [Rival(each.plan, _why(each, best), each) for each in sorted(others.values(), key=lambda each: each.seconds)]
    if serial is None:
        missing = say(predictor.lack(Plan.serial())[1])
        rivals.append(Rival(Plan.serial(), f"does not fit: {missing} over the {say(predictor.limit(Plan.serial()))} limit"))
    why = _reason(best, rivals, cluster.devices, use_all=use_all)
    tried = _to_try(predictor, best.plan, [each.plan for each in found], max(shape.steps for shape in units.shapes))
    return PlanChoice(best, why, tuple(rivals), serial, cluster.devices, tried)


def _to_try(predictor: Predictor, best: Plan, plans: Sequence[Plan], steps: int) -> tuple[Plan, ...]:
    """The best plan of each kind, then one with a quarter of the chunks and whole lanes, which depends less on how long messages take and
    on how well workers work side by side; then the next best.
    """
    alike = [plan for plan in plans if plan.workers == best.workers]
    firsts = [plan for at, plan in enumerate(alike) if _kind(plan) not in map(_kind, alike[:at])]
    longer = [(plan, 4 * plan.chunk_steps) for plan in firsts if plan.chunk_steps is not None]
    fewer = [replace(plan, chunk_steps=each if each < steps else None, micro_batches=1) for plan, each in longer]
    return tuple(dict.fromkeys([best, *firsts, *(plan for plan in fewer if predictor.fits(plan)), *alike]))[:TRIED]


def simulated(predictor: Predictor, space: Space, wanted: Callable[[Plan], bool] = lambda plan: True) -> list[Prediction]:
    """The first few plans of each kind by formula, simulated."""
    groups = [group for group in space.groups() if wanted(group)]
    if not groups:
        raise PlanError(
            f"{space.most_lanes} lanes and {len(space.units)} units (encoder, {space.units.layers} layers, head) cannot use all "
            f"{space.cluster.devices} devices; use fewer devices"
        )
    found = [predictor.predict(plan) for kind in dict.fromkeys(map(_kind, groups)) for plan in _ranked(predictor, space, groups, kind)]
    if not found:
        raise explained(predictor, space)
    return found


def _ranked(predictor: Predictor, space: Space, groups: Sequence[Plan], kind: object) -> list[Plan]:
    """The plans of a kind that come first by formula."""
    bounds = sorted(((predictor.shared_out(group), group) for group in groups if _kind(group) == kind), key=lambda pair: pair[0])
    ranked: list[tuple[float, int, Plan]] = []
    for bound, group in bounds:
        if len(ranked) >= SIMULATED and _BELOW * bound * _price(group) > ranked[SIMULATED - 1][0]:
            continue
        plans = list(_fitting(predictor, space.plans(group))) or list(_fitting(predictor, space.leaner(group)))
        ranked += [(predictor.estimate(plan) * _price(plan), at, plan) for at, plan in enumerate(plans, len(ranked))]
        ranked = heapq.nsmallest(SIMULATED, ranked)
    return [plan for _, _, plan in ranked]


def _fitting(predictor: Predictor, plans: Iterator[Plan]) -> Iterator[Plan]:
    return (plan for plan in map(predictor.cut, plans) if predictor.fits(plan))


def _kind(plan: Plan) -> tuple[bool, bool]:
    """One device, replicas, stages, or both."""
    return plan.replicas > 1, plan.stages > 1


def _price(plan: Plan, gain: float = GAIN_PER_DOUBLING) -> float:
    """The factor by which seconds are penalized for the number of devices, if each doubling must save the fraction `gain`."""
    return math.pow(1 - gain, -math.log2(plan.workers))


def _score(prediction: Prediction) -> float:
    return prediction.seconds * _price(prediction.plan)


def best_paying(predictions: Sequence[Prediction]) -> Prediction:
    """The fastest prediction, where more devices must pay off."""
    return min(predictions, key=_score)


def describe(plan: Plan) -> str:
    """Describe a plan in words."""
    sizes = ((plan.replicas, "replica"), (plan.stages, "stage"))
    parts = [" x ".join(f"{number} {name}s" for number, name in sizes if number > 1) or "1 device"]
    if plan.chunk_steps is not None:
        parts.append(f"chunks of {plan.chunk_steps} steps")
    if plan.micro_batches > 1:
        parts.append(f"{plan.micro_batches} micro-batches")
    parts += ["recompute twice" if plan.recompute == "twice" else "recompute"] * bool(plan.recompute) + ["shared head"] * plan.shares_head
    return ", ".join(parts)


def asked_for(plan: Plan, units: Units, cluster: Cluster, choice: PlanChoice) -> PlanChoice:
    """The choice with the user's plan instead of the chosen one, which becomes one of the alternatives."""
    predictor = Predictor(units, cluster)
    stage, over = predictor.lack(plan)
    if over > 0:
        raise PlanError(
            f"stage {stage} of the requested plan ({unit_names(len(units), *plan.span(stage, len(units)))}) exceeds the "
            f"{say(predictor.limit(plan))} of its device by {say(over)}; this plan fits: {describe(choice.best.plan)}"
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


def _why(rival: Prediction, best: Prediction) -> str:
    """Why a plan that fits was not chosen."""
    ratio, more = rival.seconds / best.seconds, rival.plan.workers / best.plan.workers
    if _score(rival) < _score(best) * (1 - NEAR):
        return f"faster by {1 / ratio - 1:.1%}"
    if ratio < 1 and more > 1:
        return f"{1 - ratio:.1%} less time for {more:.3g} times the devices: below the {GAIN_PER_DOUBLING:.0%} that each doubling must save"
    if ratio < 1 + NEAR:
        return "equally fast" + (", on more devices" if more > 1 else ", on fewer devices" if more < 1 else "")
    return f"slower by {ratio - 1:.1%}"


def _reason(best: Prediction, rivals: Sequence[Rival], offered: int, *, use_all: bool) -> str:
    """The reason for the choice, in one sentence."""
    used, name = best.plan.workers, describe(best.plan)
    if use_all and offered > 1:
        return f"{name}: the fastest found that uses all {offered} devices"
    if used == offered:
        return f"{name}: the fastest found on {offered} device{'s' if offered > 1 else ''}"
    faster = [rival.prediction for rival in rivals if rival.prediction is not None and rival.plan.workers > used]
    fastest = min(faster, key=lambda each: each.seconds, default=None)
    if fastest is None:
        return f"{name}: uses {used} of {offered} devices, and more would not help"
    if fastest.seconds >= best.seconds:
        slower = f"the best on more devices, {describe(fastest.plan)}, is slower by {fastest.seconds / best.seconds - 1:.1%}"
        return f"{name}: uses {used} of {offered} devices, and more would not help; {slower}"
    return (
        f"{name}: uses {used} of {offered} devices, because {describe(fastest.plan)} saves only {1 - fastest.seconds / best.seconds:.1%} "
        f"with {fastest.plan.workers}, below the {GAIN_PER_DOUBLING:.0%} that each doubling must save"
    )
