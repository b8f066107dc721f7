"""Where a process is: what each engine says, and what is refused because it contradicts itself or another one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import carrywave
from carrywave.errors import WorkerError
from carrywave.launch.engines.hosts import Hosts
from carrywave.launch.engines.surroundings import Surroundings, find, jobs

TF = {"TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}})}
PET = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-0.job",
    "PET_MASTER_PORT": "29400",
}
SKY = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
WORKER = {"RANK": "0", "WORLD_SIZE": "4"}


def test_a_process_alone() -> None:
    assert find({}) == Surroundings()


def test_a_worker_is_a_worker_whatever_else_is_set() -> None:
    """torchrun may itself run in a pod or on a node whose variables its workers inherit."""
    assert find(WORKER | TF | PET | SKY).is_worker
    assert find(WORKER | TF | PET | SKY).hosts is None


def test_our_own_workers_repeat_the_command_of_their_launcher() -> None:
    assert find(WORKER | {"CARRYWAVE_WORKER": "x"}, "a,b", 0).is_worker
    with pytest.raises(WorkerError, match="a launcher has already started this worker"):
        find(WORKER, "a,b", 0)


def test_nodes_of_kubeflow() -> None:
    found = find(PET).hosts
    assert found == Hosts(("job-0.job:29400", ""), ("node 0", "node 1"), 1, "PET_NNODES", 4)
    assert found.meeting == ("job-0.job", 29400)
    assert found.own_host == ""
    assert (found.who(0), found.who(1)) == ("node 0 (job-0.job:29400)", "node 1")
    assert find(PET).workers == 4
    assert find(PET | {"PET_NPROC_PER_NODE": "auto"}).workers is None


@pytest.mark.parametrize("environment", [{"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2"}, {"PET_NPROC_PER_NODE": "2"}])
def test_a_single_node_has_as_many_workers_as_it_is_given(environment: dict[str, str]) -> None:
    found = find(environment)
    assert (found.hosts, found.workers) == (None, 2)


def test_nodes_of_skypilot() -> None:
    found = find(SKY).hosts
    assert found == Hosts(("10.0.0.1:29500", "10.0.0.2:29500"), ("node 0", "node 1"), 1, "SKYPILOT_NODE_IPS", 8)
    assert found.own_host == "10.0.0.2"
    assert find(SKY | {"CARRYWAVE_PORT": "4000"}).hosts == Hosts(
        ("10.0.0.1:4000", "10.0.0.2:4000"), ("node 0", "node 1"), 1, "SKYPILOT_NODE_IPS", 8
    )
    assert find(SKY | {"SKYPILOT_NUM_GPUS_PER_NODE": "0"}).workers is None
    alone = find({"SKYPILOT_NODE_IPS": "10.0.0.1", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_GPUS_PER_NODE": "2"})
    assert (alone.hosts, alone.workers) == (None, 2)
    assert jobs({"SKYPILOT_TASK_ID": "sky-7"}) == ["skypilot sky-7"]
    assert jobs({}) == []


def test_hosts_named_by_hand() -> None:
    found = find({}, "a:4000, b,10.0.0.3:5", 2).hosts
    assert found == Hosts(("a:4000", "b:4000", "10.0.0.3:5"), ("host 0", "host 1", "host 2"), 2, "--hosts")
    assert find({}, "fd00::1,[fd00::2]:7", 0).hosts == Hosts(("[fd00::1]:29500", "[fd00::2]:7"), ("host 0", "host 1"), 0, "--hosts")
    assert find({}, "a", 0) == Surroundings("--hosts")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (TF | PET, "TF_CONFIG and Kubeflow .* both say which hosts train together; keep one"),
        (TF | SKY, "TF_CONFIG and SkyPilot both say"),
        (PET | SKY, "Kubeflow .* and SkyPilot both say"),
        (
            {name: text for name, text in PET.items() if name != "PET_NODE_RANK"},
            "PET_NNODES is set but PET_NODE_RANK is not; Kubeflow",
        ),
        ({name: text for name, text in PET.items() if name != "PET_NNODES"}, "PET_NODE_RANK is set but PET_NNODES is not"),
        ({name: text for name, text in PET.items() if name != "PET_MASTER_ADDR"}, "PET_NNODES is set but PET_MASTER_ADDR is not"),
        (PET | {"PET_NNODES": "1:2"}, "PET_NNODES=1:2 is a range, which needs torchrun's own rendezvous; start torchrun"),
        (PET | {"PET_NODE_RANK": "2"}, "PET_NODE_RANK=2 is out of range for PET_NNODES=2"),
        (PET | {"PET_NODE_RANK": "-1"}, "PET_NODE_RANK=-1 is not a whole number"),
        (PET | {"PET_MASTER_PORT": "70000"}, "PET_MASTER_PORT=70000 is not a whole number from 1 to 65535"),
        (PET | {"PET_NPROC_PER_NODE": "many"}, "PET_NPROC_PER_NODE=many is not a whole number"),
        ({"SKYPILOT_NODE_IPS": "10.0.0.1"}, "SKYPILOT_NODE_IPS is set but SKYPILOT_NODE_RANK is not; SkyPilot sets both"),
        ({"SKYPILOT_NODE_RANK": "0"}, "SKYPILOT_NODE_RANK is set but SKYPILOT_NODE_IPS is not"),
        (SKY | {"SKYPILOT_NODE_RANK": "2"}, "SKYPILOT_NODE_RANK=2 is out of range for SKYPILOT_NODE_IPS, which lists 2"),
        (SKY | {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.1"}, "SKYPILOT_NODE_IPS names 10.0.0.1 twice"),
        (SKY | {"CARRYWAVE_PORT": "x"}, "CARRYWAVE_PORT=x is not a whole number"),
    ],
)
def test_what_is_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(WorkerError, match=message) as raised:
        find(environment)
    assert "\n" not in str(raised.value)
    assert ";" in str(raised.value)


@pytest.mark.parametrize(
    ("names", "index", "message"),
    [
        (None, 0, "--host-index is 0, but no hosts are named; name all"),
        ("a,b", None, "--hosts names 2 hosts, but not which one this is; pass --host-index, from 0 to 1"),
        ("a,b", 2, "--host-index 2 is out of range for 2 hosts"),
        ("a,b", -1, "--host-index -1 is out of range"),
        ("a,,b", 0, "--hosts has an empty name"),
        ("a,a", 0, "--hosts names a twice"),
        ("a:b", 0, "--hosts: 'a:b' is not host:port"),
    ],
)
def test_what_is_refused_by_hand(names: str | None, index: int | None, message: str) -> None:
    with pytest.raises(WorkerError, match=message):
        find({}, names, index)


def test_hosts_by_hand_and_by_an_engine_contradict_each_other() -> None:
    with pytest.raises(WorkerError, match="SkyPilot and --hosts both say which hosts train together"):
        find(SKY, "a,b", 0)


def test_no_other_module_reads_the_variables_of_an_engine() -> None:
    reads = re.compile(r"environ(ment)?(\.get\(|\[)\"(PET_|SKYPILOT_|TF_CONFIG)|\"(PET_|SKYPILOT_|TF_CONFIG)\w*\" in (os\.)?environ")
    root = Path(carrywave.__file__).parent
    found = [path.name for path in root.rglob("*.py") if reads.search(path.read_text(encoding="utf-8"))]
    assert found == ["tf_config.py"]  # the others name their variables once, at the top of their files
