"""Reads the variables that Kubeflow Trainer v2 sets in the pods of a TrainJob: torchrun's own options, as PET_ variables.

`PET_NNODES`, `PET_NPROC_PER_NODE`, `PET_NODE_RANK`, `PET_MASTER_ADDR`, `PET_MASTER_PORT`. A pod is a host. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping

from carrywave.errors import WorkerError
from carrywave.launch.engines.hosts import Hosts, all_or_none, whole, with_port

NNODES, WORKERS, NODE, ADDRESS, PORT = "PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"
BY_DEVICE = ("auto", "cpu", "gpu")  # torchrun's words for as many workers as there are devices


def read(environment: Mapping[str, str]) -> Hosts | None:
    """The hosts that PET_ variables describe, of which only the first has a known address; None if they describe none.

    A single node is a host too: the number of its workers counts.
    """
    count = _nodes(environment)
    if count is None:
        return None
    workers = _workers(environment)
    if count == 1:
        return Hosts(("localhost:1",), ("node 0",), 0, NNODES, workers)
    all_or_none(environment, (NNODES, NODE, ADDRESS, PORT), "Kubeflow")
    node, port = whole(environment, NODE, 0), whole(environment, PORT, 1, 2**16 - 1)
    if node >= count:
        raise WorkerError(f"{NODE}={node} is out of range for {NNODES}={count}; nodes are numbered from 0: correct one of them")
    first = with_port(environment[ADDRESS].strip(), port)
    return Hosts((first, *[""] * (count - 1)), tuple(f"node {each}" for each in range(count)), node, NNODES, workers)


def _nodes(environment: Mapping[str, str]) -> int | None:
    text = environment.get(NNODES, "").strip()
    if not text:
        for name in (NODE, ADDRESS):
            if environment.get(name, "").strip():
                raise WorkerError(f"{name} is set but {NNODES} is not; Kubeflow sets both: set it too, or unset {name}")
        return 1 if environment.get(WORKERS, "").strip() else None
    if ":" in text and len(set(text.split(":"))) > 1:
        raise WorkerError(
            f"{NNODES}={text[:40]} is a range, which needs torchrun's own rendezvous; start torchrun -m -- carrywave train, or set a number"
        )
    return whole({NNODES: text.partition(":")[0]}, NNODES, 1)


def _workers(environment: Mapping[str, str]) -> int | None:
    text = environment.get(WORKERS, "").strip()
    return None if not text or text in BY_DEVICE else whole(environment, WORKERS, 1)
