"""Finds settings with which a run would be much faster, for one line at its start: only what the planner's figures show clearly.

Each change is tried alone and with the plan of the run, so that the gain is not that of a better plan. Whatever would not fit in memory or
leave too few batches in an epoch is left out, as is everything for which the profile has no figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from carrywave.errors import PlanError, option
from carrywave.plan.cost.cluster import Cluster
from carrywave.plan.cost.units import Units
from carrywave.plan.plan import Plan
from carrywave.plan.search.predictor import Prediction, Predictor
from carrywave.spec.defaults import LEAST_BATCHES
from carrywave.spec.facts import DataFacts
from carrywave.spec.spec import Spec

MUCH = 1.5  # how many times as fast a run must become for a hint; predictions are off by far less
MORE = (2, 4)  # times as many lanes; the first that gains enough is named


@dataclass(frozen=True)
class Hint:
    """A setting, and how many times as many tokens a second are predicted with it."""

    setting: str
    gain: float
    profile: str
    changes: str = ""  # what of the training it changes besides the speed


def other_settings(spec: Spec, facts: DataFacts, units: Units, cluster: Cluster, plan: Plan, *, bf16: bool) -> list[Hint]:
    """Settings of the spec with which this plan would be much faster, most gain first. `bf16`: all devices are made for it."""
    now = _predicted(units, cluster, plan)
    if now is None:
        return []
    hints = []
    if bf16 and units.precision in ("fp32", "tf32"):
        other = _predicted(replace(units, precision="bf16"), cluster, plan)
        hints += _much("train.precision=bf16", now, other, cluster, "the precision")
    for setting, wider in _wider(spec, facts, units):
        if hint := _much(setting, now, _predicted(wider, cluster, plan), cluster, "the batch"):
            hints += hint
            break
    return sorted(hints, key=lambda each: -each.gain)


def one_device(units: Units, cluster: Cluster, plan: Plan) -> list[Hint]:
    """A hint to use one device, if this plan is much slower than that."""
    now = None if plan.workers == 1 else _predicted(units, cluster, plan)
    return [] if now is None else _much(option("devices", 1), now, _predicted(units, cluster, Plan()), cluster)


def hint_lines(hints: Sequence[Hint]) -> list[str]:
    """The hints in one line; nothing without any."""
    if not hints:
        return []
    parts = [f"{each.setting} (about {each.gain:.1f} times as fast)" for each in sorted(hints, key=lambda each: -each.gain)]
    changed = sorted({each.changes for each in hints if each.changes})
    profiles = " and ".join(sorted({each.profile for each in hints}))
    sentence = f"this run would be much faster with {' or '.join(parts)}, as predicted from the profile of {profiles}"
    if not changed:
        return [sentence]
    return [f"{sentence}; {' and '.join(changed)} change{'s' * (len(changed) == 1)} the result of training, so the decision is yours"]


def _wider(spec: Spec, facts: DataFacts, units: Units) -> Iterator[tuple[str, Units]]:
    """Larger batches that leave enough of them in an epoch."""
    each = spec.lanes * spec.steps if spec.streams else spec.tokens
    for times in MORE:
        if facts.steps >= times * each * units.accumulate * LEAST_BATCHES:
            setting = f"batch.lanes={times * spec.lanes}" if spec.streams else f"batch.tokens={times * spec.tokens}"
            yield setting, replace(units, shapes=tuple(replace(shape, lanes=times * shape.lanes) for shape in units.shapes))


def _predicted(units: Units, cluster: Cluster, plan: Plan) -> Prediction | None:
    """The prediction; None if the plan does not fit, or the profile lacks samples of its kinds of work."""
    predictor = Predictor(units, cluster)
    try:
        return predictor.predict(plan) if predictor.fits(plan) else None
    except PlanError:
        return None


def _much(setting: str, now: Prediction, other: Prediction | None, cluster: Cluster, changes: str = "") -> list[Hint]:
    gain = 0.0 if other is None else other.tokens_per_second / now.tokens_per_second
    return [Hint(setting, gain, cluster.hosts[0].profile.name, changes)] if gain >= MUCH else []
