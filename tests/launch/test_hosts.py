"""What engines say about hosts, and what srun says to a task that is a worker."""

from __future__ import annotations

import json
import os

import pytest

from carrywave.errors import WorkerError
from carrywave.launch import hosts
from carrywave.launch.hosts import Hosts, hosts_of, take_place


def tf(kind: str = "worker", index: int = 0, **cluster: list[str]) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


TWO = {"chief": ["a:1"], "worker": ["b:2"]}
KUBEFLOW = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "a", "PET_MASTER_PORT": "29500"}
SKYPILOT = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
SRUN = {"SLURM_JOB_ID": "9", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1"}
SRUN |= {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}


@pytest.fixture(autouse=True)
def scontrol(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"hostnames": "n1\nn2\n", "node": "NodeName=n1 Arch=x86_64\n   NodeAddr=10.0.0.1 NodeHostName=n1\n"}
    monkeypatch.setattr(hosts, "_scontrol", lambda show, what, which: said[what])


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, None),
        (tf(**TWO), Hosts(2, 1, "a:1", "tf-config")),
        (tf("chief", **TWO), Hosts(2, 0, "a:1", "tf-config")),
        ({"TF_CONFIG": "{}"}, None),  # how TensorFlow denotes a single machine
        (tf(worker=["a:1"]), None),
        (KUBEFLOW, Hosts(2, 1, "a:29500", "kubeflow", 4)),
        ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"}, Hosts(1, 0, "localhost:1", "kubeflow")),
        (SKYPILOT, Hosts(2, 1, "10.0.0.1:29500", "skypilot", 8)),
        (SKYPILOT | {"CARRYWAVE_PORT": "7"}, Hosts(2, 1, "10.0.0.1:7", "skypilot", 8)),
        (SRUN, Hosts(2, 1, "10.0.0.1:16393", "slurm-9.0")),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "4"}, None),  # its tasks are workers
        (KUBEFLOW | {"RANK": "0"}, None),  # torchrun has started this one
    ],
)
def test_hosts_that_engines_name(variables: dict[str, str], found: Hosts | None) -> None:
    assert hosts_of(variables) == found


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"TF_CONFIG": "{"}, "TF_CONFIG and what belongs to it make no sense"),
        (tf(index=7, **TWO), "TF_CONFIG and what belongs to it make no sense"),
        (tf(worker=["a", "b"]), "'a' is not host:port; write it like hostA:2222"),
        (
            tf(ps=["a:1"], worker=["b:1"]),
            "TF_CONFIG has a task of type ps: workers hold the weights and evaluate; list only",
        ),
        ({"PET_NNODES": "2"}, "PET_NNODES is set but PET_NODE_RANK is not; the engine sets both: set it too, or unset PET_NNODES"),
        (
            KUBEFLOW | {"PET_NNODES": "1:2"},
            "PET_NNODES=1:2 is a range; set a number, or start torchrun",
        ),
        (KUBEFLOW | {"PET_NODE_RANK": "2"}, r"PET_NNODES and what belongs to it make no sense \(host 2 of 2\); correct or unset them"),
        (SKYPILOT | {"SKYPILOT_NODE_RANK": "x"}, "SKYPILOT_NODE_IPS and what belongs to it make no sense"),
    ],
)
def test_what_makes_no_sense(variables: dict[str, str], message: str) -> None:
    with pytest.raises(WorkerError, match=message):
        hosts_of(variables)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")  # so that what is set is undone
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize(
    ("nodes", "tasks", "trains", "address"),
    [
        ("1", "2", True, "127.0.0.1"),
        ("2", "4", True, "10.0.0.1"),
        ("2", "2", True, None),
        ("2", "2", False, "10.0.0.1"),
        ("1", "1", True, None),
    ],
)
def test_a_task_of_srun(nodes: str, tasks: str, trains: bool, address: str | None, environment: pytest.MonkeyPatch) -> None:
    for name, value in (SRUN | {"SLURM_STEP_NUM_NODES": nodes, "SLURM_STEP_NUM_TASKS": tasks, "SLURM_CPUS_PER_TASK": "1"}).items():
        environment.setenv(name, value)
    take_place(trains=trains)
    assert os.environ.get("MASTER_ADDR") == address
    if address is not None:
        found = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "OMP_NUM_THREADS")]
        assert found == ["1", tasks, "0", "16393", "1"]
