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
from _namespaces import ADDRESSES, Cluster, OnHost, await_
from _starters import SPEC, STARTERS, TRAIN, start, start_on, write_data

import _disturbed_run as disturbed_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PORTS = itertools.count(29800)
STEPS = ["train.max_steps=120"]
LIMITS = {"CARRYWAVE_START_SECONDS": "40"}  # enough for a busy machine to start Python and torch
PATIENT = {"CARRYWAVE_START_SECONDS": "300"}  # of those that wait for somebody who comes back
MANY = ["train.max_steps=1000000", "train.epochs=1000000"]


def rows(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def step_of(run: Path) -> int:
    """The step of the last snapshot."""
    path = run / "snapshots" / "last"
    return int(path.read_text().removeprefix("step-")) if path.is_file() else 0


@pytest.fixture(scope="session")
def calm(namespaces: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two hosts that nothing disturbs."""
    folder = tmp_path_factory.mktemp("calm")
    cluster = Cluster(namespaces, folder)
    hosts = start(cluster, "by hand", "run", next(PORTS), *STEPS)
    assert [host.wait() for host in hosts] == [0, 0], [host.err for host in hosts]
    return folder / "run"


def same_bytes(run: Path, other: Path) -> None:
    ours, theirs = disturbed_run.contents(run), disturbed_run.contents(other)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


def test_two_hosts_have_the_losses_of_one_process(calm: Path, tmp_path: Path) -> None:
    write_data(tmp_path)
    command = [sys.executable, *TRAIN, *SPEC, *STEPS, "--run", "alone"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=300)
    alone, two = rows(tmp_path / "alone"), rows(calm)
    assert [(row["split"], row["step"]) for row in two] == [(row["split"], row["step"]) for row in alone]
    # In float64, only the order of summation differs.
    assert [row["loss"] for row in two] == pytest.approx([row["loss"] for row in alone], rel=1e-10)
    assert json.loads((calm / "plan.json").read_text())["replicas"] == 2


@pytest.mark.parametrize("how", STARTERS)
def test_a_worker_killed_on_one_host_does_not_change_the_answer(how: str, cluster: Cluster, calm: Path) -> None:
    hosts = start(cluster, how, "run", next(PORTS), *STEPS)
    run = cluster.folder / "run"
    await_(lambda: step_of(run) >= 20, "two snapshots", *hosts)
    victim = hosts[1].await_workers()
    os.kill(next(iter(victim.values())), signal.SIGKILL)
    assert [host.wait() for host in hosts] == [0, 0], [host.err for host in hosts]
    same_bytes(run, calm)
    if how != "torchrun":
        for host in hosts:
            assert host.err.count("\n") == 1, host.err
            assert host.err.startswith("carrywave: worker 1 of 2 was killed (signal 9, SIGKILL); restarting from step "), host.err
            assert host.err.endswith("(restart 1 of 3)\n")


def test_a_launcher_that_is_killed_and_started_again_comes_back(cluster: Cluster, calm: Path) -> None:
    port = next(PORTS)
    hosts = start(cluster, "by hand", "run", port, *STEPS, **PATIENT)
    run = cluster.folder / "run"
    await_(lambda: step_of(run) >= 20, "two snapshots", *hosts)
    hosts[1].process.kill()  # its worker notices, and stops in order
    hosts[1].wait()
    again = start_on(cluster, 1, "by hand", "run", port, *STEPS, **PATIENT)
    assert [host.wait() for host in (hosts[0], again)] == [0, 0], [host.err for host in (hosts[0], again)]
    same_bytes(run, calm)
    assert f"carrywave: host 1 (node1:{port}) " in hosts[0].err
    assert "restarting from step" in hosts[0].err


def test_the_first_launcher_too(cluster: Cluster, calm: Path) -> None:
    """The one that holds the store: the others keep the name of the launch, and the run goes on."""
    port = next(PORTS)
    hosts = start(cluster, "by hand", "run", port, *STEPS, **PATIENT)
    run = cluster.folder / "run"
    await_(lambda: step_of(run) >= 20, "two snapshots", *hosts)
    left = hosts[0].await_workers()
    hosts[0].process.kill()
    hosts[0].wait()
    await_(lambda: not any(_alive(pid) for pid in left.values()), "its worker has ended")
    again = start_on(cluster, 0, "by hand", "run", port, *STEPS, **PATIENT)
    assert [host.wait() for host in (again, hosts[1])] == [0, 0], [host.err for host in (again, hosts[1])]
    same_bytes(run, calm)
    assert f"carrywave: contact with host 0 (node0:{port}) was lost; trying to reach it again for up to 300 s\n" in hosts[1].err


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_a_host_that_is_gone_for_good_is_done_without_where_that_is_allowed(cluster: Cluster, calm: Path) -> None:
    hosts = start(cluster, "skypilot", "run", next(PORTS), *STEPS, "--min-devices", "1", **LIMITS)
    run = cluster.folder / "run"
    await_(lambda: step_of(run) >= 20, "two snapshots", *hosts)
    hosts[1].kill()
    assert hosts[0].wait() == 0, hosts[0].err
    assert "did not come back within 40 s; continuing with 1 of 2 workers on 1 of 2 hosts from step" in hosts[0].err
    # The same global batch on one worker: in float64, only the order of summation differs.
    assert [row["loss"] for row in rows(run)] == pytest.approx([row["loss"] for row in rows(calm)], rel=1e-10)


def test_a_first_host_that_is_gone_for_good_ends_the_others(cluster: Cluster) -> None:
    port = next(PORTS)
    hosts = start(cluster, "TF_CONFIG", "run", port, *MANY, **LIMITS)
    await_(lambda: step_of(cluster.folder / "run") >= 10, "a snapshot", *hosts)
    hosts[0].kill()
    assert hosts[1].wait() == 1
    said = hosts[1].err.splitlines()
    assert said[-1].startswith(f"carrywave: chief 0 ({ADDRESSES[0]}:{port}) could not be reached for 40 s; check chief 0"), said
    assert "start every host again with --resume" in said[-1]


def test_a_pulled_cable_ends_both_hosts(cluster: Cluster) -> None:
    port = next(PORTS)
    hosts = start(cluster, "TF_CONFIG", "run", port, *MANY, **LIMITS)
    await_(lambda: step_of(cluster.folder / "run") >= 10, "a snapshot", *hosts)
    cluster.unplug()
    assert [host.wait() for host in hosts] == [1, 1], [host.err for host in hosts]
    said = [host.err.splitlines() for host in hosts]
    assert [len(lines) for lines in said] == [2, 2], said
    assert f"as soon as worker 0 ({ADDRESSES[1]}:{port}) is back, within 40 s" in said[0][0]
    assert f"carrywave: worker 0 ({ADDRESSES[1]}:{port}) did not come back within 40 s; start every host again with --resume" in said[0][1]
    assert said[1][0] == f"carrywave: contact with chief 0 ({ADDRESSES[0]}:{port}) was lost; trying to reach it again for up to 40 s"
    assert f"carrywave: chief 0 ({ADDRESSES[0]}:{port}) could not be reached for 40 s; check chief 0" in said[1][1]


def test_a_cable_that_is_plugged_in_again_in_time(cluster: Cluster, calm: Path) -> None:
    hosts = start(cluster, "kubeflow", "run", next(PORTS), *STEPS, **PATIENT)
    run = cluster.folder / "run"
    await_(lambda: step_of(run) >= 20, "two snapshots", *hosts)
    cluster.unplug()
    await_(lambda: "is back" in hosts[0].err and "trying to reach" in hosts[1].err, "both have noticed", *hosts)
    cluster.plug()
    assert [host.wait() for host in hosts] == [0, 0], [host.err for host in hosts]
    same_bytes(run, calm)


def test_a_request_to_stop_one_host_stops_both(cluster: Cluster, calm: Path) -> None:
    port = next(PORTS)
    hosts: tuple[OnHost, OnHost] = start(cluster, "kubeflow", "run", port, *STEPS)
    run = cluster.folder / "run"
    await_(lambda: step_of(run) >= 20, "two snapshots", *hosts)
    hosts[1].process.terminate()
    assert [host.wait() for host in hosts] == [75, 75], [host.err for host in hosts]
    hosts = start(cluster, "by hand", "run", next(PORTS), *STEPS, "--resume")
    assert [host.wait() for host in hosts] == [0, 0], [host.err for host in hosts]
    same_bytes(run, calm)


def test_a_mistake_is_told_on_both_hosts(cluster: Cluster) -> None:
    hosts = start(cluster, "by hand", "run", next(PORTS), "plan.stages=9")
    assert [host.wait() for host in hosts] == [2, 2]
    for host in hosts:
        assert host.err.count("\n") == 1, host.err
    assert hosts[0].err == hosts[1].err
    assert not (cluster.folder / "run").exists()
