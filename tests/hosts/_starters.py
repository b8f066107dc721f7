"""The same training, started on two hosts in every way there is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from _namespaces import ADDRESSES, NAMES, Cluster, OnHost

TRAIN = ["-m", "carrywave", "train", "--device", "cpu"]
SPEC = ["model.hidden=8", "model.layers=2", "model.dropout=0.2", "batch.lanes=4", "batch.steps=8", "train.optimizer=adam", "train.lr=0.001"]
SPEC += [
    "data.train=train.txt",
    "data.valid=valid.txt",
    "train.epochs=1000",
    "train.precision=fp64",
    "train.log_every=10",
    "train.snapshot_every=10",
]


class Starter(NamedTuple):
    """How a host learns of the others: further words of the command, and variables, of each host; or all words instead."""

    words: Callable[[int, int], list[str]]  # of a host, and the port
    variables: Callable[[int, int], dict[str, str]]
    instead: Callable[[int, int], list[str]] | None = None


def tf_config(node: int, port: int) -> dict[str, str]:
    addresses = [f"{address}:{port}" for address in ADDRESSES]
    task = {"type": "worker", "index": 0} if node else {"type": "chief", "index": 0}
    return {"TF_CONFIG": json.dumps({"cluster": {"chief": addresses[:1], "worker": addresses[1:]}, "task": task})}


def kubeflow(node: int, port: int) -> dict[str, str]:
    return {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_NODE_RANK": str(node),
        "PET_MASTER_ADDR": NAMES[0],
        "PET_MASTER_PORT": str(port),
    }


def skypilot(node: int, port: int) -> dict[str, str]:
    addresses = "\n".join(ADDRESSES)
    names = {"SKYPILOT_NODE_IPS": addresses, "SKYPILOT_NODE_RANK": str(node), "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "0"}
    return names | {"CARRYWAVE_PORT": str(port)}


def _torchrun(node: int, port: int) -> list[str]:
    where = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint={NAMES[0]}:{port}", "--rdzv-id=two"]
    return ["-m", "torch.distributed.run", *where, "--max-restarts=3", "-m", "--", "carrywave", "train", "--device", "cpu"]


def _none(node: int, port: int) -> list[str]:
    return []


STARTERS = {
    "torchrun": Starter(_none, lambda node, port: {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, _torchrun),
    "TF_CONFIG": Starter(_none, tf_config),
    "kubeflow": Starter(_none, kubeflow),
    "skypilot": Starter(_none, skypilot),
    "by hand": Starter(lambda node, port: ["--hosts", f"{NAMES[0]}:{port},{NAMES[1]}", "--host-index", str(node)], lambda node, port: {}),
}


def write_data(folder: Path) -> None:
    """The text that SPEC reads: short, so that the evaluation at the end is."""
    text = "the carry is passed along, and work moves through layers and time as a wave. "
    (folder / "train.txt").write_text(text * 12)
    (folder / "valid.txt").write_text(text)


def start(cluster: Cluster, how: str, run: str, port: int, *words: str, **variables: str) -> tuple[OnHost, OnHost]:
    """Start a training on both hosts, in this way."""
    first, second = (start_on(cluster, node, how, run, port, *words, **variables) for node in range(2))
    return first, second


def start_on(cluster: Cluster, node: int, how: str, run: str, port: int, *words: str, **variables: str) -> OnHost:
    """Start a training on one of the hosts, in this way."""
    write_data(cluster.folder)
    starter = STARTERS[how]
    command = TRAIN if starter.instead is None else starter.instead(node, port)
    return cluster.start(
        node, [*command, *SPEC, "--run", run, *starter.words(node, port), *words], **(starter.variables(node, port) | variables)
    )
