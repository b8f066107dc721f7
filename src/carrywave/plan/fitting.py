"""Says what a model lacks that fits no plan, and what would make it fit: each remedy was tried, for memory only, before it is suggested."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from carrywave.errors import PlanError
from carrywave.plan.cluster import Cluster
from carrywave.plan.memory import say
from carrywave.plan.plan import Plan
from carrywave.plan.predict import Predictor
from carrywave.plan.space import Space
from carrywave.plan.units import unit_names

TIMES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 64)  # as many devices, or as few lanes, that are tried
_UP = 1.005  # sizes are printed to three digits, and a device with the printed size must be large enough


class NoFit(PlanError):
    """No plan fits in memory."""


def explained(predictor: Predictor, space: Space) -> NoFit:
    """The error for all plans together, with what would make the model fit."""
    devices, (plan, stage, over) = space.cluster.devices, _nearest(predictor, space)
    ways = [*_remedies(space), f"{say(int(over * _UP) + 1)} more memory on each device"]
    first, last = plan.span(stage, len(space.units))
    what = unit_names(len(space.units), first, last)
    held = f"{what} alone exceeds" if last - first == 1 else f"stage {stage} ({what}) exceeds"
    listed = " or ".join(", ".join(part) for part in (ways[:-1], ways[-1:]) if part)
    return NoFit(
        f"the model does not fit on {devices} device{'s' if devices > 1 else ''}: at best, {held} the "
        f"{say(predictor.limit(plan))} of its device by {say(over)}; it fits with {listed}"
    )


def _leanest(space: Space) -> Iterator[Plan]:
    """For each number of stages, the plans that need the least memory."""
    for group in space.groups():
        *_, last = [group, *space.leaner(group)]
        yield from (group, last)


def _nearest(predictor: Predictor, space: Space) -> tuple[Plan, int, int]:
    """The plan that lacks the least, the stage that lacks most of it, and how much."""
    plans = [predictor.cut(plan, by_memory=True) for plan in _leanest(space)]
    lacks = [(plan, *predictor.lack(plan)) for plan in plans]
    return min(lacks, key=lambda each: each[2])


def _fits(space: Space) -> bool:
    return bool(space.groups()) and _nearest(Predictor(space.units, space.cluster), space)[2] <= 0


def _remedies(space: Space) -> Iterator[str]:
    """Changes that would make the model fit; each is sufficient by itself."""
    units, cluster = space.units, space.cluster

    def grown(times: int) -> Space:
        # The links do not matter: only memory is checked.
        hosts = Cluster(cluster.hosts * times, cluster.within, cluster.link_within(tuple(host.profile for host in cluster.hosts)))
        return replace(space, cluster=hosts, use_all=False)

    def thinner(times: int) -> Space:
        shapes = tuple(replace(shape, lanes=max(1, shape.lanes // times)) for shape in units.shapes)
        return replace(space, units=replace(units, shapes=shapes))

    if (times := _first(grown, TIMES)) is not None:
        yield f"{times * cluster.devices} such devices"
    lanes = max(shape.lanes for shape in units.shapes)
    if (times := _first(thinner, [each for each in TIMES if each <= lanes])) is not None:
        yield f"batch.lanes={lanes // times} instead of {lanes}" if units.streams else f"1/{times} of batch.tokens"
    if units.activation_bytes > 2 and _fits(replace(space, units=replace(units, precision="bf16"))):
        yield "train.precision=bf16"
    if units.states and _fits(replace(space, units=replace(units, states=0, optimizer="sgd"))):
        yield "train.optimizer=sgd"


def _first(changed: Callable[[int], Space], numbers: tuple[int, ...] | list[int]) -> int | None:
    return next((number for number in numbers if _fits(changed(number))), None)
