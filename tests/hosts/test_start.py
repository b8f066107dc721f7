"""How workers on two hosts find each other, and what is said if they cannot."""

from __future__ import annotations

import itertools
import json
import textwrap
from collections.abc import Callable

import pytest
from _namespaces import ADDRESSES, Cluster
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
    from carrywave.launch.elastic import start_on_hosts
    from carrywave.launch.hosts import hosts_of

    end = start_on_hosts([sys.executable, "say.py"], int(sys.argv[1]), hosts_of(os.environ), 0, print)
    print(end.message, file=sys.stderr)
    sys.exit(end.code)
"""


def write(cluster: Cluster, name: str, text: str) -> str:
    (cluster.folder / name).write_text(textwrap.dedent(text))
    return name


def said(cluster: Cluster, size: int) -> list[list[list[object]]]:
    return [json.loads((cluster.folder / f"{rank}.json").read_text()) for rank in range(size)]


def test_torchrun_over_two_hosts_whose_names_lead_to_loopback(homely: Cluster) -> None:
    """Gloo would give the other host an address of its own, and both would wait for minutes."""
    write(homely, "say.py", SAY)
    where = ["--nnodes=2", f"--master-addr={ADDRESSES[0]}", f"--master-port={next(PORTS)}", "--nproc-per-node=2"]
    hosts = homely.both(lambda node: ["-m", "torch.distributed.run", *where, f"--node-rank={node}", "say.py"], lambda node: {})
    assert [host.wait() for host in hosts] == [0, 0], [host.err for host in hosts]
    names = ["node0", "node0", "node1", "node1"]
    assert said(homely, 4) == [[[rank, 4, rank % 2, 2], names] for rank in range(4)]


@pytest.mark.parametrize("engine", [tf_config, kubeflow])
def test_hosts_of_unequal_size(engine: Callable[[int, int], dict[str, str]], cluster: Cluster) -> None:
    write(cluster, "say.py", SAY)
    program, port = write(cluster, "start.py", START), next(PORTS)
    hosts = cluster.both(lambda node: [program, str(2 - node)], lambda node: engine(node, port))
    assert [host.wait() for host in hosts] == [0, 0], [host.err for host in hosts]
    names = ["node0", "node0", "node1"]
    assert said(cluster, 3) == [[[0, 3, 0, 2], names], [[1, 3, 1, 2], names], [[2, 3, 0, 1], names]]


def test_a_host_that_stays_away_is_named(homely: Cluster) -> None:
    program, port = write(homely, "start.py", START), next(PORTS)
    host = homely.start(0, [program, "1"], CARRYWAVE_START_SECONDS="1", **tf_config(0, port))
    assert host.wait() == 2
    remedy = "start this command there too (to wait longer, set CARRYWAVE_START_SECONDS)"
    assert host.err.endswith(f"host 1 of 2 was not at {ADDRESSES[0]}:{port} within 1 s; {remedy}\n")


def test_a_failure_ends_both_hosts(homely: Cluster) -> None:
    text = textwrap.dedent(SAY).replace("leave(world)", "world.rank and os._exit(7)\nexchange(world, '')")
    write(homely, "say.py", text.replace("import json, os", "import json, os, sys\nsys.excepthook = lambda *_: None"))
    program, port = write(homely, "start.py", START), next(PORTS)
    hosts = homely.both(lambda node: [program, "1"], lambda node: tf_config(node, port))
    assert [host.wait() for host in hosts] == [1, 7], [host.err for host in hosts]
    assert "worker 1 of 2 exited with code 7" in hosts[1].err


def test_who_is_where_is_told(homely: Cluster) -> None:
    """Two replicas of two stages: each host has one."""
    small = ["model.hidden=8", "model.layers=2", "train.epochs=1", "batch.lanes=4", "batch.steps=8", "train.max_steps=2"]
    words = [*TRAIN, "--run", "run", "--devices", "2", *small, "plan.stages=2", "data.train=text.txt"]
    (homely.folder / "text.txt").write_text("the carry is passed along. " * 20)
    port = next(PORTS)
    hosts = homely.both(lambda node: words, lambda node: tf_config(node, port))
    assert [host.wait() for host in hosts] == [0, 0], [host.err for host in hosts]
    assert [host.err for host in hosts] == ["", ""]  # none of what torch logs of names that lead nowhere
    assert "run: 2 steps" in hosts[0].out
    assert hosts[1].out == ""
    assert "hosts     node0: replica 0: stages 0-1 on ranks 0-1\n" in hosts[0].out
    assert "          node1: replica 1: stages 0-1 on ranks 2-3\n" in hosts[0].out
