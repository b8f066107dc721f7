"""Writes a job for Kubernetes with Kubeflow Trainer: a `TrainJob` of the runtime `torch-distributed`, and a ConfigMap with the spec.

The trainer tells every pod its place in PET_* variables, which the command reads. Runs and data lie on a claim that all pods mount.
Torch-free.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import yaml

from carrywave.errors import UserError
from carrywave.launch.job_files.job import STOP_SECONDS, Job

API = "trainer.kubeflow.org/v1alpha1"
RUNTIME = "torch-distributed"
NODE = "node"  # what that runtime calls its job and its container
WORK, SPEC = "/workspace", "/etc/carrywave"  # where the claim and the spec are mounted


def manifest(job: Job, spec_text: str | None, claim: str | None) -> str:
    """The text to give to `kubectl apply -f`: YAML of one or two objects."""
    if job.image is None:
        raise UserError("--to kubernetes needs an image that has carrywave in it; pass --image IMAGE")
    if claim is None and "://" not in job.run:
        raise UserError(
            "--to kubernetes needs a place for the run that outlives its pods; pass --claim NAME, a PersistentVolumeClaim that all nodes "
            "can mount, with the data in it, or --run with an object store"
        )
    if job.gpu is not None:
        raise UserError(f"--gpu {job.gpu} has no place in a TrainJob, whose runtime chooses the nodes; remove it")
    volumes: dict[str, tuple[dict[str, Any], str]] = {}  # by name: where it comes from, and where it is mounted
    if claim is not None:
        volumes["workspace"] = {"persistentVolumeClaim": {"claimName": claim}}, WORK
    documents: list[dict[str, Any]] = []
    if spec_text is not None:
        named = f"{job.name}-spec"
        documents.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": named}, "data": {"spec.yaml": spec_text}})
        volumes["spec"] = {"configMap": {"name": named}}, SPEC
        job = replace(job, spec=f"{SPEC}/spec.yaml")
    documents.append(_train_job(job, volumes, within=WORK if claim is not None else None))
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _train_job(job: Job, volumes: dict[str, tuple[dict[str, Any], str]], within: str | None) -> dict[str, Any]:
    words = job.command(devices=False)
    cores = str(job.devices * job.cpus)
    trainer: dict[str, Any] = {
        "image": job.image,
        # The shell is replaced, so that signals reach the command itself.
        "command": words if within is None else ["sh", "-c", f"cd {within} && exec {shlex.join(words)}"],
        "numNodes": job.nodes,
        "numProcPerNode": job.devices,
        "resourcesPerNode": {"requests": {"cpu": cores}, "limits": {"nvidia.com/gpu": str(job.devices)} if job.on_gpus else {"cpu": cores}},
    }
    spec: dict[str, Any] = {"runtimeRef": {"name": RUNTIME}, "trainer": trainer}
    if job.seconds is not None:
        spec["activeDeadlineSeconds"] = job.seconds
    pod: dict[str, Any] = {"terminationGracePeriodSeconds": STOP_SECONDS}
    if volumes:
        pod["volumes"] = [{"name": name, **source} for name, (source, _) in volumes.items()]
        mounts = [{"name": name, "mountPath": path} for name, (_, path) in volumes.items()]
        pod["containers"] = [{"name": NODE, "volumeMounts": mounts}]
    replicated = {"name": NODE, "template": {"spec": {"template": {"spec": pod}}}}
    patch = {"template": {"spec": {"replicatedJobs": [replicated]}}}
    spec["runtimePatches"] = [{"manager": "carrywave", "trainingRuntimeSpec": patch}]
    return {"apiVersion": API, "kind": "TrainJob", "metadata": {"name": job.name}, "spec": spec}


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block, as a person would, and no aliases."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
