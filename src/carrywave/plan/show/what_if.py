"""Finds changes that would make training faster: each is tried and reported with its prediction.

The planner makes none of these changes itself. Links, memory and devices cost money; the batch and the precision change what is learned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from carrywave.errors import PlanError
from carrywave.plan.cost.cluster import Cluster, Host
from carrywave.plan.cost.profile import Link, Profile
from carrywave.plan.cost.units import Units
from carrywave.plan.search.predictor import Prediction, Predictor
from carrywave.plan.search.search import GAIN_PER_DOUBLING, TOLERANCE, PlanChoice, Search, describe
from carrywave.plan.show.text import seconds_text, stage_names

LINKS_FASTER = 4
_YOURS = "changes the result of training, so the decision is yours"


@dataclass(frozen=True)
class Remedy:
    """A change, and the prediction for the best plan with it."""

    change: str
    prediction: Prediction
    gain: float  # relative gain in tokens/s
    note: str = ""

    def __str__(self) -> str:
        prediction = self.prediction
        line = f"{self.change}: {self.gain:+.1%}, {prediction.speed} with {describe(prediction.plan)}"
        return line + (f" ({self.note})" if self.note else "")


def remedies(units: Units, cluster: Cluster, choice: PlanChoice, *, use_all: bool = False) -> list[Remedy]:
    """The changes tried, largest gain first; those without gain are included, to show that they are not the bottleneck."""
    tried = []
    for change, note, other_units, other_cluster in _changes(units, cluster, choice):
        try:
            search = Search(Predictor(other_units, other_cluster), use_all=use_all, tolerance=TOLERANCE)
            best = search.best(lambda plan: True, gain=GAIN_PER_DOUBLING)
        except PlanError:  # the profile has no figures for it
            continue
        if best is not None:
            tried.append(Remedy(change, best, best.tokens_per_second / choice.best.tokens_per_second - 1, note))
    return sorted(tried, key=lambda each: -each.gain)


def _changes(units: Units, cluster: Cluster, choice: PlanChoice) -> Iterator[tuple[str, str, Units, Cluster]]:
    plan = choice.best.plan
    if cluster.devices > 1:
        yield f"links {LINKS_FASTER} times as fast", "", units, _faster(cluster, LINKS_FASTER)
    if plan.recompute or choice.serial is None or any(rival.prediction is None for rival in choice.rivals):
        yield "twice the memory on each device", "", units, _with(cluster, lambda p: replace(p, memory_bytes=2 * p.memory_bytes))
    more = _twice(cluster)
    if more is not None and plan.workers == cluster.devices:
        yield f"{more.devices} devices", "", units, more
    if units.precision in ("fp32", "tf32") and _knows(cluster, "bf16"):
        yield "train.precision=bf16", _YOURS, replace(units, precision="bf16"), cluster
    lanes = max(shape.lanes for shape in units.shapes)
    change = f"batch.lanes={2 * lanes}" if units.streams else "twice the batch.tokens"
    wider = tuple(replace(shape, lanes=2 * shape.lanes) for shape in units.shapes)
    yield change, _YOURS, replace(units, shapes=wider), cluster


def balance_text(predictor: Predictor, prediction: Prediction) -> str | None:
    """Says which stage is the slowest and what keeps the stages from being balanced; None with a single stage."""
    units, plan, stages = predictor.units, prediction.plan, prediction.stages
    if len(stages) == 1:
        return None
    mean = sum(stage.seconds for stage in stages) / len(stages)
    slowest = max(range(len(stages)), key=lambda number: stages[number].seconds)
    over = stages[slowest].seconds - mean
    name = stage_names(prediction, len(units))[slowest]
    works = f"stage {slowest} ({name}), takes {seconds_text(stages[slowest].seconds)} per step"
    if over < TOLERANCE * prediction.seconds:
        return f"the stages are balanced: the slowest, {works}"
    even = predictor.balanced(plan)
    other = None if even is None or not predictor.fits(replace(plan, cuts=even)) else predictor.predict(replace(plan, cuts=even))
    if other is not None and other.seconds < prediction.seconds * (1 - TOLERANCE):
        gain = f"{prediction.seconds / other.seconds - 1:+.1%}, {other.speed}"
        return f"this plan with plan.cuts={list(other.plan.cuts)}: {gain}; now the slowest, {works}"
    alone = [predictor.slowest(plan, slowest, unit, unit + 1) for unit in range(len(units) - plan.shares_head)]
    largest = alone.index(max(alone))
    return (
        f"the slowest, {works}, against {seconds_text(mean)} on average: balanced stages would save about {seconds_text(over)} "
        f"({over / prediction.seconds:.1%}), but units cannot be divided; the largest, {units.units[largest].name}, "
        f"takes {seconds_text(alone[largest])}"
    )


def _knows(cluster: Cluster, precision: str) -> bool:
    return all(any(s.kind == "lstm" and s.precision == precision for s in host.profile.samples) for host in cluster.hosts)


def _twice(cluster: Cluster) -> Cluster | None:
    """A cluster with twice the devices; None if it is unknown how they would be linked."""
    first = cluster.hosts[0]
    if len(cluster.hosts) == 1 and cluster.within is None and cluster.between is None:
        size = first.profile.devices_per_host
        linked = first.profile.between is not None or 2 * first.devices <= size
        return Cluster.uniform(first.profile, 2 * first.devices) if linked and first.devices <= size else None
    linked = cluster.between is not None or all(host.profile.between is not None for host in cluster.hosts)
    return replace(cluster, hosts=cluster.hosts * 2) if linked else None


def _faster(cluster: Cluster, times: int) -> Cluster:
    def fast(link: Link | None) -> Link | None:
        return (
            None
            if link is None
            else replace(link, latency_seconds=link.latency_seconds / times, bytes_per_second=link.bytes_per_second * times)
        )

    def change(profile: Profile) -> Profile:
        within = fast(profile.within)
        assert within is not None
        # Scale the measured all-reduces with the link, so that the ratio of measured to modelled time stays the same.
        sums = tuple(replace(each, seconds=each.seconds / times) for each in profile.reductions)
        return replace(profile, within=within, between=fast(profile.between), reductions=sums)

    return replace(_with(cluster, change), within=fast(cluster.within), between=fast(cluster.between))


def _with(cluster: Cluster, change: Callable[[Profile], Profile]) -> Cluster:
    """The cluster with changed profiles; hosts that share a profile still share it."""
    changed: dict[int, Profile] = {}
    for host in cluster.hosts:
        if id(host.profile) not in changed:
            changed[id(host.profile)] = change(host.profile)
    return replace(cluster, hosts=tuple(Host(host.devices, changed[id(host.profile)]) for host in cluster.hosts))
