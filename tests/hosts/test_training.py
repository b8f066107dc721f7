"""The same spec on two hosts, however they were started: the losses of one process, and the same bytes when something dies on the way."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from _namespaces import ADDRESSES, Cluster, await_
from _starters import SPEC, STARTERS, TRAIN, start, start_on

from _disturbed_run import contents

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PORTS = itertools.count(29800)
STEPS = ["train.max_steps=120"]
MANY = ["train.max_steps=1000000", "train.epochs=1000000"]
LIMITS = {"CARRYWAVE_START_SECONDS": "60"}  # enough for a busy machine to start Python and torch
PATIENT = {"CARRYWAVE_START_SECONDS": "300"}  # of those that wait for somebody who comes back


def rows(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def step_of(run: Path) -> int:
    """The step of the last snapshot."""
    path = run / "snapshots" / "last"
    return int(path.read_text().removeprefix("step-")) if path.is_file() else 0


@pytest.fixture(scope="session")
def calm(namespaces: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two hosts that nothing disturbs."""
    cluster = Cluster(namespaces, tmp_path_factory.mktemp("calm"))
    hosts = start(cluster, "TF_CONFIG", next(PORTS), *STEPS)
    assert [host.wait() for host in hosts] == [0, 0], [host.err for host in hosts]
    return cluster.folder / "run"


def test_two_hosts_have_the_losses_of_one_process(calm: Path) -> None:
    command = [sys.executable, *TRAIN, *SPEC, *STEPS, "plan.replicas=1", "--run", "alone"]
    subprocess.run(command, cwd=calm.parent, check=True, capture_output=True, timeout=600)
    alone, two = rows(calm.parent / "alone"), rows(calm)
    assert [(row["split"], row["step"]) for row in two] == [(row["split"], row["step"]) for row in alone]
    # In float64, only the order of summation differs.
    assert [row["loss"] for row in two] == pytest.approx([row["loss"] for row in alone], rel=1e-10)
    assert json.loads((calm / "plan.json").read_text())["replicas"] == 2


@pytest.mark.parametrize("how", STARTERS)
def test_a_worker_killed_on_one_host_does_not_change_the_answer(how: str, cluster: Cluster, calm: Path) -> None:
    hosts = start(cluster, how, next(PORTS), *STEPS, **LIMITS)
    run = cluster.folder / "run"
    await_(lambda: step_of(run) >= 20, "two snapshots", *hosts)
    os.kill(next(iter(hosts[1].await_workers().values())), signal.SIGKILL)
    assert [host.wait() for host in hosts] == [0, 0], [host.err for host in hosts]
    assert contents(run) == contents(calm)
    if how != "torchrun":
        assert "was killed (signal 9, SIGKILL); restarting" in hosts[1].err
        assert all(host.err.count("\n") == 1 for host in hosts), [host.err for host in hosts]


def test_a_host_that_is_started_again_comes_back(cluster: Cluster, calm: Path) -> None:
    port = next(PORTS)
    hosts = start(cluster, "TF_CONFIG", port, *STEPS, **PATIENT)
    run = cluster.folder / "run"
    await_(lambda: step_of(run) >= 20, "two snapshots", *hosts)
    hosts[1].kill()
    again = start_on(cluster, 1, "TF_CONFIG", port, *STEPS, **PATIENT)
    assert [host.wait() for host in (hosts[0], again)] == [0, 0], [host.err for host in (hosts[0], again)]
    assert contents(run) == contents(calm)


def test_a_first_host_that_is_gone_ends_the_others(cluster: Cluster) -> None:
    port = next(PORTS)
    hosts = start(cluster, "TF_CONFIG", port, *MANY, **LIMITS)
    await_(lambda: step_of(cluster.folder / "run") >= 10, "a snapshot", *hosts)
    hosts[0].kill()
    assert hosts[1].wait() == 1
    assert f"contact with the first host ({ADDRESSES[0]}:{port}) was lost; start every host again with --resume" in hosts[1].err


def test_a_pulled_cable_ends_both_hosts(cluster: Cluster) -> None:
    hosts = start(cluster, "TF_CONFIG", next(PORTS), *MANY, **LIMITS)
    await_(lambda: step_of(cluster.folder / "run") >= 10, "a snapshot", *hosts)
    cluster.unplug()
    assert [host.wait() for host in hosts] == [1, 1], [host.err for host in hosts]
    assert "worker 1 of 2 on node1 gave no sign of life" in hosts[0].err
    assert "contact with the first host" in hosts[1].err


def test_a_request_to_stop_one_host_stops_both(cluster: Cluster, calm: Path) -> None:
    hosts = start(cluster, "kubeflow", next(PORTS), *STEPS, **LIMITS)
    run = cluster.folder / "run"
    await_(lambda: step_of(run) >= 20, "two snapshots", *hosts)
    hosts[1].process.terminate()
    assert [host.wait() for host in hosts] == [75, 75], [host.err for host in hosts]
    hosts = start(cluster, "TF_CONFIG", next(PORTS), *STEPS, "--resume", **LIMITS)
    assert [host.wait() for host in hosts] == [0, 0], [host.err for host in hosts]
    assert contents(run) == contents(calm)


def test_a_mistake_is_told_on_both_hosts(cluster: Cluster) -> None:
    hosts = start(cluster, "TF_CONFIG", next(PORTS), "plan.stages=9")
    assert [host.wait() for host in hosts] == [2, 2]
    assert hosts[0].err == hosts[1].err
    assert hosts[0].err.count("\n") == 1, hosts[0].err
    assert not (cluster.folder / "run").exists()
