"""The same training, started on two hosts by torchrun or by what an engine says."""

from __future__ import annotations

import json

from _namespaces import ADDRESSES, NAMES, Cluster, OnHost

TRAIN = ["-m", "carrywave", "train", "--device", "cpu"]
SPEC = ["model.hidden=8", "model.layers=2", "model.dropout=0.2", "batch.lanes=4", "batch.steps=8", "train.optimizer=adam", "train.lr=0.001"]
SPEC += ["data.train=train.txt", "data.valid=valid.txt", "plan.replicas=2", "train.epochs=1000", "train.precision=fp64"]
SPEC += ["train.log_every=10", "train.snapshot_every=10"]
RUN = ["--run", "run"]


def tf_config(node: int, port: int) -> dict[str, str]:
    addresses = [f"{address}:{port}" for address in ADDRESSES]
    task = {"type": "worker", "index": 0} if node else {"type": "chief", "index": 0}
    return {"TF_CONFIG": json.dumps({"cluster": {"chief": addresses[:1], "worker": addresses[1:]}, "task": task})}


def kubeflow(node: int, port: int) -> dict[str, str]:
    names = {"PET_NNODES": 2, "PET_NPROC_PER_NODE": 1, "PET_NODE_RANK": node, "PET_MASTER_ADDR": NAMES[0], "PET_MASTER_PORT": port}
    return {name: str(value) for name, value in names.items()}


def skypilot(node: int, port: int) -> dict[str, str]:
    addresses = "\n".join(ADDRESSES)
    return {"SKYPILOT_NODE_IPS": addresses, "SKYPILOT_NODE_RANK": str(node), "CARRYWAVE_PORT": str(port)}


def _torchrun(port: int) -> list[str]:
    where = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint={NAMES[0]}:{port}", "--rdzv-id=two"]
    return ["-m", "torch.distributed.run", *where, "--max-restarts=3", "-m", "--", "carrywave", "train", "--device", "cpu"]


ENGINES = {"TF_CONFIG": tf_config, "kubeflow": kubeflow, "skypilot": skypilot}
STARTERS = ("torchrun", *ENGINES)


def write_data(cluster: Cluster) -> None:
    """The text that SPEC reads: short, so that the evaluation at the end is."""
    text = "the carry is passed along, and work moves through layers and time as a wave. "
    (cluster.folder / "train.txt").write_text(text * 12)
    (cluster.folder / "valid.txt").write_text(text)


def start(cluster: Cluster, how: str, port: int, *words: str, **variables: str) -> tuple[OnHost, OnHost]:
    """Start a training on both hosts, in this way."""
    first, second = (start_on(cluster, node, how, port, *words, **variables) for node in range(2))
    return first, second


def start_on(cluster: Cluster, node: int, how: str, port: int, *words: str, **variables: str) -> OnHost:
    """Start a training on one of the hosts, in this way."""
    write_data(cluster)
    said = ENGINES[how](node, port) if how in ENGINES else {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = TRAIN if how in ENGINES else _torchrun(port)
    return cluster.start(node, [*command, *SPEC, *RUN, *words], **(said | variables))
