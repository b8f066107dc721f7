"""Finds the best plan for a spec on a cluster: over replicas, stages, cuts, chunks, micro-batches, recomputation and a shared head.

Memory filters; a formula ranks what fits (`PlanCost.estimate`); the first few of each kind are simulated, and the fastest is chosen.
Settings that change the result of training (lanes, steps, precision, accumulation) belong to the spec and are never touched.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from carrywave.errors import PlanError
from carrywave.plan.cluster import Cluster
from carrywave.plan.memory import say
from carrywave.plan.plan import Plan
from carrywave.plan.predict import Prediction, Predictor
from carrywave.plan.space import Space
from carrywave.plan.units import Units, unit_names

GAIN_PER_DOUBLING = 0.05  # fraction of the time that doubling the devices must save to be worth it
SIMULATED = 8  # plans of each kind
TRIED = 3  # plans that real steps decide among


class NoFit(PlanError):
    """No plan fits in memory."""


@dataclass(frozen=True)
class PlanChoice:
    """The chosen plan, and the alternatives: the best of each kind, and of the chosen kind those with other chunks."""

    best: Prediction
    rivals: tuple[Prediction, ...]
    serial: Prediction | None  # on one device; None if the model does not fit there
    devices: int  # available devices
    to_try: tuple[Plan, ...] = ()  # the few that real steps shall decide among, all of them on as many devices
    chosen: Plan | None = None  # what the planner would choose, where the user asked for a plan

    @property
    def efficiency(self) -> float | None:
        """Step seconds on one device over device-seconds per step of the plan; None if one device cannot hold the model."""
        return None if self.serial is None else self.serial.seconds / (self.best.seconds * self.best.plan.workers)

    @property
    def why(self) -> str:
        """The reason for the choice, in one sentence."""
        used, name = self.best.plan.workers, describe(self.best.plan)
        if self.chosen is not None:
            return f"{name}: requested" + (
                ", and also the planner's choice"
                if self.chosen == self.best.plan
                else f"; the planner would choose {describe(self.chosen)}, {self.beside(self.rivals[0])}"
            )
        if used == self.devices:
            return f"{name}: the fastest found on {used} device{'s' * (used > 1)}"
        more = min((each for each in self.rivals if each.plan.workers > used), key=lambda each: each.seconds, default=None)
        beside = "" if more is None else f"; on {more.plan.workers}, {describe(more.plan)} is {self.beside(more)}"
        return f"{name}: uses {used} of {self.devices} devices, as each doubling must save {GAIN_PER_DOUBLING:.0%}{beside}"

    def beside(self, rival: Prediction) -> str:
        """How another plan compares with this one."""
        ratio = rival.seconds / self.best.seconds
        return f"slower by {ratio - 1:.1%}" if ratio >= 1 else f"faster by {1 / ratio - 1:.1%}"


def search(units: Units, cluster: Cluster, *, use_all: bool = False) -> PlanChoice:
    """The best plan on at most these devices or, with `use_all`, on all of them; raises `NoFit` if the model fits no plan."""
    predictor = Predictor(units, cluster)
    found = _simulated(predictor, Space(units, cluster, use_all))
    best = min(found, key=_score)
    serial = predictor.predict(Plan.serial()) if predictor.fits(Plan.serial()) else None
    kinds: dict[object, Prediction] = {}  # the best of each kind, the chosen one with other chunks, and the best on more devices
    for each in [*found, *([] if serial is None else [serial])]:
        kinds.setdefault(_kind(each.plan), each)
        if _kind(each.plan) == _kind(best.plan) and each.plan.workers == best.plan.workers:
            kinds.setdefault((each.plan.chunk_steps, each.plan.share_head), each)
        if each.plan.workers > best.plan.workers:
            kinds.setdefault("more", each)
    others = {each.plan: each for each in kinds.values() if each.plan != best.plan}
    rivals = tuple(sorted(others.values(), key=lambda each: each.seconds))
    tried = _to_try(predictor, best.plan, [each.plan for each in found])
    return PlanChoice(best, rivals, serial, cluster.devices, tried)


def asked_for(plan: Plan, units: Units, cluster: Cluster, choice: PlanChoice) -> PlanChoice:
    """The choice with the user's plan instead of the chosen one, which becomes the first of the alternatives."""
    predictor = Predictor(units, cluster)
    stage, over = predictor.lack(plan)
    if over > 0:
        raise PlanError(
            f"stage {stage} of the requested plan ({unit_names(len(units), *plan.span(stage, len(units)))}) exceeds the "
            f"{say(predictor.limit(plan))} of its device by {say(over)}; this plan fits: {describe(choice.best.plan)}"
        )
    asked = predictor.predict(plan)
    others = tuple(each for each in (choice.best, *choice.rivals) if each.plan != asked.plan)
    return replace(choice, best=asked, rivals=others, chosen=choice.best.plan)


def _to_try(predictor: Predictor, best: Plan, plans: Sequence[Plan]) -> tuple[Plan, ...]:
    """The best plan of each kind, then one with a quarter of the chunks and whole lanes, which depends less on how long messages take and
    on how well workers work side by side; then the next best.
    """
    steps = max(shape.steps for shape in predictor.units.shapes)
    alike = [plan for plan in plans if plan.workers == best.workers]
    firsts = [plan for at, plan in enumerate(alike) if _kind(plan) not in map(_kind, alike[:at])]
    longer = [(plan, 4 * plan.chunk_steps) for plan in firsts if plan.chunk_steps is not None]
    fewer = [replace(plan, chunk_steps=each if each < steps else None, micro_batches=1) for plan, each in longer]
    return tuple(dict.fromkeys([best, *firsts, *filter(predictor.fits, fewer), *alike]))[:TRIED]


def _simulated(predictor: Predictor, space: Space) -> list[Prediction]:
    """The first few plans of each kind by formula, simulated; the fastest first."""
    groups = space.groups()
    if not groups:
        raise PlanError(
            f"{space.most_lanes} lanes and {len(space.units)} units (encoder, {space.units.layers} layers, head) cannot use all "
            f"{space.cluster.devices} devices; use fewer devices"
        )
    ranked: dict[object, list[Plan]] = {}
    for group in groups:
        fitting = partial(_fitting, predictor)
        ranked.setdefault(_kind(group), []).extend(fitting(space.plans(group)) or fitting(space.leaner(group)))

    def priced(plan: Plan) -> float:
        return predictor.estimate(plan) * _price(plan)

    found = [predictor.predict(plan) for plans in ranked.values() for plan in heapq.nsmallest(SIMULATED, plans, key=priced)]
    if not found:
        raise _no_fit(predictor, space)
    return sorted(found, key=lambda each: each.seconds)


def _fitting(predictor: Predictor, plans: Iterable[Plan]) -> list[Plan]:
    return list(filter(predictor.fits, map(predictor.cut, plans)))


def _no_fit(predictor: Predictor, space: Space) -> NoFit:
    """The error for all plans together: what the plan that needs the least lacks."""
    leanest = [predictor.cut([group, *space.leaner(group)][-1]) for group in space.groups()]
    plan, (stage, over) = min(((plan, predictor.lack(plan)) for plan in leanest), key=lambda each: each[1][1])
    devices, size = space.cluster.devices, "batch.lanes" if space.units.streams else "batch.tokens"
    half = "" if space.units.activation_bytes == 2 else "train.precision=bf16, "
    names = unit_names(len(space.units), *plan.span(stage, len(space.units)))
    return NoFit(
        f"the model does not fit on {devices} device{'s' * (devices > 1)}: at best, stage {stage} ({names}) exceeds the "
        f"{say(predictor.limit(plan))} of its device by {say(over)}; use a smaller {size}, {half}more devices or a smaller model"
    )


def _kind(plan: Plan) -> tuple[bool, bool]:
    """One device, replicas, stages, or both."""
    return plan.replicas > 1, plan.stages > 1


def _price(plan: Plan) -> float:
    """The factor by which seconds are penalized for the number of devices, as each doubling must save `GAIN_PER_DOUBLING`."""
    return math.pow(1 - GAIN_PER_DOUBLING, -math.log2(plan.workers))


def _score(prediction: Prediction) -> float:
    return prediction.seconds * _price(prediction.plan)


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
