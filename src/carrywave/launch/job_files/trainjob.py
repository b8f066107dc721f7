"""Writes a job for Kubernetes with Kubeflow Trainer: a `TrainJob`, the `TrainingRuntime` that it runs in, and a ConfigMap with the spec.

The trainer tells every pod its place in PET_* variables, which the command reads. Runs and data lie on a claim that all pods mount. The
runtime is the job's own, because only a runtime can say which exit codes are final: a mistake in the input (2) ends the job, a fault of
the machine (74) or a death has its pod started again, and pods that are evicted do not count. Torch-free.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import yaml

from carrywave.errors import UserError
from carrywave.launch.job_files.job import STOP_SECONDS, Job

API = "trainer.kubeflow.org/v1alpha1"
NODE = "node"  # what the trainer calls the job of its nodes, and their container
RESTARTS = 3  # of each pod
WORK, SPEC = "/workspace", "/etc/carrywave"  # where the claim and the spec are mounted


def manifest(job: Job, spec_text: str | None, claim: str | None) -> str:
    """The text to give to `kubectl apply -f`: YAML of two or three objects."""
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
    documents.append(_runtime(job, volumes))
    documents.append(_train_job(job, within=WORK if claim is not None else None))
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _runtime(job: Job, volumes: dict[str, tuple[dict[str, Any], str]]) -> dict[str, Any]:
    container: dict[str, Any] = {"name": NODE, "image": job.image}
    pod: dict[str, Any] = {"restartPolicy": "Never", "terminationGracePeriodSeconds": STOP_SECONDS, "containers": [container]}
    if volumes:
        pod["volumes"] = [{"name": name, **source} for name, (source, _) in volumes.items()]
        container["volumeMounts"] = [{"name": name, "mountPath": path} for name, (_, path) in volumes.items()]
    rules = [
        {"action": "FailJob", "onExitCodes": {"containerName": NODE, "operator": "In", "values": [2]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
    ]
    # The pods of a run fail together, and every one counts.
    spec = {"backoffLimit": RESTARTS * job.nodes, "podFailurePolicy": {"rules": rules}, "template": {"spec": pod}}
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    replicated = {"name": NODE, "template": {"metadata": {"labels": labels}, "spec": spec}}
    return {
        "apiVersion": API,
        "kind": "TrainingRuntime",
        "metadata": {"name": job.name, "labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {"mlPolicy": {"numNodes": job.nodes, "torch": {}}, "template": {"spec": {"replicatedJobs": [replicated]}}},
    }


def _train_job(job: Job, within: str | None) -> dict[str, Any]:
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
    runtime = {"name": job.name, "apiGroup": API.partition("/")[0], "kind": "TrainingRuntime"}
    spec: dict[str, Any] = {"runtimeRef": runtime, "trainer": trainer}
    if job.seconds is not None:
        spec["activeDeadlineSeconds"] = job.seconds
    return {"apiVersion": API, "kind": "TrainJob", "metadata": {"name": job.name}, "spec": spec}


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block, as a person would, and no aliases."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
