"""Predicts how speed grows with the number of devices, and where more stop paying off."""

from __future__ import annotations

from dataclasses import dataclass

from carrywave.errors import PlanError
from carrywave.plan.cluster import Cluster
from carrywave.plan.fitting import NoFit
from carrywave.plan.plan import Plan
from carrywave.plan.predict import Prediction, Predictor
from carrywave.plan.profile import Profile
from carrywave.plan.search import best_paying, simulated
from carrywave.plan.space import Space
from carrywave.plan.units import Units

MOST_DEVICES = 4096


@dataclass(frozen=True)
class Point:
    """The best plan on up to `devices` devices."""

    devices: int
    prediction: Prediction
    efficiency: float  # speed per device offered, relative to the fewest devices that can hold the model


@dataclass(frozen=True)
class Scale:
    """How speed grows with the number of devices, and how many are worth using."""

    points: tuple[Point, ...]
    pays_up_to: int  # devices; beyond that, a doubling saves less than GAIN_PER_DOUBLING


def scale(units: Units, profile: Profile, most: int = MOST_DEVICES) -> Scale:
    """The fastest plan on 1, 2, 4, … `most` devices; on one host only, if the profile has no link between hosts."""
    points: list[Point] = []
    misfit: NoFit | None = None
    best: Prediction | None = None
    devices = 1
    while devices <= most and (devices <= profile.devices_per_host or profile.between is not None):
        cluster, before = Cluster.uniform(profile, devices), devices // 2

        def more(plan: Plan, before: int = before) -> bool:
            return plan.workers > before  # smaller plans have already been tried

        try:
            space = Space(units, cluster)
            found = simulated(Predictor(units, cluster), space, more) if any(map(more, space.groups())) else []
            best = min([*found, *([best] if best else [])], key=lambda each: each.seconds, default=None)
        except NoFit as error:
            misfit = error
        if best is not None:
            first = points[0].prediction.seconds * points[0].devices if points else best.seconds * devices
            points.append(Point(devices, best, first / (best.seconds * devices)))
        devices *= 2
    if not points:
        raise misfit or PlanError(f"devices={most} leaves no device to train on; use 1 or more")
    return Scale(tuple(points), best_paying([point.prediction for point in points]).plan.workers)
