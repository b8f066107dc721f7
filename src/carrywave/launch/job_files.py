"""The files with which a cluster is asked to train: for Slurm, Kubernetes (Kubeflow Trainer) and SkyPilot, from templates. Torch-free.

A `Job` is what is asked for: so many nodes and devices, for so long, and the command that every node runs. It is safe to run again: the
command continues the run if there is one. Which exit codes are tried again and which are final stands in the templates.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from carrywave.errors import PlanError, UserError
from carrywave.spec.plan_spec import PlanSpec

STOP_SECONDS = 120  # from the request to stop to the end: a step, a snapshot, and a wide margin
MOST_NAME = 50  # Kubernetes derives host names of at most 63 characters from it
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
STARTS, PAUSE_SECONDS, REQUEUES = 4, 60, 3  # Slurm: starts of a step, and how a fault of the machine is tried again
RESTARTS = 3  # Kubernetes: of each pod
WORK, SPEC = "/workspace", "/etc/carrywave"  # Kubernetes: where the claim and the spec are mounted


@dataclass(frozen=True)
class Job:
    """One training run on a cluster. The command is the same on every node."""

    name: str
    spec: str | None  # the file, as the nodes find it; None: the overrides alone
    overrides: tuple[str, ...]
    run: str  # the run's folder, as the nodes find it
    nodes: int
    devices: int  # workers on each node
    cpus: int  # cores of each worker
    on_gpus: bool
    gpu: str | None = None  # the kind of GPU, in the cluster's words
    seconds: int | None = None  # time limit
    image: str | None = None  # container image

    def __post_init__(self) -> None:
        if re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", self.name) is None or len(self.name) > MOST_NAME:
            remedy = f"use at most {MOST_NAME} lower-case letters, digits and hyphens"
            raise UserError(f"--name {self.name[:60]} is not a name for a job; {remedy}")
        for name, value in (("nodes", self.nodes), ("devices", self.devices), ("cpus", self.cpus)):
            if value < 1:
                raise PlanError(f"--{name} is {value}; use a number >= 1")
        if self.seconds is not None and self.seconds <= STOP_SECONDS:
            raise UserError(f"--time is {self.seconds} s, of which the last {STOP_SECONDS} s are kept for a snapshot; use a longer time")
        if self.gpu is not None and not self.on_gpus:
            raise UserError(f"--gpu {self.gpu} asks for GPUs and --device cpu for none; use only one of them")

    def command(self, *, devices: bool) -> str:
        """What every node runs. With `devices` it says how many workers a node has, which some clusters tell by themselves."""
        words = ["carrywave", "train", *([] if self.spec is None else [self.spec]), *self.overrides, "--run", self.run, "--continue"]
        words += ["--devices", str(self.devices)] if devices else []
        return shlex.join(words + ([] if self.on_gpus else ["--device", "cpu"]))

    def check_plan(self, plan: PlanSpec) -> None:
        """Refuse a plan that these nodes cannot carry out."""
        workers = self.nodes * self.devices
        if (plan.replicas or workers // plan.stages) * plan.stages != workers:
            needs = f"plan.stages={plan.stages}" if plan.replicas is None else f"plan.replicas={plan.replicas} x plan.stages={plan.stages}"
            raise PlanError(f"{needs} does not fit --nodes {self.nodes} x --devices {self.devices} = {workers} workers; change one of them")


def for_slurm(job: Job) -> str:
    """The text to give to sbatch: one task a node, which starts a worker for each device of its node."""
    cores = job.devices * job.cpus
    options: dict[str, Any] = {"job-name": job.name, "nodes": job.nodes, "ntasks-per-node": 1, "cpus-per-task": cores}
    if job.on_gpus:
        options["gpus-per-node"] = shlex.quote(f"{job.gpu}:{job.devices}" if job.gpu else str(job.devices))
    if job.seconds is not None:
        options["time"] = slurm_time(job.seconds)
    options |= {"signal": f"B:USR1@{STOP_SECONDS}", "output": "%x-%j.log", "open-mode": "append"}
    # srun does not take over the number of cores from sbatch. A task that has stopped in order must not end the others, which may still be
    # writing the snapshot; those that lose one which died end by themselves.
    srun = ["srun", f"--cpus-per-task={cores}", "--kill-on-bad-exit=0", "--wait=0"]
    srun += [] if job.image is None else [f"--container-image={job.image}"]
    how = {"starts": STARTS, "pause": PAUSE_SECONDS, "requeues": REQUEUES}
    return _filled("sbatch.sh.j2", options=options, srun=shlex.join(srun), command=job.command(devices=True), **how)


def for_kubernetes(job: Job, spec_text: str | None, claim: str | None) -> str:
    """The text to give to `kubectl apply -f`: a TrainJob, the runtime that it runs in, and a ConfigMap with the spec if there is one."""
    if job.image is None:
        raise UserError("--to kubernetes needs an image that has carrywave in it; pass --image IMAGE")
    if claim is None:
        raise UserError("--to kubernetes needs a place for data and runs; pass --claim NAME, a volume claim that all nodes can mount")
    if job.gpu is not None:
        raise UserError(f"--gpu {job.gpu} has no place in a TrainJob, whose runtime chooses the nodes; remove it")
    job = job if spec_text is None else replace(job, spec=f"{SPEC}/spec.yaml")
    places = {"claim": claim, "work": WORK, "spec_folder": SPEC, "spec_text": spec_text}
    return _filled("trainjob.yaml.j2", job=job, command=job.command(devices=False), restarts=RESTARTS, **places)


def for_skypilot(job: Job, setup: str | None) -> str:
    """The text to give to `sky launch` or `sky jobs launch`. `setup` is what installs carrywave, where no image has it."""
    if job.on_gpus and job.gpu is None:
        raise UserError("--to skypilot needs the kind of GPU; pass --gpu NAME (sky show-gpus lists them), or --device cpu")
    if job.image is None and setup is None:
        raise UserError("--to skypilot needs carrywave on the nodes; pass --image IMAGE that has it, or --setup COMMAND")
    # On GPUs SkyPilot says how many a node has; of CPU workers it knows nothing.
    return _filled("skypilot.yaml.j2", job=job, setup=setup, command=job.command(devices=not job.on_gpus))


def name_for(spec: str | None, task: str) -> str:
    """A name for a job, from the name of its spec file or else its task."""
    stem = PurePath(spec).stem if spec is not None else task
    found = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:MOST_NAME].rstrip("-")
    return found if re.match("[a-z]", found) else f"run-{found}".rstrip("-")[:MOST_NAME]


def seconds_of(text: str) -> int:
    """A time limit as people write it: 90m, 12h, 2d, 12:00:00, 1-12:00:00."""
    short = re.fullmatch(r"([0-9]{1,6})([smhd])", text)
    if short is not None:
        return int(short[1]) * UNITS[short[2]]
    long = re.fullmatch(r"(?:([0-9]{1,4})-)?([0-9]{1,4}):([0-5][0-9]):([0-5][0-9])", text)
    if long is None:
        raise UserError(f"--time {text[:60]} is not a time limit; write it like 90m, 12h, 2d or 1-12:00:00")
    days, hours, minutes, seconds = (int(part or 0) for part in long.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def slurm_time(seconds: int) -> str:
    """A time limit as Slurm writes it: days-hours:minutes:seconds."""
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours // 24}-{hours % 24:02}:{minute:02}:{second:02}"


def _filled(template: str, **values: Any) -> str:
    made = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # none of it is HTML
    )
    made.filters["text"] = lambda text: json.dumps(text, ensure_ascii=False)  # YAML takes JSON's strings
    return made.get_template(template).render(stop_seconds=STOP_SECONDS, **values)
