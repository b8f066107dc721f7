"""Predicts how speed grows with the number of devices, and where more stop paying off."""

from __future__ import annotations

from dataclasses import dataclass

from carrywave.errors import PlanError
from carrywave.plan.cost.cluster import Cluster
from carrywave.plan.cost.profile import Piped, Profile
from carrywave.plan.cost.stage_costs import Costs
from carrywave.plan.cost.units import Units
from carrywave.plan.plan import Plan
from carrywave.plan.search.memory_advice import explained
from carrywave.plan.search.partition import NoFit
from carrywave.plan.search.predictor import Prediction, Predictor
from carrywave.plan.search.search import GAIN_PER_DOUBLING, TOLERANCE, Search, price
from carrywave.plan.search.space import Space

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
    costs: dict[tuple[int, Piped, int], Costs] = {}
    points: list[Point] = []
    misfit: NoFit | None = None
    best: Prediction | None = None
    devices = 1
    while devices <= most and (devices <= profile.devices_per_host or profile.between is not None):
        before, cluster = best, Cluster.uniform(profile, devices)
        try:
            best = _fastest(Predictor(units, cluster, costs), more_than=devices // 2)
        except NoFit as error:
            misfit, best = explained(error, Space(units, cluster)), None
        if before is not None and (best is None or best.seconds > before.seconds):
            best = before
        if best is not None:
            first = points[0].prediction.seconds * points[0].devices if points else best.seconds * devices
            points.append(Point(devices, best, first / (best.seconds * devices)))
        devices *= 2
    if not points:
        raise misfit or PlanError(f"devices={most} leaves no device to train on; use 1 or more")
    pays = min((point.prediction for point in points), key=lambda each: each.seconds * price(each.plan.workers, GAIN_PER_DOUBLING))
    return Scale(tuple(points), pays.plan.workers)


def _fastest(predictor: Predictor, *, more_than: int) -> Prediction | None:
    """The fastest plan on more than `more_than` devices: smaller plans have already been tried."""
    search = Search(predictor, use_all=False, tolerance=TOLERANCE)
    search.check_room()

    def wanted(plan: Plan) -> bool:
        return plan.workers > more_than

    return search.best(wanted, gain=0.0)
