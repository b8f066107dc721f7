"""Two hosts: two network namespaces on one machine, joined by a wire, each with a host name and a hosts file of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Write = Callable[[str, str], str]

pytestmark = pytest.mark.slow

ADDRESSES = ("10.77.0.1", "10.77.0.2")
SAY = """
    import json, os
    from pathlib import Path
    from carrywave.parallel.world import all_gather_text, join, leave

    world = join("cpu")
    said = [[world.rank, world.size, world.local_rank, world.local_size], all_gather_text(world, os.uname().nodename)]
    leave(world)
    Path(f"{world.rank}.json").write_text(json.dumps(said))
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[str, str]]:
    """The names of two network namespaces, with a wire between them."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("needs root, ip and unshare, for network namespaces")
    names = (f"cw{os.getpid()}a", f"cw{os.getpid()}b")
    wires = tuple(f"{name[-8:]}w" for name in names)
    commands = [f"ip netns add {name}" for name in names]
    commands.append(f"ip link add {wires[0]} netns {names[0]} type veth peer name {wires[1]} netns {names[1]}")
    for name, wire, address in zip(names, wires, ADDRESSES, strict=True):
        commands += [f"ip -n {name} addr add {address}/24 dev {wire}", f"ip -n {name} link set {wire} up", f"ip -n {name} link set lo up"]
    try:
        for command in commands:
            made = subprocess.run(command.split(), capture_output=True, text=True)
            if made.returncode:
                pytest.skip(f"network namespaces cannot be made here: {command}: {made.stderr.strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


class Cluster:
    """Runs a command on each of the hosts at once."""

    def __init__(self, hosts: tuple[str, str], folder: Path) -> None:
        self.hosts = hosts
        self.folder = folder
        # Each host knows the other by name; its own name leads to loopback, as on many machines.
        for node in range(2):
            lines = ["127.0.0.1 localhost", f"127.0.1.1 node{node}", f"{ADDRESSES[1 - node]} node{1 - node}"]
            (folder / f"hosts-{node}").write_text("\n".join(lines) + "\n")

    def start(self, node: int, words: list[str], **variables: str) -> subprocess.Popen[str]:
        script = f'mount --bind {self.folder}/hosts-{node} /etc/hosts && hostname node{node} && exec "$@"'
        command = ["ip", "netns", "exec", self.hosts[node], "unshare", "-mu", "sh", "-c", script, "sh", sys.executable, *words]
        return subprocess.Popen(
            command, cwd=self.folder, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, words: Callable[[int], list[str]], variables: Callable[[int], dict[str, str]]) -> list[subprocess.CompletedProcess[str]]:
        processes = [self.start(node, words(node), **variables(node)) for node in range(2)]
        ended = []
        try:
            for process in processes:
                out, err = process.communicate(timeout=180)
                ended.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
        finally:
            for process in processes:
                process.kill()
        return ended

    def said(self, size: int) -> list[list[list[object]]]:
        return [json.loads((self.folder / f"{rank}.json").read_text()) for rank in range(size)]


@pytest.fixture
def cluster(hosts: tuple[str, str], tmp_path: Path) -> Cluster:
    return Cluster(hosts, tmp_path)


def tf_config(node: int, port: int) -> dict[str, str]:
    addresses = [f"{address}:{port}" for address in ADDRESSES]
    task = {"type": "worker", "index": 0} if node else {"type": "chief", "index": 0}
    return {"TF_CONFIG": json.dumps({"cluster": {"chief": addresses[:1], "worker": addresses[1:]}, "task": task})}


START = """
    import os, sys
    from carrywave.launch import tf_config
    from carrywave.launch.launcher import start

    end = start([sys.executable, "say.py"], int(sys.argv[1]), hosts=tf_config.read(os.environ))
    print(end.message, file=sys.stderr)
    sys.exit(end.code)
"""


def test_torchrun_over_two_hosts(cluster: Cluster, write: Write) -> None:
    program = write("say.py", SAY)

    def words(node: int) -> list[str]:
        where = ["--nnodes=2", f"--node-rank={node}", "--nproc-per-node=2", f"--master-addr={ADDRESSES[0]}", "--master-port=29751"]
        return ["-m", "torch.distributed.run", *where, program]

    interfaces = [f"{name[-8:]}w" for name in cluster.hosts]
    ended = cluster.run(words, lambda node: {"GLOO_SOCKET_IFNAME": interfaces[node]})
    assert [host.returncode for host in ended] == [0, 0], ended
    names = ["node0", "node0", "node1", "node1"]
    assert cluster.said(4) == [[[rank, 4, rank % 2, 2], names] for rank in range(4)]


def test_hosts_whose_names_lead_to_loopback_are_refused(cluster: Cluster, write: Write) -> None:
    """Gloo would give the other host an address of its own, and both would wait for minutes."""
    program = write("say.py", SAY)

    def words(node: int) -> list[str]:
        where = ["--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1", f"--master-addr={ADDRESSES[0]}", "--master-port=29757"]
        return ["-m", "torch.distributed.run", *where, program]

    ended = cluster.run(words, lambda node: {})
    for host in ended:
        assert "WorkerError: host node0 resolves its own name to loopback, so other hosts cannot reach its rank 0; set" in host.stderr


def test_tf_config_over_two_hosts_of_unequal_size(cluster: Cluster, write: Write) -> None:
    write("say.py", SAY)
    program = write("start.py", START)
    ended = cluster.run(lambda node: [program, str(2 - node)], lambda node: tf_config(node, 29752))
    assert [host.returncode for host in ended] == [0, 0], ended
    names = ["node0", "node0", "node1"]
    assert cluster.said(3) == [[[0, 3, 0, 2], names], [[1, 3, 1, 2], names], [[2, 3, 0, 1], names]]


def test_a_host_that_stays_away_is_named(cluster: Cluster, write: Write) -> None:
    program = write("start.py", START)
    process = cluster.start(0, [program, "1"], CARRYWAVE_START_SECONDS="1", **tf_config(0, 29753))
    _, err = process.communicate(timeout=60)
    assert "worker 0 (10.77.0.2:29753) did not show up within 1 s; start it there too" in err


def test_a_failure_ends_both_hosts(cluster: Cluster, write: Write) -> None:
    text = textwrap.dedent(SAY).replace("leave(world)", "world.rank and os._exit(7)\nexchange(world, '')")
    write("say.py", text.replace("import json, os", "import json, os, sys\nsys.excepthook = lambda *_: None"))
    program = write("start.py", START)
    ended = cluster.run(lambda node: [program, "1"], lambda node: tf_config(node, 29754))
    assert ended[1].returncode == 7
    assert "worker 1 of 2 exited with code 7" in ended[1].stderr
    assert ended[0].returncode == 1


def test_train_over_two_hosts(cluster: Cluster) -> None:
    words = ["-m", "carrywave", "train", "--device", "cpu", "--run", "run", "model.hidden=8", "model.layers=1", "train.epochs=1"]
    words += ["batch.lanes=4", "batch.steps=8", "train.max_steps=4"]
    ended = cluster.run(lambda node: words, lambda node: tf_config(node, 29755))
    assert [host.returncode for host in ended] == [0, 0], ended
    assert "run: 4 steps" in ended[0].stdout
    assert ended[1].stdout == ""
    assert [host.stderr for host in ended] == ["", ""]  # none of what torch logs of names that lead nowhere


def test_a_link_that_fails_is_told_on_both_hosts(cluster: Cluster) -> None:
    words = ["-m", "carrywave", "train", "--device", "cpu", "--run", "run", "model.hidden=8", "model.layers=1", "train.epochs=1000"]
    words += ["batch.lanes=4", "batch.steps=8", "train.snapshot_every=5"]
    limits = {"CARRYWAVE_HEARTBEAT_SECONDS": "4"}
    hosts = [cluster.start(node, words, **limits, **tf_config(node, 29756)) for node in range(2)]
    wire = f"{cluster.hosts[0][-8:]}w"
    try:
        deadline = time.monotonic() + 120
        while not (cluster.folder / "run" / "snapshots" / "last").is_file() and time.monotonic() < deadline:
            time.sleep(0.1)
        subprocess.run(["ip", "-n", cluster.hosts[0], "link", "set", wire, "down"], check=True)
        said = [host.communicate(timeout=120)[1] for host in hosts]
    finally:
        subprocess.run(["ip", "-n", cluster.hosts[0], "link", "set", wire, "up"], check=True)
        for host in hosts:
            host.kill()
    assert [host.returncode for host in hosts] == [1, 1]
    for node, text in enumerate(said):
        assert text.count("\n") == 1, text
        assert re.search(r"^carrywave: .* gave no sign of life for \d+ s, since \d\d:\d\d:\d\d \(stopped or unreachable\?\); ", text)
        name = ("worker 0", "chief 0")[node]
        assert f"; check {ADDRESSES[1 - node]}:29756 ({name}): if it has ended, its output says why; " in text
        assert "then start every host again with --resume" in text
    assert "carrywave: rank 1 on node1 gave no sign of life" in said[0]
