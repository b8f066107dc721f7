"""`carrywave plan`: finds the best split of a spec over devices before anything runs. Needs no GPU and loads no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from carrywave.cli.options import Device, DeviceOption, note, plain, spec_and_overrides
from carrywave.errors import DataError, PlanError
from carrywave.launch.hardware import cores, gpus
from carrywave.plan.cluster import Cluster
from carrywave.plan.plan import Plan, check_sync, resolve
from carrywave.plan.profile import PROFILE, Profile, find_profile
from carrywave.plan.search import asked_for, search
from carrywave.plan.show.report import choice_object, yaml_line
from carrywave.plan.show.text import doubt_text, figures_text, rivals_text, stages_text, timeline_text
from carrywave.plan.units import Units
from carrywave.runs import output_file
from carrywave.spec.defaults import AUTO, suited, with_precision
from carrywave.spec.facts import DataFacts, read_facts
from carrywave.spec.load import load
from carrywave.spec.plan_spec import PlanSpec
from carrywave.spec.spec import Spec
from carrywave.spec.yaml_text import parse_yaml
from carrywave.train.start.machine import CROWDED, empty, profile_for


def plan(
    spec: Annotated[list[str] | None, typer.Argument(metavar="SPEC.yaml|key=value", help="Spec file and overrides, all optional.")] = None,
    devices: Annotated[int | None, typer.Option(metavar="N", help="Number of devices. Default: those of this machine.")] = None,
    cluster: Annotated[Path | None, typer.Option(metavar="CLUSTER.yaml", help="File that describes the hosts, devices and links.")] = None,
    profile: Annotated[
        str | None, typer.Option(metavar="FILE|NAME", help=f"Plan for another machine, from its profile; ${PROFILE} does the same.")
    ] = None,
    device: DeviceOption = Device.auto,
    facts: Annotated[
        str | None,
        typer.Option(metavar="FILE|key=value,…", help="Plan without the data: from a run's facts.json, or vocabulary=33278."),
    ] = None,
    use_all: Annotated[bool, typer.Option("--all", help="Use all devices, even if fewer would be nearly as fast.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result to FILE as JSON.")] = None,
) -> None:
    """Predict how fast a spec trains when split over devices in different ways, and show the best plan."""
    path, overrides = spec_and_overrides(spec or [])
    resolved = load(path, overrides)
    if devices is not None and cluster is not None:
        raise PlanError("--devices and --cluster both define the devices to train on; use only one of them")
    if devices is not None and devices < 1:
        raise PlanError(f"--devices is {devices}; use a number >= 1")
    output_file.check(json_file)
    named = profile or os.environ.get(PROFILE) or None
    if resolved.train.precision == AUTO:
        resolved = with_precision(resolved, suited(made_for_bf16=_made_for_bf16(named, device.value, cluster)))
    units = Units.of(resolved, read_facts(facts) if facts is not None else _facts_of(resolved))
    if cluster is None:
        machines = _uniform(units, named, device.value, devices)
    else:
        machines = _read(cluster, named, lambda: _measured(units, device.value, here(device.value)))
    _show_choice(resolved, units, machines, json_file, use_all=use_all)


def _uniform(units: Units, named: str | None, device: str, devices: int | None) -> Cluster:
    """Hosts of a named profile; or this machine, measured."""
    if named is not None:
        profile = find_profile(named)  # of another machine, so this machine's device count is irrelevant
        return Cluster.uniform(profile, devices or profile.devices_per_host)
    count = devices or here(device)
    profile = _measured(units, device, count)
    # A few workers for each core are on one host, where `train --devices` would start them; more are on further hosts like this one.
    crowded = profile.common_memory and count <= CROWDED * profile.devices_per_host
    return Cluster.uniform(profile, count, max(count, profile.devices_per_host) if crowded else None)


def _measured(units: Units, device: str, count: int) -> Profile:
    return profile_for(units, device=device, devices=count if count <= CROWDED * cores() else cores(), note=note)


def _read(path: Path, named: str | None, this_machine: Callable[[], Profile]) -> Cluster:
    """Read a cluster file; without a profile, its devices are those of the named one, or of this machine."""
    try:
        content = parse_yaml(path.read_text(encoding="utf-8-sig"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path} cannot be read ({error}); pass a cluster file in YAML") from None
    if content is None:
        raise PlanError(f"{path} is empty; write hosts: 2, devices: 8, profile: NAME, between: LINK")

    def find(own: str | None) -> Profile:
        name = own or named
        if name is None:
            return this_machine()
        beside = path.parent / name  # relative to the cluster file
        return find_profile(str(beside) if own and beside.is_file() else name)

    return Cluster.of(content, find, str(path))


def _made_for_bf16(named: str | None, device: str, cluster: Path | None) -> bool:
    """True if the devices to plan for are made for bf16. Measures nothing: which calls are to be timed depends on the answer."""

    def unmeasured() -> Profile:
        return empty("cuda" if device != "cpu" and gpus() else "cpu")

    if cluster is not None:
        return _read(cluster, named, unmeasured).profile.made_for_bf16
    return (unmeasured() if named is None else find_profile(named)).made_for_bf16


def here(device: str) -> int:
    """The number of devices on this machine: GPUs if there are any and the CPU was not asked for, otherwise cores."""
    count = 0 if device == "cpu" else len(gpus())
    if device == "cuda" and not count:
        raise PlanError("--device is cuda, but nvidia-smi found no GPU; use --profile to plan for another machine")
    return count or cores()


def _facts_of(spec: Spec) -> DataFacts:
    from carrywave.data.prepare import prepare

    try:
        return prepare(spec, note=note).facts
    except DataError as error:
        facts = {"language": "vocabulary=33278", "regression": "features=3,outputs=1", "forecasting": "features=3,outputs=1"}
        raise DataError(f"{error}, or plan without the data: --facts {facts.get(spec.task, 'vocabulary=33278,labels=9')}") from None


def _requested_plan(spec: Spec, units: Units, devices: int) -> Plan | None:
    """The plan given in the spec; None if it is left to the planner."""
    if spec.plans_itself:
        return None
    plan_spec: PlanSpec = spec.plan_spec
    workers = (plan_spec.replicas or max(1, devices // plan_spec.stages)) * plan_spec.stages
    requested = resolve(
        plan_spec,
        layers=units.layers,
        workers=workers,
        lanes=units.lanes if units.streams else None,
        pooled=units.pooled,
        whole=spec.reads_whole,
    )
    check_sync(requested, spec.train.sync)
    return requested


def _sync(spec: Spec) -> list[str]:
    """What the figures mean if replicas do not exchange at every step."""
    if spec.train.sync == "step":
        return []
    return [
        f"train.sync={spec.train.sync} is another algorithm, whose result depends on the number of replicas; with plan: auto every worker "
        "is one. Its copies of the weights are counted under optimizer; times are those of an exchange at every step."
    ]


def _show_choice(spec: Spec, units: Units, cluster: Cluster, json_file: Path | None, *, use_all: bool) -> None:
    requested = _requested_plan(spec, units, cluster.devices)
    if requested is not None:
        cluster.place(requested.replicas, requested.stages)  # fail before the search if the plan needs more workers than there are
    best = search(units, cluster, use_all=use_all)
    choice = best if requested is None else asked_for(replace(requested, kernel="auto"), units, cluster, best)
    shown, workers = choice.best, choice.best.plan.workers
    profile, hosts = cluster.profile, f", {len(cluster.sizes)} hosts" if len(cluster.sizes) > 1 else ""
    devices = f"{cluster.devices} device{'s' * (cluster.devices > 1)} of {profile.name} ({profile.source}){hosts}"
    lines = [f"for {_model(spec, units)}; on {devices}", "", choice.why, doubt_text(profile.error(units.precision)), *_sync(spec), ""]
    lines += [stages_text(units, shown), "", _about(units, shown.plan), timeline_text(shown.timeline), "", figures_text(units, choice), ""]
    lines += ["alternatives", rivals_text(units, choice), "", f"in the spec, for {workers} device{'s' * (workers > 1)}:"]
    typer.echo("\n".join([*lines, yaml_line(replace(shown.plan, kernel=spec.plan_spec.kernel), units)]))
    _write(json_file, choice_object(units, choice))


def _model(spec: Spec, units: Units) -> str:
    widths = dict.fromkeys(spec.model.widths)
    many = f"{spec.model.layers} layer{'s' * (spec.model.layers > 1)} of {', '.join(map(str, widths))}"
    shapes = ", ".join(map(str, units.shapes)) + (f" after the front, each made of {units.stride}" if units.stride > 1 else "")
    return f"{spec.task}, {many}, {units.parameters(0, len(units)):,} parameters, {spec.train.precision}, batches of {shapes}"


def _about(units: Units, plan: Plan) -> str:
    shape = max(units.shapes, key=lambda each: each.share)
    each = "" if plan.replicas == 1 else f" shared by {plan.replicas} replicas that all do the same"
    chunks = 1 if units.whole else plan.chunks(shape.steps)
    return f"a step of {shape}{each}, drawn to scale" + (f", in {chunks} chunks" if chunks > 1 else "")


def _write(path: Path | None, values: Mapping[str, Any]) -> None:
    if path is not None:
        output_file.write(path, json.dumps({name: plain(value) for name, value in values.items()}, indent=1, ensure_ascii=False) + "\n")
