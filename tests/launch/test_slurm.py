"""srun's variables as hosts or as workers, lists of nodes, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from carrywave.errors import WorkerError
from carrywave.launch.engines import slurm
from carrywave.launch.engines.slurm import doubt, expand, read, worker


def step(nodes: str, tasks: str, node: int = 0, local: int = 0, **more: Any) -> dict[str, str]:
    """The environment of a task under srun."""
    size = sum(slurm._tasks_per_node(tasks))
    known = {
        "SLURM_JOB_ID": 1000,
        "SLURM_STEP_ID": 0,
        "SLURM_PROCID": 0,
        "SLURM_STEP_NUM_TASKS": size,
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_NODEID": node,
        "SLURM_LOCALID": local,
        "SLURM_CPUS_PER_TASK": 3,
    } | more
    return {name: str(value) for name, value in known.items()}


def same(name: str) -> str:
    return name


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "interface_of", {"b": "eth7"}.get)


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        ("n1", ["n1"]),
        ("n1,n3", ["n1", "n3"]),
        ("n[1-3,7],m01", ["n1", "n2", "n3", "n7", "m01"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[1,003]", ["n1", "n003"]),
        ("r[1-2]n[1-2]-ib,gpu-a", ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib", "gpu-a"]),
    ],
)
def test_lists_of_nodes(listed: str, names: list[str]) -> None:
    assert expand(listed) == names


@pytest.mark.parametrize(
    "listed", ["", ",", "n[1-", "n]1", "n[a-b]", "n[3-1]", "n[]", "n[1-2[3]]", "n[0-99999]", "n[1-400]m[1-400]", "n[1-²]"]
)
def test_what_is_no_list_of_nodes(listed: str) -> None:
    with pytest.raises(WorkerError, match=r"is not a list of Slurm nodes such as n\[1-3,7\]; start the workers with srun"):
        expand(listed)


def test_one_task_a_node_is_a_host() -> None:
    found = read(step("n[1-3]", "1(x3)", node=2), address_of=same)
    assert found is not None
    assert found.node == 2
    assert found.names == ("node n1", "node n2", "node n3")
    assert found.meeting == ("n1", slurm.FIRST_PORT + 1000)
    assert found.own_host == "n3"


def test_several_tasks_a_node_are_workers() -> None:
    environment = step("n[1-2]", "2,3", node=1, local=1)
    assert read(environment, address_of=same) is None
    assert worker(environment, address_of=same) == {
        "RANK": "3",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": str(slurm.FIRST_PORT + 1000),
        "OMP_NUM_THREADS": "3",
        "CARRYWAVE_JOB": "slurm 1000.0",
    }


def test_ranks_follow_the_nodes_however_srun_deals_the_tasks() -> None:
    """With --distribution=cyclic, task 1 is on the second node."""
    dealt = [(0, 0), (1, 0), (0, 1), (1, 1)]
    found = [worker(step("a,b", "2(x2)", node, local, SLURM_PROCID=number), same) for number, (node, local) in enumerate(dealt)]
    assert [each["RANK"] for each in found] == ["0", "2", "1", "3"]
    assert [each.get("GLOO_SOCKET_IFNAME") for each in found] == [None, "eth7", None, "eth7"]


def test_tasks_of_one_node_stay_on_loopback() -> None:
    found = worker(step("n1", "2", local=1), address_of=same)
    assert [found[name] for name in ("MASTER_ADDR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "RANK")] == ["127.0.0.1", "lo", "lo", "1"]


def test_what_the_user_has_set_stays() -> None:
    own = {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "7"}
    found = worker(step("n[1-2]", "2(x2)", **own), address_of=same)
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.9", "29500")
    assert "OMP_NUM_THREADS" not in found
    hosts = read(step("n[1-2]", "1(x2)", node=1, **own), address_of=same)
    assert hosts is not None
    assert hosts.meeting == ("10.0.0.9", 29500)


def test_cores_are_dealt_out_unless_tasks_are_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = step("n1", "4", SLURM_CPUS_ON_NODE=16)
    del environment["SLURM_CPUS_PER_TASK"]
    for mine, threads in ((64, "4"), (16, "4"), (2, "2")):
        monkeypatch.setattr(slurm, "cores", lambda mine=mine: mine)
        assert worker(environment)["OMP_NUM_THREADS"] == threads


def test_jobs_and_steps_have_ports_of_their_own() -> None:
    ports = {slurm.task(step("a,b", "1(x2)", SLURM_JOB_ID=job, SLURM_STEP_ID=number)).port for job in range(60) for number in range(2)}  # type: ignore[union-attr]
    assert len(ports) == 120
    assert all(slurm.FIRST_PORT <= port < 32768 for port in ports)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # a batch script
        step("n1", "1"),
    ],
)
def test_alone(environment: dict[str, str]) -> None:
    assert read(environment) is None
    assert worker(environment) == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, "Slurm's variables contradict each other: 4 tasks, .* on the nodes n.1-2."),
        ({"SLURM_NODEID": "2"}, "contradict each other: .* task 0 of node 2; start the workers with srun"),
        ({"SLURM_LOCALID": "2"}, "contradict each other: .* task 2 of node 0"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x"}, r"SLURM_TASKS_PER_NODE=2\(x is not a list such as 2\(x3\),1"),
        ({"SLURM_LOCALID": "one"}, "SLURM_LOCALID=one is not a whole number"),
        ({"SLURM_NODEID": ""}, "SLURM_STEP_ID is set but SLURM_NODEID is not; start the workers with srun"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT=x is not a whole number"),
    ],
)
def test_what_cannot_be(change: dict[str, str], message: str) -> None:
    with pytest.raises(WorkerError, match=message):
        worker(step("n[1-2]", "2(x2)") | change, address_of=same)


def test_a_node_whose_name_is_not_in_the_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Slurm's names of nodes need not be host names; then Slurm knows the address."""
    tool = tmp_path / "scontrol"
    tool.write_text('#!/bin/sh\necho "NodeName=$3 Arch=x"\necho "   NodeAddr=10.1.2.3 NodeHostName=real"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    def unknown(*_: Any) -> Any:
        raise OSError("unknown")

    monkeypatch.setattr(slurm.socket, "getaddrinfo", unknown)
    assert slurm._address_of("n7") == "10.1.2.3"
    tool.unlink()
    assert slurm._address_of("n7") == "n7"


def test_a_job_of_which_one_node_is_used_is_told() -> None:
    batch = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "8"}
    assert (
        doubt(batch) == "this Slurm job has 2 nodes, but this command runs once, on the first node; put srun in front of it to use them all"
    )
    assert "has 8 tasks" in str(doubt(batch | {"SLURM_JOB_NUM_NODES": "1"}))
    assert doubt(batch | {"SLURM_STEP_ID": "0"}) is None
    assert doubt({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}) is None
    assert doubt({}) is None
