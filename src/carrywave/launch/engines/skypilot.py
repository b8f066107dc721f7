"""Reads the variables that SkyPilot sets on the nodes of a task. A node is a host. Torch-free.

`SKYPILOT_NODE_IPS` (one address a line), `SKYPILOT_NODE_RANK`, `SKYPILOT_NUM_GPUS_PER_NODE`. SkyPilot names no port: it is 29500, or
`CARRYWAVE_PORT`.
"""

from __future__ import annotations

from collections.abc import Mapping

from carrywave.errors import WorkerError
from carrywave.launch.engines.hosts import Hosts, all_or_none, usual_port, whole, with_port

ADDRESSES, NODE, GPUS = "SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_GPUS_PER_NODE"
TASK = "SKYPILOT_TASK_ID"  # stays the same when SkyPilot recovers a task


def read(environment: Mapping[str, str]) -> Hosts | None:
    """The hosts that SkyPilot's variables name; None if they are not set. A single node is a host too: the number of its GPUs counts."""
    if not all_or_none(environment, (ADDRESSES, NODE), "SkyPilot"):
        return None
    found = environment[ADDRESSES].split()
    if len(set(found)) != len(found):
        raise WorkerError(f"{ADDRESSES} names {next(each for each in found if found.count(each) > 1)} twice; list every node once")
    node = whole(environment, NODE, 0)
    if node >= len(found):
        raise WorkerError(
            f"{NODE}={node} is out of range for {ADDRESSES}, which lists {len(found)}; nodes are numbered from 0: correct one of them"
        )
    # A node without GPUs has as many workers as the user asks for.
    workers = whole(environment, GPUS, 0) or None if environment.get(GPUS, "").strip() else None
    port = usual_port(environment)
    addresses = tuple(with_port(address, port) for address in found)
    return Hosts(addresses, tuple(f"node {each}" for each in range(len(found))), node, ADDRESSES, workers, job(environment) or "")


def job(environment: Mapping[str, str]) -> str | None:
    """What identifies a task, even after SkyPilot has recovered it on other machines; None without SkyPilot."""
    return environment.get(TASK) or None
