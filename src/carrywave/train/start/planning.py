"""Chooses the plan (`plan: auto`): a search ranks, and where the workers are here, a few real steps of the best plans decide.

A plan given by the user is used as it is, and a resumed run keeps its plan.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from carrywave.data.prepare import prepare
from carrywave.errors import PlanError, RunError, UserError, option
from carrywave.launch import launch_record
from carrywave.launch.hardware import gpus, made_for_bf16
from carrywave.parallel.startup.launcher_env import launched
from carrywave.parallel.world import World, all_gather_json, from_rank_0
from carrywave.plan.cluster import Cluster
from carrywave.plan.plan import Plan, fewer, resolve
from carrywave.plan.predict import Predictor
from carrywave.plan.profile import PROFILE, Profile, find_profile, named_profile, shipped
from carrywave.plan.profile import names as shipped_names
from carrywave.plan.search import GAIN_PER_DOUBLING, PlanChoice, describe, search
from carrywave.plan.units import Units
from carrywave.runs.run import Run
from carrywave.spec.defaults import suited, with_precision
from carrywave.spec.plan_spec import PlanSpec
from carrywave.spec.spec import Spec
from carrywave.train.start import timing
from carrywave.train.start.machine import calls_of, empty, extended, job_of, profile_for, threads
from carrywave.train.start.opening import Start
from carrywave.train.start.settling import Ready

Say = Callable[[str], None]
StepSeconds = Callable[[World, Sequence[Plan]], list[float]]  # what a real step of each plan takes; collective over the workers
NEAR = 0.97  # ratio above which two step times count as equal: measurements are no more precise


@dataclass(frozen=True)
class Planned:
    """The plan of a run."""

    plan: Plan
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
    whole_head: bool = False  # it reads whole sequences
    step_seconds: StepSeconds | None = None  # None: the workers are not here, as in a dry run


def plan_of_run(start: Start, ready: Ready) -> tuple[Plan, tuple[str, ...]]:
    """The plan of a run that has several workers, and why. Collective: every rank must call it."""
    units = Units.of(ready.spec, ready.data.facts) if ready.own is None else None
    steps = None if start.asked.dry_run else partial(timing.step_seconds, task=ready.task, part=ready.parts.train, order=ready.order)
    before = None if start.snapshot is None or start.world.rank else plan_before(start.folder)
    of_model = ready.layers, ready.pooled, start.workers, before, ready.reads_whole, steps
    planned = plan_run(start.world, PlanRequest(ready.spec, units, *of_model), start.asked.watch.say)
    return planned.plan, planned.reasons


def plan_run(world: World, request: PlanRequest, say: Say) -> Planned:
    """The plan that all workers follow. Collective: every rank must call it."""
    given = from_rank_0(world, lambda: None if _decides(request) else asdict(_given(request)))
    if given is not None:
        return Planned(plan_of_json(given))
    assert request.units is not None
    try:
        return _chosen(world, request, request.units, say)
    except UserError as error:  # the same on all workers; training works without a chosen plan
        say(f"no plan could be chosen, so every worker is a replica: {error}")
        return Planned(_given(request))


def plan_before(folder: Run) -> Plan | None:
    """The plan of a run that goes on; None if its file is unusable, and the run has to be planned again."""
    try:
        recorded = folder.read_json("plan.json")
        return plan_of_json({name: recorded[name] for name in PlanSpec.model_fields})
    except (RunError, ValueError, TypeError, KeyError, RecursionError):
        return None


def plan_of_json(values: Mapping[str, Any]) -> Plan:
    """Parse a plan from JSON, validated like that of a spec."""
    asked = PlanSpec.model_validate(values)
    cuts, chunks = tuple(asked.cuts or ()), (asked.chunk_steps, asked.micro_batches)
    return Plan(asked.replicas or 1, asked.stages, cuts, *chunks, asked.recompute, asked.kernel, asked.share_head)


def _decides(request: PlanRequest) -> bool:
    """True if there is a choice. Where replicas do not exchange at every step, their number changes the result, so that every worker is
    one; a run that goes on with as many workers keeps its plan, and continues bit for bit; with a worker broken nothing is timed.
    """
    spec, before = request.spec, request.before
    kept = before is not None and before.workers == request.workers
    known = request.units is not None and request.workers > 1 and not launch_record.with_fewer()
    return spec.plans_itself and spec.train.sync == "step" and known and not kept


def _given(request: PlanRequest) -> Plan:
    """The plan that needs no choice: the run's so far, what the spec asks for, or replicas."""
    spec, before = request.spec, request.before
    if spec.plans_itself and spec.train.sync == "step" and before is not None and before.workers == request.workers:
        return before
    plan_spec = fewer(spec.plan_spec, request.workers) if launch_record.with_fewer() else spec.plan_spec
    return resolve(
        plan_spec,
        layers=request.layers,
        workers=request.workers,
        lanes=spec.lanes if spec.streams else None,
        pooled=request.pooled,
        whole=request.whole_head or spec.reads_whole,
    )


def _chosen(world: World, request: PlanRequest, units: Units, say: Say) -> Planned:
    """The best plan that uses all workers: as a named profile predicts, or, where they are all here, as real steps decide. Collective."""
    named, profile = _profile(world, request, units, say)
    cluster = _cluster(world, request.workers, profile)
    choice: PlanChoice | None = None

    def ranked() -> list[Any]:
        nonlocal choice
        choice = search(units, cluster, use_all=True)
        return [asdict(plan) for plan in choice.to_try]

    plans = [plan_of_json(values) for values in from_rank_0(world, ranked)]
    kernel = request.spec.plan_spec.kernel
    if named or request.step_seconds is None or world.size == 1:
        serial = None if choice is None or choice.serial is None else choice.serial.seconds
        best, seconds = plans[0], 0.0 if choice is None else choice.best.seconds
        why = f"{describe(best)}: the fastest, as predicted from profile {profile.name}{_doubt(profile, units)}"
    else:
        took = request.step_seconds(world, [replace(plan, kernel=kernel) for plan in plans])
        serial = from_rank_0(world, lambda: _alone(world, units, cluster, request.step_seconds), no_timeout=True)
        seconds, best = min(zip(took, plans, strict=True), key=lambda pair: pair[0])
        others = [f"{describe(plan)} {_say_ms(each)}" for each, plan in zip(took, plans, strict=True) if plan is not best]
        than = f", against {', '.join(others)}" if others else ""
        why = f"{describe(best)}: {_say_ms(seconds)} a step, measured{than}"
    return Planned(replace(best, kernel=kernel), (f"chosen: {why}", *_advice(serial, seconds, best)))


def _profile(world: World, request: PlanRequest, units: Units, say: Say) -> tuple[bool, Profile]:
    """The profile that the environment names, if it does; or this machine's, timed by the workers of the run, or by processes if they are
    not here.
    """
    named = from_rank_0(world, lambda: os.environ.get(PROFILE))
    if named:
        return True, find_profile(named)
    kind = world.device.type
    if world.size == 1:
        return False, profile_for(units, device=kind, devices=request.workers, note=say)
    job = job_of(calls_of(units, world.local_size), units.precision, kind)
    rows = all_gather_json(world, list(timing.work(world, job)))
    return False, extended(empty(kind), rows, units.precision)


def _alone(world: World, units: Units, cluster: Cluster, step_seconds: StepSeconds | None) -> float | None:
    """What a step takes on one device with all threads of its host; None if it cannot hold the model."""
    if step_seconds is None or not Predictor(units, cluster).fits(Plan.serial()):
        return None
    before = torch.get_num_threads()
    if world.device.type == "cpu":
        torch.set_num_threads(threads(1))
    try:
        return step_seconds(World.alone(world.device), [Plan.serial()])[0]
    finally:
        torch.set_num_threads(before)


def _advice(serial: float | None, seconds: float, best: Plan) -> list[str]:
    """A note that one device would be about as fast, if it would."""
    if serial is None or serial * (1 - GAIN_PER_DOUBLING) > seconds:
        return []
    how = "faster than" if serial < NEAR * seconds else "about as fast as"
    times = f"{_say_ms(serial)} per step instead of {_say_ms(seconds)}"
    return [f"one device would be {how} {describe(best)}: {times}; use {option('devices', 1)}"]


def _doubt(profile: Profile, units: Units) -> str:
    error = profile.error(units.precision)
    return f", to within about {error:.0%}" if error else ""


def _say_ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def best_number(spec: Spec, device: str, say: Say) -> int | None:
    """How many of this machine's GPUs to use if the user leaves that open: as many as pay off by the profile that is named or ships for
    such GPUs, and all of them without one: the run says if one would be as fast. None: it is not ours to decide.
    """
    names = [] if device == "cpu" else gpus()
    if len(names) < 2 or not spec.plans_itself or spec.data.train is None or launched():
        return None
    spec = with_precision(spec, suited(made_for_bf16=made_for_bf16(device)))
    try:
        profile = named_profile() or next((each for each in map(shipped, shipped_names()) if each.hardware == f"1 x {names[0]}"), None)
        if profile is None:
            return len(names)
        units = Units.of(spec, prepare(spec, note=say).facts)
        choice = search(units, Cluster.uniform(replace(profile, devices_per_host=len(names)), len(names)))
    except PlanError as error:
        say(f"using all {len(names)} GPUs: their benefit could not be estimated ({error})")
        return None
    if choice.best.plan.workers < len(names):
        say(f"{choice.why}; pass {option('devices', len(names))} to use all of them")
    return choice.best.plan.workers


def _cluster(world: World, workers: int, profile: Profile) -> Cluster:
    """The hosts of a run: as many as its workers need, each with as many workers as this one; the last may have fewer."""
    return Cluster.uniform(profile, workers, min(workers, world.local_size) if world.size > 1 else workers)
