"""Writes the task file of a job for SkyPilot, which runs it on machines of any cloud. Torch-free.

SkyPilot tells every node its place in SKYPILOT_* variables, which the command reads. It has no time limit of its own: `timeout` asks the
run to stop. A managed job (`sky jobs launch`) that is preempted is started again elsewhere, and goes on if its run outlives the machine; so
is one whose machine was at fault. A mistake in the input (2) is final, and so is an error that the workers' own restarts have not mended.
"""

from __future__ import annotations

import shlex
from typing import Any

import yaml

from carrywave.errors import UserError
from carrywave.launch.job_files.job import STOP_SECONDS, Job

AGAIN = [74, 137]  # exit codes after which a managed job is started again: a fault of the machine, and a command that was killed


def task(job: Job, setup: str | None) -> str:
    """The text to give to `sky launch` or `sky jobs launch`. `setup` is what installs carrywave, where no image has it."""
    if job.on_gpus and job.gpu is None:
        raise UserError("--to skypilot needs the kind of GPU; pass --gpu NAME (sky show-gpus lists them), or --device cpu")
    if job.image is None and setup is None:
        raise UserError(
            "--to skypilot needs carrywave on the nodes; pass --image IMAGE that has it, or --setup with a command that installs it"
        )
    resources: dict[str, Any] = {"accelerators": f"{job.gpu}:{job.devices}"} if job.on_gpus else {}
    resources["cpus"] = f"{job.devices * job.cpus}+"
    if job.image is not None:
        resources["image_id"] = f"docker:{job.image}"
    resources["job_recovery"] = {"max_restarts_on_errors": 0, "recover_on_exit_codes": AGAIN}
    # On GPUs SkyPilot says how many a node has; of CPU workers it knows nothing.
    command = shlex.join(job.command(devices=not job.on_gpus))
    if job.seconds is not None:
        # A run that has stopped in order (75) is no failure, after which a managed job would be started again.
        limit = f"timeout --preserve-status --signal=USR1 --kill-after={STOP_SECONDS} {job.seconds - STOP_SECONDS}"
        command = f"{limit} {command} || {{ code=$?; [ $code -eq 75 ] || exit $code; }}"
    found: dict[str, Any] = {"name": job.name, "num_nodes": job.nodes, "resources": resources, "workdir": "."}
    if setup is not None:
        found["setup"] = setup
    found["run"] = command
    return yaml.safe_dump(found, sort_keys=False, allow_unicode=True, width=120)
