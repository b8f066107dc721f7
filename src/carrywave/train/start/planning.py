"""Chooses the plan (`plan: auto`): rank 0 reads or measures a profile, searches, and tells the others; a resumed run keeps its plan.

A plan given by the user is used as it is. If a profile is known the step time is predicted either way, so that the log can compare it with
the measured one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from carrywave.data.prepare import prepare
from carrywave.errors import PlanError, UserError, option
from carrywave.launch import launch_record
from carrywave.launch.hardware import gpus, made_for_bf16
from carrywave.measure.profiles import known_profile, profile_for
from carrywave.parallel.startup.environment import TRANSPORT
from carrywave.parallel.startup.launcher_env import launched
from carrywave.parallel.world import World, from_rank_0
from carrywave.plan.cost.cluster import Cluster, Host
from carrywave.plan.cost.profile import Profile
from carrywave.plan.cost.shipped_profiles import PROFILE, find_profile, shipped
from carrywave.plan.cost.shipped_profiles import names as shipped_names
from carrywave.plan.cost.transports import BY_BACKEND
from carrywave.plan.cost.units import Units
from carrywave.plan.plan import Plan, fewer, resolve
from carrywave.plan.search.predictor import Prediction, Predictor
from carrywave.plan.search.search import GAIN_PER_DOUBLING, describe, search
from carrywave.plan.show.hints import Hint, hint_lines, one_device, other_settings
from carrywave.spec.defaults import suited, with_precision
from carrywave.spec.facts import DataFacts
from carrywave.spec.spec import Spec
from carrywave.train.start.opening import Start
from carrywave.train.start.run_source import plan_of_json
from carrywave.train.start.settling import Ready

Say = Callable[[str], None]
NEAR = 0.97  # ratio above which two step times count as equal: measurements are no more precise


@dataclass(frozen=True)
class Planned:
    """The plan of a run. The prediction is known to rank 0 alone, and only if there is a profile."""

    plan: Plan
    prediction: Prediction | None
    predicted: bool  # True if rank 0 has a prediction
    reasons: tuple[str, ...] = ()  # why it was chosen


@dataclass(frozen=True)
class PlanRequest:
    """What a plan is made for."""

    spec: Spec
    units: Units | None  # None: nothing is known of the user's own modules
    layers: int
    pooled: bool
    workers: int
    before: Plan | None = None  # the run's plan so far
    facts: DataFacts | None = None
    bf16: bool = False  # all devices are made for it
    whole_head: bool = False  # it reads whole sequences


def plan_of_run(start: Start, ready: Ready) -> tuple[Plan, tuple[str, ...]]:
    """The plan of a run that has several workers, and why. Collective: every rank must call it."""
    units = Units.of(ready.spec, ready.data.facts) if ready.own is None else None
    of_model = ready.layers, ready.pooled, start.workers, start.before, ready.data.facts, ready.bf16, ready.reads_whole
    planned = plan_run(start.world, PlanRequest(ready.spec, units, *of_model), start.asked.watch.say)
    return planned.plan, planned.reasons


def plan_run(world: World, request: PlanRequest, say: Say) -> Planned:
    """The plan that all workers follow. Collective: every rank must call it."""
    prediction: Prediction | None = None

    def choose() -> list[Any]:
        nonlocal prediction
        plan, prediction, reasons = _plan(world, request, say)
        return [asdict(plan), prediction is not None, reasons + _hints(world, request, plan, advised=len(reasons) > 1)]

    values, predicted, reasons = from_rank_0(world, choose, no_timeout=True)
    return Planned(plan_of_json(values), prediction, predicted, tuple(reasons))


def _plan(world: World, request: PlanRequest, say: Say) -> tuple[Plan, Prediction | None, list[str]]:
    spec, workers, units = request.spec, request.workers, request.units
    # Where replicas do not exchange at every step there is nothing to choose, because their number changes the result.
    auto = spec.plans_itself and spec.train.sync == "step"
    if auto and request.before is not None and request.before.workers == workers:
        plan = request.before  # a resumed run continues bit for bit
    elif auto and units is not None and workers > 1:
        try:
            return _chosen(world, units, request, say)
        except UserError as error:  # training works without a chosen plan
            say(f"no plan could be chosen, so every worker is a replica: {error}")
            plan = _resolved(request)
    else:
        plan = _resolved(request)
    profile = None if units is None else _available_profile(world, units, workers)
    return plan, None if units is None or profile is None else _predicted(units, world, plan, profile), []


def _chosen(world: World, units: Units, request: PlanRequest, say: Say) -> tuple[Plan, Prediction, list[str]]:
    """Search for the best plan that uses all workers."""
    here, kind = _here(world, request.workers), world.device.type
    profile = _available_profile(world, units, request.workers)
    if profile is None:
        if launch_record.with_fewer():
            raise PlanError("this machine was not measured with fewer workers, and cannot be while one is failing; start the run again")
        profile = profile_for(units, device=kind, devices=here, note=say)
    choice = search(units, _cluster(world, request.workers, profile), use_all=True)
    plan = replace(choice.best.plan, kernel=request.spec.plan_spec.kernel)
    by = f" (using profile {profile.name})" if PROFILE in os.environ else ""
    return plan, choice.best, [f"chosen: {choice.why}{by}", *_advice(choice.serial, choice.best)]


def _resolved(request: PlanRequest) -> Plan:
    """The plan that the spec asks for; replicas, if it asks for none."""
    spec = request.spec
    plan_spec = fewer(spec.plan_spec, request.workers) if launch_record.with_fewer() else spec.plan_spec
    lanes = spec.lanes if spec.streams else None
    return resolve(
        plan_spec,
        layers=request.layers,
        workers=request.workers,
        lanes=lanes,
        pooled=request.pooled,
        whole=request.whole_head or spec.reads_whole,
    )


def _available_profile(world: World, units: Units, workers: int) -> Profile | None:
    """A profile that is available without measuring."""
    return _named() or known_profile(units, device=world.device.type, workers=_here(world, workers))


def _predicted(units: Units, world: World, plan: Plan, profile: Profile) -> Prediction | None:
    """The prediction for a plan that was not chosen by it; None if the profile lacks samples of its kinds of work."""
    try:
        return Predictor(units, _cluster(world, plan.workers, profile)).predict(plan)
    except PlanError:
        return None


def _advice(serial: Prediction | None, best: Prediction) -> list[str]:
    """A note that one device would be about as fast, if it would."""
    if serial is None or serial.seconds * (1 - GAIN_PER_DOUBLING) > best.seconds:
        return []
    how = "faster than" if serial.seconds < NEAR * best.seconds else "about as fast as"
    return [
        f"one device would be {how} {describe(best.plan)}: {1e3 * serial.seconds:.3g} ms per step instead of {1e3 * best.seconds:.3g} ms, "
        f"according to the measurements; use {option('devices', 1)}"
    ]


def _hints(world: World, request: PlanRequest, plan: Plan, *, advised: bool) -> list[str]:
    """A line about settings that would be much faster; none if the run goes on, because they cannot be changed then.

    `advised`: one device was compared already.
    """
    spec, units = request.spec, request.units
    by_hand = spec.plan_spec.kernel != "auto" or "CARRYWAVE_KERNEL" in os.environ  # the figures are those of other kernels
    if units is None or request.before is not None or launch_record.attempt() or by_hand or spec.train.sync != "step":
        return []
    profile = _measured(_available_profile(world, units, request.workers))
    of_model = profile if PROFILE in os.environ else _measured(_shipped_for(world)) or profile
    hints: list[Hint] = []
    if of_model is not None:
        hints += other_settings(
            spec, request.facts or DataFacts(), units, _cluster(world, request.workers, of_model), plan, bf16=request.bf16
        )
    if profile is not None and not advised:  # the links of this machine matter here, and a shipped profile does not know them
        hints += one_device(units, _cluster(world, request.workers, profile), plan)
    return hint_lines(hints)


def _measured(profile: Profile | None) -> Profile | None:
    """The profile if its figures were measured: published ones are too rough to advise anyone."""
    return profile if profile is not None and profile.source == "measured" else None


def _shipped_for(world: World) -> Profile | None:
    """The profile that ships for GPUs like this worker's."""
    names = gpus() if world.device.type == "cuda" else []
    return next((each for each in map(shipped, shipped_names()) if names and each.hardware == f"1 x {names[0]}"), None)


def best_number(spec: Spec, device: str, say: Say) -> int | None:
    """How many of this machine's GPUs to use if the user leaves that open: as many as pay off. None: it is not ours to decide."""
    count = 0 if device == "cpu" else len(gpus())
    if count < 2 or not spec.plans_itself or spec.data.train is None or launched():
        return None
    spec = with_precision(spec, suited(made_for_bf16=made_for_bf16(device)))
    units = Units.of(spec, prepare(spec, note=say).facts)
    try:
        profile = _named() or profile_for(units, device="cuda", devices=count, note=say)
        choice = search(units, Cluster.uniform(replace(profile, devices_per_host=count), count))
    except UserError as error:
        say(f"using all {count} GPUs: their benefit could not be estimated ({error})")
        return None
    if choice.best.plan.workers < count:
        say(f"{choice.why}; pass {option('devices', count)} to use all of them")
    return choice.best.plan.workers


def _named() -> Profile | None:
    name = os.environ.get(PROFILE)
    return find_profile(name) if name else None


def _here(world: World, workers: int) -> int:
    """Workers per host."""
    return min(workers, world.local_size) if world.size > 1 else workers


def _with_set_transport(profile: Profile) -> Profile:
    """The profile with the transport that the environment asks for: over gloo, stages are not recorded."""
    transport = BY_BACKEND.get(os.environ.get(TRANSPORT, ""))
    if transport is not None and profile.within.transport != transport:
        profile = replace(profile, within=replace(profile.within, transport=transport))
    return profile


def _cluster(world: World, workers: int, profile: Profile) -> Cluster:
    """The hosts of a run: as many as its workers need, each with as many workers as this one; the last may have fewer."""
    here, profile = _here(world, workers), _with_set_transport(profile)
    full, rest = divmod(workers, here)
    return Cluster((Host(here, profile),) * full + ((Host(rest, profile),) if rest else ()))
