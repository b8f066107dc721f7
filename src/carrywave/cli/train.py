"""`carrywave train`: reads the spec, starts workers if there are to be several, and trains or resumes a run."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from carrywave.cli.exits import leaving_at_once
from carrywave.cli.options import Device, DeviceOption, JsonOption, display_console, spec_and_overrides, write_rows
from carrywave.cli.workers import (
    DevicesOption,
    MinDevicesOption,
    OnOption,
    RestartsOption,
    agreed,
    around,
    devices_of,
    devices_that_pay,
    fitted,
    start_on_ray,
    start_workers,
)
from carrywave.errors import ResourceError, RunError, UserError
from carrywave.launch.exit_reports import INTERRUPTED, STOPPED
from carrywave.launch.launcher import Patience
from carrywave.parallel.startup.launcher_env import is_first
from carrywave.runs import output_file
from carrywave.runs.display import PlainWatcher, watcher_for
from carrywave.runs.watcher import Silent
from carrywave.spec.defaults import AUTO, suited, with_precision
from carrywave.spec.load import dump, load, parse, read_own, with_overrides
from carrywave.spec.spec import Spec

ENDINGS = {"interrupted": INTERRUPTED, "terminated": STOPPED}  # exit codes of a run that stopped early with a snapshot written


def train(
    spec: Annotated[list[str] | None, typer.Argument(metavar="SPEC.yaml|key=value", help="Spec file and overrides, all optional.")] = None,
    run: Annotated[str | None, typer.Option(metavar="DIR", help="Run folder. Default: runs/NAME.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --run where it stopped.")] = False,
    or_start: Annotated[
        bool,
        typer.Option("--continue", help="Like --resume if there is a run in --run, else start it: for clusters that repeat a command."),
    ] = False,
    init: Annotated[str | None, typer.Option(metavar="RUN|FILE", help="Start from these weights.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved spec, the summary and the plan, then exit.")] = False,
    device: DeviceOption = Device.auto,
    devices: DevicesOption = None,
    on: OnOption = None,
    restarts: RestartsOption = None,
    min_devices: MinDevicesOption = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Train N runs that differ by their seed, one to a device, in DIR/seed-1, ….")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Train a model; without a SPEC, a small character model on text that ships with Python."""
    path, overrides = spec_and_overrides(spec or [])
    if seeds is not None:
        if dry_run or on is not None or min_devices is not None:
            raise UserError("--seeds trains several runs on this machine; remove --dry-run, --on and --min-devices")
        resume = resume or (or_start and run is not None and (Path(run) / "seeds.yaml").is_file())
        further = [] if restarts is None else ["--restarts", str(restarts)]
        resolved = None if resume and not spec else load(path, overrides)
        return _train_seeds(resolved, seeds, run, resume, init, device.value, devices, further, json_file)
    where = around()
    with agreed(device.value):
        resume = resume or (or_start and _run_exists(run))
        if resume and init is not None and not or_start:
            raise RunError("--resume continues with the run's own weights and --init starts from others; use only one of them")
        resolved = with_overrides(_spec_of(run), overrides, defaults=False) if resume and path is None else load(path, overrides)
        before = Path(run) if resume and run is not None else None
        if devices is None and on is None and before is not None:
            devices = devices_of(before, resolved, device.value, where)
        if resume and path is None:
            resolved = fitted(resolved, overrides, devices, where)
        output_file.check(json_file)
    if on is not None and not dry_run:
        start_on_ray(devices, device.value, resolved.plan_spec, Patience(restarts, min_devices))
    if devices is None and min_devices is None:
        devices = devices_that_pay(resolved, device.value, where)
    patience = Patience(restarts, min_devices)
    workers = start_workers(devices, device.value, resolved.plan_spec, where=where, patience=patience, dry_run=dry_run, resumes=before)
    if dry_run and is_first():
        typer.echo(dump(_with_precision(resolved, run if resume else None, device.value)), nl=False)
    _train(resolved, run, resume, init, device.value, workers, json_file, dry_run=dry_run)


def _with_precision(spec: Spec, before: str | None, device: str) -> Spec:
    """The spec with the precision that `auto` is on this device or, where a run goes on, was in that run (`before`)."""
    if spec.train.precision != AUTO:
        return spec
    if before is not None:
        return with_precision(spec, parse(_spec_of(before), defaults=False).train.precision)
    with leaving_at_once():
        from carrywave.parallel.devices import pick_device
        from carrywave.step.precision import made_for_bf16
    return with_precision(spec, suited(made_for_bf16=made_for_bf16(pick_device(device))))


def _train(
    resolved: Spec,
    run: str | None,
    resume: bool,
    init: str | None,
    device: str,
    workers: int | None,
    json_file: Path | None,
    *,
    dry_run: bool,
) -> None:
    with leaving_at_once():
        from carrywave.train.fit import train as train_run

    # A dry run prints a spec; everything else becomes YAML comments, so that the output as a whole is a valid spec file.
    shown = PlainWatcher(Console(), before="# ") if dry_run else watcher_for(display_console())
    with shown if is_first() else nullcontext(Silent()) as display:
        how = {} if workers is None else {"devices": workers}
        result = train_run(
            resolved,
            run=None if run is None else Path(run),
            resume=resume,
            init=init,
            device=device,
            watch=display,
            dry_run=dry_run,
            **how,
        )
    if json_file is not None:
        read: list[dict[str, object]] = [{"data": dict(result.table)}] if result.table else []
        write_rows(json_file, read if dry_run else _evaluations(result.run))
    if result.ending in ENDINGS:
        raise typer.Exit(ENDINGS[result.ending])


def _train_seeds(
    spec: Spec | None,
    seeds: int,
    run: str | None,
    resume: bool,
    init: str | None,
    device: str,
    devices: int | None,
    further: list[str],
    json_file: Path | None,
) -> None:
    output_file.check(json_file)
    with leaving_at_once():
        from carrywave.tuning.seeds import train_seeds

    place = None if run is None else Path(run)
    how: dict[str, Any] = {"run": place, "resume": resume, "init": init, "where": (device, devices), "words": further}
    result = train_seeds(spec, seeds, say=typer.echo, **how)
    write_rows(json_file, result.rows)
    typer.echo(result.summary)
    if result.ending is not None:
        typer.echo(f"{result.ending}; resume with: carrywave train --seeds {seeds} --resume --run {result.run}")
        raise typer.Exit(ENDINGS[result.ending])
    if result.failed:
        kind = ResourceError if result.later else RunError
        raise kind(f"{result.failed}; to train what is missing: carrywave train --seeds {seeds} --resume --run {result.run}")
    typer.echo(f"predict with all of them: carrywave predict {result.run}/seed-* INPUT")


def _spec_of(run: str | None) -> dict[str, Any]:
    """The values of the spec of a run that is resumed."""
    if run is None:
        raise RunError("--resume needs a run folder; pass --run DIR")
    path = Path(run) / "spec.yaml"
    if not path.is_file():
        raise RunError(f"{run} has no run to resume (no spec.yaml); correct --run, or remove --resume to start a new run")
    return read_own(path)


def _run_exists(run: str | None) -> bool:
    """True if there is a run to continue."""
    if run is None:
        raise RunError("--continue needs a run folder; pass --run DIR")
    return (Path(run) / "spec.yaml").is_file()


def _evaluations(run: Path) -> list[dict[str, object]]:
    file = run / "metrics.jsonl"  # not there yet if the run was stopped early
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if is_first() and file.is_file() else []
    return [row for row in rows if row["split"] != "train"]
