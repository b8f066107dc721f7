"""`carrywave launch`: writes the file that a cluster needs to train a spec. Starts nothing, and loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from carrywave.cli.options import Device, note, spec_and_overrides
from carrywave.errors import UserError
from carrywave.launch.job_files import Job, for_kubernetes, for_skypilot, for_slurm, name_for, seconds_of
from carrywave.runs import output_file
from carrywave.spec.load import load


class JobFileKind(StrEnum):
    """The clusters that files can be written for."""

    slurm = "slurm"
    kubernetes = "kubernetes"
    skypilot = "skypilot"


SUBMIT = {JobFileKind.slurm: "sbatch {}", JobFileKind.kubernetes: "kubectl apply -f {}", JobFileKind.skypilot: "sky jobs launch {}"}


def launch(
    to: Annotated[JobFileKind, typer.Option("--to", help="The kind of cluster.")],
    spec: Annotated[list[str] | None, typer.Argument(metavar="SPEC.yaml|key=value", help="Spec file and overrides, all optional.")] = None,
    file: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Output file. Default: stdout.")] = None,
    nodes: Annotated[int, typer.Option(metavar="N", help="Machines.")] = 1,
    devices: Annotated[int, typer.Option(metavar="N", help="Workers on each machine: its GPUs, or processes on the CPU.")] = 1,
    device: Annotated[Device, typer.Option(help="Where to compute; auto means GPUs.")] = Device.auto,
    cpus: Annotated[int, typer.Option(metavar="N", help="CPU cores of each worker.")] = 4,
    gpu: Annotated[str | None, typer.Option(metavar="NAME", help="Kind of GPU, in the cluster's words. Slurm, SkyPilot.")] = None,
    time: Annotated[str | None, typer.Option(metavar="TIME", help="Time limit, such as 90m, 12h or 1-12:00:00.")] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the job. Default: that of the spec file.")] = None,
    run: Annotated[str | None, typer.Option(metavar="DIR", help="Run folder, as the nodes see it. Default: runs/NAME.")] = None,
    image: Annotated[
        str | None, typer.Option(metavar="IMAGE", help="Container image that has carrywave in it. Slurm needs pyxis for it.")
    ] = None,
    claim: Annotated[
        str | None, typer.Option(metavar="NAME", help="Kubernetes: the PersistentVolumeClaim with the data and the runs.")
    ] = None,
    setup: Annotated[str | None, typer.Option(metavar="COMMAND", help="SkyPilot: what installs carrywave on a node.")] = None,
) -> None:
    """Write the file that a cluster needs to train a spec: for Slurm, Kubernetes or SkyPilot."""
    path, overrides = spec_and_overrides(spec or [])
    resolved = load(path, overrides)
    output_file.check(file, wanted=True)
    _check_place(to, {"claim": (claim, JobFileKind.kubernetes), "setup": (setup, JobFileKind.skypilot)})
    shown = None if path is None else str(path)
    named = name_for(shown, resolved.task) if name is None else name
    job = Job(
        name=named,
        spec=shown,
        overrides=tuple(overrides),
        run=f"runs/{named}" if run is None else run,
        nodes=nodes,
        devices=devices,
        cpus=cpus,
        on_gpus=device is not Device.cpu,
        gpu=gpu,
        seconds=None if time is None else seconds_of(time),
        image=image,
    )
    job.check_plan(resolved.plan_spec)
    if to is JobFileKind.slurm:
        text = for_slurm(job)
    elif to is JobFileKind.kubernetes:
        text = for_kubernetes(job, None if path is None else path.read_text(encoding="utf-8-sig"), claim)
    else:
        text = for_skypilot(job, setup)
    if file is None:
        typer.echo(text, nl=False)
    else:
        output_file.write(file, text)
        note(f"wrote {file}; start it with: {SUBMIT[to].format(file)}")


def _check_place(to: JobFileKind, options: Mapping[str, tuple[str | None, JobFileKind]]) -> None:
    for option, (value, place) in options.items():
        if value is not None and to is not place:
            raise UserError(f"--{option} is for --to {place.value}; remove it")
