"""How workers on two hosts find each other, and what is said if they cannot."""

from __future__ import annotations

import itertools
import json
import textwrap
from collections.abc import Callable

import pytest
from _namespaces import ADDRESSES, Cluster, OnHost, wire
from _starters import TRAIN, kubeflow, tf_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PORTS = itertools.count(29700)
SAY = """
    import json, os
    from pathlib import Path
    from carrywave.parallel.world import all_gather_text, join, leave

    world = join("cpu")
    said = [[world.rank, world.size, world.local_rank, world.local_size], all_gather_text(world, os.uname().nodename)]
    assert list(world.hosts) == said[1]
    leave(world)
    Path(f"{world.rank}.json").write_text(json.dumps(said))
"""
START = """
    import os, sys
    from carrywave.launch.launcher import start
    from carrywave.launch.engines.surroundings import find

    end = start([sys.executable, "say.py"], int(sys.argv[1]), hosts=find(os.environ).hosts)
    print(end.message, file=sys.stderr)
    sys.exit(end.code)
"""


def write(cluster: Cluster, name: str, text: str) -> str:
    (cluster.folder / name).write_text(textwrap.dedent(text))
    return name


def said(cluster: Cluster, size: int) -> list[list[list[object]]]:
    return [json.loads((cluster.folder / f"{rank}.json").read_text()) for rank in range(size)]


def torchrun(cluster: Cluster, workers: int, port: int, variables: Callable[[int], dict[str, str]]) -> tuple[OnHost, OnHost]:
    write(cluster, "say.py", SAY)

    def words(node: int) -> list[str]:
        where = ["--nnodes=2", f"--node-rank={node}", f"--master-addr={ADDRESSES[0]}", f"--master-port={port}"]
        return ["-m", "torch.distributed.run", *where, f"--nproc-per-node={workers}", "say.py"]

    return cluster.both(words, variables)


def test_torchrun_over_two_hosts(homely: Cluster) -> None:
    hosts = torchrun(homely, 2, next(PORTS), lambda node: {"GLOO_SOCKET_IFNAME": wire(homely.namespaces[node])})
    assert [host.wait() for host in hosts] == [0, 0], [host.err for host in hosts]
    names = ["node0", "node0", "node1", "node1"]
    assert said(homely, 4) == [[[rank, 4, rank % 2, 2], names] for rank in range(4)]


def test_hosts_whose_names_lead_to_loopback_are_refused(homely: Cluster) -> None:
    """Gloo would give the other host an address of its own, and both would wait for minutes."""
    for host in torchrun(homely, 1, next(PORTS), lambda node: {}):
        host.wait()
        assert "WorkerError: host node0 resolves its own name to loopback, so other hosts cannot reach its rank 0; set" in host.err


@pytest.mark.parametrize("engine", [tf_config, kubeflow])
def test_hosts_of_unequal_size_whose_names_lead_to_loopback(engine: Callable[[int, int], dict[str, str]], homely: Cluster) -> None:
    """The interface is found by the way to the other host, even where the engine names only the first."""
    write(homely, "say.py", SAY)
    program, port = write(homely, "start.py", START), next(PORTS)
    hosts = homely.both(lambda node: [program, str(2 - node)], lambda node: engine(node, port))
    assert [host.wait() for host in hosts] == [0, 0], [host.err for host in hosts]
    names = ["node0", "node0", "node1"]
    assert said(homely, 3) == [[[0, 3, 0, 2], names], [[1, 3, 1, 2], names], [[2, 3, 0, 1], names]]


def test_a_host_that_stays_away_is_named(homely: Cluster) -> None:
    program, port = write(homely, "start.py", START), next(PORTS)
    host = homely.start(0, [program, "1"], CARRYWAVE_START_SECONDS="1", **tf_config(0, port))
    assert host.wait() == 2
    remedy = "start it there too (to wait longer, set CARRYWAVE_START_SECONDS)"
    assert host.err == f"worker 0 (10.77.0.2:{port}) did not show up within 1 s; {remedy}\n"


def test_a_failure_ends_both_hosts(homely: Cluster) -> None:
    text = textwrap.dedent(SAY).replace("leave(world)", "world.rank and os._exit(7)\nexchange(world, '')")
    write(homely, "say.py", text.replace("import json, os", "import json, os, sys\nsys.excepthook = lambda *_: None"))
    program, port = write(homely, "start.py", START), next(PORTS)
    hosts = homely.both(lambda node: [program, "1"], lambda node: tf_config(node, port))
    assert [host.wait() for host in hosts] == [7, 7], [host.err for host in hosts]
    for host in hosts:
        assert "worker 1 of 2 exited with code 7" in host.err


def test_who_sits_where_is_told(homely: Cluster) -> None:
    """Two replicas of two stages: each host has one."""
    words = [
        *TRAIN,
        "--run",
        "run",
        "--devices",
        "2",
        "model.hidden=8",
        "model.layers=2",
        "train.epochs=1",
        "batch.lanes=4",
        "batch.steps=8",
    ]
    words += ["train.max_steps=2", "plan.stages=2", "data.train=text.txt"]
    (homely.folder / "text.txt").write_text("the carry is passed along. " * 20)
    port = next(PORTS)
    hosts = homely.both(lambda node: words, lambda node: tf_config(node, port))
    assert [host.wait() for host in hosts] == [0, 0], [host.err for host in hosts]
    assert [host.err for host in hosts] == ["", ""]  # none of what torch logs of names that lead nowhere
    assert "run: 2 steps" in hosts[0].out
    assert hosts[1].out == ""
    assert "hosts     node0: ranks 0-1 (local 0-1): replica 0, stages 0-1\n" in hosts[0].out
    assert "          node1: ranks 2-3 (local 0-1): replica 1, stages 0-1\n" in hosts[0].out
    seats = json.loads((homely.folder / "run" / "plan.json").read_text())["workers"]
    assert seats[2] == {"rank": 2, "host": "node1", "local_rank": 0, "replica": 1, "stage": 0}
