"""Suggests what would make a model fit when no plan does: each remedy is verified before it is suggested, for memory only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from carrywave.plan.cost.cluster import Cluster
from carrywave.plan.search.partition import NoFit, say, units_text
from carrywave.plan.search.predictor import Predictor
from carrywave.plan.search.space import Space

MOST_TIMES = 64  # largest factor tried for more devices or fewer lanes
_UP = 1.005  # sizes are printed to three digits, and a device with the printed size must be large enough


def fits(space: Space) -> bool:
    """True if there is a plan whose stages all fit in memory."""
    predictor = Predictor(space.units, space.cluster)
    return any(predictor.may_fit(plan) and predictor.missing(plan).missing_bytes == 0 for plan in space.leanest())


def explained(error: NoFit, space: Space) -> NoFit:
    """The error for all plans together, with what would make the model fit."""
    devices, ways = space.cluster.devices, remedies(error, space)
    return NoFit(
        f"the model does not fit on {devices} device{'s' if devices > 1 else ''}: {too_large(space) or f'at best, {error.lack}'}",
        "it fits with " + " or ".join(", ".join(part) for part in (ways[:-1], ways[-1:]) if part),
        lack=error.lack,
        missing_bytes=error.missing_bytes,
    )


def too_large(space: Space) -> str | None:
    """Describes the unit that fits on no device even with the leanest plan, so that more stages cannot help; None if there is none."""
    predictor, units = Predictor(space.units, space.cluster), len(space.units)
    limit = max(host.profile.memory_bytes - host.profile.reserved_bytes for host in space.cluster.hosts)
    alone = [min(predictor.memory(plan, 0, unit, unit + 1).total for plan in space.leanest()) for unit in range(units)]
    largest = alone.index(max(alone))
    if alone[largest] <= limit:
        return None
    return (
        f"{units_text(largest, largest + 1, units)} alone exceeds the {say(limit)} of the largest device by {say(alone[largest] - limit)}"
    )


def remedies(error: NoFit, space: Space) -> list[str]:
    """Changes that would make the model fit; each is sufficient by itself."""
    units, changes = space.units, []
    if (devices := _more_devices(space)) is not None:
        changes.append(f"{devices} such devices")
    if (lanes := _fewer_lanes(space)) is not None:
        changes.append(lanes)
    if units.activation_bytes > 2 and fits(replace(space, units=replace(units, precision="bf16"))):
        changes.append("train.precision=bf16")
    if units.states and fits(replace(space, units=replace(units, states=0, optimizer="sgd"))):
        changes.append("train.optimizer=sgd")
    return [*changes, f"{say(int(error.missing_bytes * _UP) + 1)} more memory on each device"]


def _more_devices(space: Space) -> int | None:
    """The smallest multiple of the cluster's devices on which the model fits."""

    def grown(times: int) -> Space:
        cluster = space.cluster
        kinds = tuple(host.profile for host in cluster.hosts)
        # The links do not matter: only memory is checked.
        return replace(space, cluster=Cluster(cluster.hosts * times, cluster.within, cluster.link_between(kinds)), use_all=False)

    times = _first(lambda times: fits(grown(times)))
    return None if times is None else times * space.cluster.devices


def _fewer_lanes(space: Space) -> str | None:
    """The smaller batch with which the model fits, as a suggestion."""
    units = space.units

    def thinner(times: int) -> Space | None:
        shapes = tuple(replace(shape, lanes=shape.lanes // times) for shape in units.shapes)
        return replace(space, units=replace(units, shapes=shapes)) if min(shape.lanes for shape in shapes) else None

    times = _first(lambda times: (smaller := thinner(times)) is not None and fits(smaller))
    if times is None:
        return None
    lanes = max(shape.lanes for shape in units.shapes)
    return f"batch.lanes={lanes // times} instead of {lanes}" if units.streams else f"1/{times} of batch.tokens"


def _first(enough: Callable[[int], bool]) -> int | None:
    """The smallest factor in 2, 3, … `MOST_TIMES` that is enough, by bisection; larger factors must never be worse."""
    if not enough(MOST_TIMES):
        top = MOST_TIMES // 2
        while top > 1 and not enough(top):  # too large a factor may leave no lanes
            top //= 2
        if top < 2:
            return None
    else:
        top = MOST_TIMES
    low, high = 1, top
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
