"""A `Job` is what a cluster is asked for: so many nodes and devices, for so long, and the command that they run. Torch-free."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath

from carrywave.errors import PlanError, UserError
from carrywave.spec.plan_spec import PlanSpec

STOP_SECONDS = 120  # from the request to stop to the end: a step, a snapshot, and a wide margin
MOST_NAME = 50  # Kubernetes derives host names of at most 63 characters from it
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


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
        check_name(self.name)
        for name, value in (("nodes", self.nodes), ("devices", self.devices), ("cpus", self.cpus)):
            if value < 1:
                raise PlanError(f"--{name} is {value}; use a number >= 1")
        if self.seconds is not None and self.seconds <= STOP_SECONDS:
            raise UserError(f"--time is {self.seconds} s, of which the last {STOP_SECONDS} s are kept for a snapshot; use a longer time")
        if self.gpu is not None and not self.on_gpus:
            raise UserError(f"--gpu {self.gpu} asks for GPUs and --device cpu for none; use only one of them")
        for option, text in (("--image", self.image), ("--run", self.run), ("--gpu", self.gpu), ("SPEC", self.spec)):
            if text is not None and (not text or not text.isprintable()):
                raise UserError(f"{option} {text!r} is empty or has characters that cannot be printed; use another")

    def command(self, *, devices: bool) -> list[str]:
        """What every node runs. With `devices` it says how many workers a node has, which some clusters tell by themselves."""
        words = ["carrywave", "train", *([] if self.spec is None else [self.spec]), *self.overrides]
        words += ["--run", self.run, "--continue"]
        words += ["--devices", str(self.devices)] if devices else []
        return words + ([] if self.on_gpus else ["--device", "cpu"])

    def check_plan(self, plan: PlanSpec) -> None:
        """Refuse a plan that these nodes cannot carry out."""
        workers = self.nodes * self.devices
        have = f"{workers} worker{'s' * (workers > 1)} (--nodes {self.nodes} x --devices {self.devices})"
        if plan.replicas is not None and plan.replicas * plan.stages != workers:
            needed = plan.replicas * plan.stages
            raise PlanError(
                f"plan.replicas={plan.replicas} x plan.stages={plan.stages} needs {needed} workers, but the job has {have}; "
                "change --nodes or --devices, or leave out plan.replicas"
            )
        if workers % plan.stages:
            raise PlanError(f"plan.stages={plan.stages} does not divide the job's {have}; change --nodes, --devices or plan.stages")


def check_name(name: str) -> None:
    """Refuse names that one of the clusters would refuse later."""
    if re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) is None or len(name) > MOST_NAME:
        raise UserError(
            f"--name {name[:60]} is not a name for a job; use at most {MOST_NAME} lower-case letters, digits and hyphens, from a letter on"
        )


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
