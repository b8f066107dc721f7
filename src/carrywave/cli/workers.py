"""Implements `--devices`: starts workers, unless a launcher has already started this process as one."""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from carrywave.cli.exits import end_as, leaving_at_once
from carrywave.cli.options import note
from carrywave.errors import PlanError, UserError
from carrywave.launch.hardware import cores, gpus
from carrywave.launch.hosts import Hosts, forgotten_srun, hosts_of, take_place
from carrywave.launch.launcher import NEVER, Patience, is_worker, start
from carrywave.launch.script_workers import script_command
from carrywave.parallel.startup.environment import may_share_gpu
from carrywave.parallel.startup.launcher_env import check_not_of_mpi, launched
from carrywave.plan.plan import fewer
from carrywave.spec.plan_spec import PlanSpec
from carrywave.spec.spec import Spec

DevicesOption = Annotated[
    int | None, typer.Option(metavar="N", help="Workers to start on this machine. Default: one for each GPU that is worth using.")
]
FewDevicesOption = Annotated[int | None, typer.Option(metavar="N", help="Workers to start on this machine to share the work. Default: 1.")]
RestartsOption = Annotated[
    int | None,
    typer.Option(metavar="N", help="Restart the workers when one dies, up to N times without progress. Default: 3, or 0 with one worker."),
]


class On(StrEnum):
    """Where workers may be started, other than on this machine."""

    ray = "ray"


OnOption = Annotated[On | None, typer.Option("--on", help="Start the workers on a Ray cluster instead of this machine.")]
MinDevicesOption = Annotated[
    int | None,
    typer.Option(metavar="M", help="Continue with fewer workers of this machine, but at least M, if one keeps dying."),
]


@contextmanager
def agreed(device: str) -> Iterator[None]:
    """Make a user error raised in this block a single error on all workers, reported once. Collective under a launcher."""
    if not launched():
        yield
        return
    with leaving_at_once():
        from carrywave.parallel.world import join, leave, raise_on_all

    world = join(device)
    try:
        with raise_on_all(world):
            yield
    except UserError:
        leave(world)
        raise


def around() -> Hosts | None:
    """The hosts of which this is one, if an engine names any. A task of srun that is a worker becomes one."""
    take_place(trains=True)
    hosts = hosts_of(os.environ)
    if hosts is None:
        check_not_of_mpi()
    return hosts


def devices_of(run: Path, spec: Spec, device: str, where: Hosts | None) -> int | None:
    """As many devices as the run had that goes on, or all that are here if those are fewer. None if that does not tell: nothing is known of
    it, the spec asks for another plan by now, or an engine says how many there are.
    """
    try:
        plan = json.loads((run / "plan.json").read_bytes())
        had = int(plan["replicas"]) * int(plan["stages"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    wanted = spec.plan_spec
    if where is not None or launched() or had % wanted.stages or wanted.replicas not in (None, had // wanted.stages):
        return None
    here = (0 if device == "cpu" else len(gpus())) or cores()
    if here < had:
        note(f"the run had {had} devices, and there are {here} here: it goes on with {here}; say how many with --devices")
    return min(had, here)


def devices_that_pay(spec: Spec, device: str, where: Hosts | None) -> int | None:
    """How many of several GPUs are worth training on when neither the user nor an engine has said; None leaves the default."""
    if device == "cpu" or where is not None or launched() or len(gpus()) < 2:
        return None
    with leaving_at_once():
        from carrywave.train.start.planning import best_number
    return best_number(spec, device, note)


def fitted(spec: Spec, overrides: Sequence[str], devices: int | None, where: Hosts | None) -> Spec:
    """The spec of a run that goes on, with a plan for the workers of now; a plan that these overrides set is left alone."""
    hosts = 1 if where is None else where.number
    size = os.environ.get("WORLD_SIZE", "") if launched() else "" if devices is None else str(devices * hosts)
    keys = {text.partition("=")[0].strip() for text in overrides}
    if not size.isdecimal() or not int(size) or spec.plan == "auto" or "plan" in keys:
        return spec
    workers, plan = int(size), spec.plan
    if "plan.replicas" not in keys and plan.replicas is not None and plan.replicas * plan.stages != workers:
        plan = plan.model_copy(update={"replicas": None})
    if not keys & {"plan.replicas", "plan.stages", "plan.cuts"} and workers % plan.stages:
        plan = fewer(plan, workers)
    if plan == spec.plan:
        return spec
    if not launched():
        before, now = (
            f"plan.replicas={replicas} x plan.stages={stages}"
            for replicas, stages in ((spec.plan.replicas or "any", spec.plan.stages), (workers // plan.stages, plan.stages))
        )
        note(f"the run was started with {before}; it goes on with {now}")
    return spec.model_copy(update={"plan": plan})


def start_workers(
    devices: int | None,
    device: str,
    plan: PlanSpec | None = None,
    *,
    where: Hosts | None = None,
    patience: Patience = NEVER,
    dry_run: bool = False,
    prints_result: bool = False,
    resumes: Path | None = None,
) -> int | None:
    """Start workers if several are needed and exit with their result; return only in a process that does the work itself.

    In a dry run nothing is started: the number of workers is returned, or None for one. Without a plan, one worker is the default, and
    workers that die are not started again: such commands are short, and the user can repeat them. `where`: the hosts of which this is one,
    found out if there is a plan. `prints_result`: standard output is the result, which somebody should
    read. `resumes` is the run that is to go on.
    """
    if devices is not None and devices < 1:
        raise PlanError(f"--devices is {devices}; use a number >= 1")
    if plan is None:
        take_place(trains=False)  # evaluation and prediction run on one host, and follow no engine to others
    else:
        where = where or around()
    if launched():
        size = os.environ.get("WORLD_SIZE")
        if devices is not None and str(devices) != size and not is_worker():
            raise PlanError(
                f"--devices is {devices}, but the launcher started {size} worker{'s' * (size != '1')} (WORLD_SIZE); remove --devices"
            )
        return None
    hosts = 1 if where is None else where.number
    devices = devices or (None if where is None else where.workers)
    if plan is not None and (hint := forgotten_srun(os.environ)) is not None:
        note(hint)
    count = devices or (_gpus(device) if plan is not None else 0) or 1
    if plan is not None and hosts == 1 and count > 1:
        _check_plan(plan, count)
    if dry_run:
        return None if count * hosts == 1 else count * hosts
    _check_patience(patience, count, hosts)
    # A single worker runs under a supervising process only if restarts were asked for.
    if count == 1 and hosts == 1 and not patience.restarts:
        return None
    if 0 < (gpus := _gpus(device)) < count:
        _check_shared(count, gpus)
    if where is not None and hosts > 1:
        with leaving_at_once():
            from carrywave.launch.elastic import start_on_hosts
        ended = start_on_hosts(script_command(), count, where, patience.most, note)
        try:
            end_as(ended)
        except typer.Exit as end:
            os._exit(end.exit_code)  # a store whose host is out of reach would keep this process
        os._exit(0)
    end_as(start(script_command(), count, patience, resumes=resumes, say=note))
    raise typer.Exit(1 if prints_result and _nobody_reads() else 0)


def _nobody_reads() -> bool:
    """True if standard output is a pipe whose other end is closed: what a single process learns when it writes."""
    if sys.stdout is None:
        return False
    watch = select.poll()
    watch.register(1, 0)
    return any(events & select.POLLERR for _, events in watch.poll(0))


def start_on_ray(devices: int | None, device: str, plan: PlanSpec, patience: Patience) -> None:
    """Start workers on a Ray cluster and exit with their result; return only in one of those workers."""
    if launched():
        if not is_worker():
            raise PlanError("--on ray starts the workers, but a launcher has started this one already (RANK is set); use only one of them")
        return
    if devices is None or devices < 1:
        raise PlanError("--on ray needs the number of workers; say how many with --devices N")
    _check_plan(plan, devices)
    _check_patience(patience, devices, hosts=2)
    with leaving_at_once():
        from carrywave.launch.ray_train import start_on_ray as start_there
    end_as(start_there(script_command(), devices, device != "cpu", patience.most))
    raise typer.Exit


def _check_shared(count: int, gpus: int) -> None:
    from carrywave.parallel.devices import too_few_gpus

    if not may_share_gpu():
        raise too_few_gpus(count, gpus)
    note(f"{count} workers share {gpus} GPU{'s' * (gpus > 1)}: they communicate through host memory")


def _check_patience(patience: Patience, count: int, hosts: int) -> None:
    if patience.restarts is not None and patience.restarts < 0:
        raise PlanError(f"--restarts is {patience.restarts}; use a number >= 0, where 0 ends the run when a worker dies")
    if patience.least is not None and hosts > 1:
        raise PlanError("--min-devices is for the workers of one machine; remove it, or start torchrun with --nnodes MIN:MAX")
    if patience.least is not None and not 1 <= patience.least <= count:
        raise PlanError(f"--min-devices {patience.least} is not between 1 and {count}, the number of devices; change one of them")


def _gpus(device: str) -> int:
    if device == "cpu":
        return 0
    with leaving_at_once():
        import torch

        from carrywave.parallel.devices import pick_device

    return torch.cuda.device_count() if pick_device(device, 0).type == "cuda" else 0


def _check_plan(plan: PlanSpec, workers: int) -> None:
    """Reject impossible plans before any worker starts; the remaining checks need the model."""
    if plan.replicas is not None and plan.replicas * plan.stages != workers:
        needed = plan.replicas * plan.stages
        raise PlanError(
            f"plan.replicas={plan.replicas} x plan.stages={plan.stages} needs {needed} worker{'s' * (needed > 1)}, got {workers}; "
            f"use --devices {needed}"
        )
    if workers % plan.stages:
        raise PlanError(
            f"plan.stages={plan.stages} does not divide {workers} worker{'s' * (workers > 1)}; "
            f"use --devices {plan.stages} or a multiple of it"
        )
