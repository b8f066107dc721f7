"""Reads TF_CONFIG, as set on TensorFlow clusters, as a list of hosts: each task is a host that starts one worker per device.

`{"cluster": {"chief": ["a:2222"], "worker": ["b:2222", "c:2222"]}, "task": {"type": "worker", "index": 0}}`. Torch-free.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from carrywave.errors import WorkerError
from carrywave.launch.engines.hosts import Hosts, host_and_port

EXAMPLE = '{"cluster": {"worker": ["hostA:2222", "hostB:2222"]}, "task": {"type": "worker", "index": 0}}'


def read(environment: Mapping[str, str]) -> Hosts | None:
    """The hosts that TF_CONFIG names; None if it is not set, or names no other host."""
    text = environment.get("TF_CONFIG", "")
    if not text.strip():
        return None
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WorkerError(f"TF_CONFIG is not JSON ({error}); write it like {EXAMPLE}, or unset it") from error
    cluster, task = _part(config, "cluster"), _part(config, "task")
    if not cluster and not task:
        return None  # {} is how TensorFlow denotes a single machine
    for role in cluster:
        if role not in ("chief", "worker"):
            raise WorkerError(f"TF_CONFIG lists tasks of type {role}: {_remedy(role)}")
    addresses: list[str] = []
    names: list[str] = []
    for role in ("chief", "worker"):
        tasks = cluster.get(role, [])
        if not isinstance(tasks, list) or not all(isinstance(address, str) for address in tasks):
            raise WorkerError(f'TF_CONFIG: cluster.{role} is not a list of "host:port"; write it like {EXAMPLE}')
        for index, address in enumerate(tasks):
            host_and_port(address, "TF_CONFIG")
            addresses.append(address)
            names.append(f"{role} {index}")
    if len(set(addresses)) != len(addresses):
        raise WorkerError("TF_CONFIG gives the same address to two tasks; use a different host address for each task")
    kind, number = task.get("type"), task.get("index")
    if kind in ("ps", "evaluator"):
        raise WorkerError(f"TF_CONFIG gives this task the type {kind}: {_remedy(kind)}")
    if f"{kind} {number}" not in names:
        count = sum(name.startswith(f"{kind} ") for name in names)
        raise WorkerError(
            f"TF_CONFIG: task {kind} {number} is not in the cluster, which has {count} of type {kind}; correct task.type and task.index"
        )
    return Hosts(tuple(addresses), tuple(names), names.index(f"{kind} {number}")) if len(addresses) > 1 else None


def _part(config: object, name: str) -> dict[str, Any]:
    if not isinstance(config, dict):
        raise WorkerError(f"TF_CONFIG is not a JSON object; write it like {EXAMPLE}")
    part = config.get(name, {} if not config else None)
    if not isinstance(part, dict):
        raise WorkerError(f"TF_CONFIG has no {name}; write it like {EXAMPLE}")
    return part


def _remedy(role: str) -> str:
    if role == "ps":
        return "carrywave has no parameter servers, the workers hold the weights; list those hosts as worker, or remove them"
    if role == "evaluator":
        return "workers evaluate during training; remove them from the cluster, or run carrywave evaluate RUN there"
    return "only chief and worker are supported; remove the others"
