"""`carrywave doctor` under a launcher: real processes, of which one is slow, has another version, hangs, dies, or never comes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "hosts"))
from _namespaces import ADDRESSES, wired

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# Times are made up, so that no verdict depends on how busy the machine is. FAULT is what is wrong with the rank in WHO.
PROGRAM = """
    import os, time
    from carrywave.doctor import examination, host, together

    fault = os.environ.get("FAULT", "")
    own = os.environ.get("RANK") == os.environ.get("WHO", "")
    versions = host.versions

    def step_ms(world):
        if own and fault == "dies":
            os._exit(9)
        if own and fault == "hangs":
            time.sleep(100)
        if own and fault == "fails":
            raise RuntimeError("this device is on fire")
        return 6.0 if own and fault == "slow" else 2.0

    together.step_ms = step_ms
    host.versions = lambda: versions() | ({"torch": "1.0"} if own and fault == "version" else {})
    examination.LONGEST_SECONDS = float(os.environ.get("LONGEST_SECONDS", "120"))

    from carrywave.__main__ import main
    main()
"""


class Launch:
    """Starts workers as a launcher does, and waits for their ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "child.py").write_text(textwrap.dedent(PROGRAM))
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.port = server.getsockname()[1]

    def start(self, rank: int, size: int, *words: str, **variables: str) -> subprocess.Popen[str]:
        place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": self.port}
        known = {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1", "CARRYWAVE_CACHE": str(self.folder)}
        command = [sys.executable, "child.py", "doctor", "--device", "cpu", *words]
        return subprocess.Popen(
            command, cwd=self.folder, env=os.environ | known | variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, ranks: Mapping[int, int] | range, size: int, *words: str, **variables: str) -> list[subprocess.CompletedProcess[str]]:
        return ends([self.start(rank, size, *words, **variables) for rank in ranks])


def ends(processes: list[subprocess.Popen[str]]) -> list[subprocess.CompletedProcess[str]]:
    found = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=200)
            found.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    finally:
        for process in processes:
            process.kill()
    return found


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    return Launch(tmp_path)


def test_a_launch_that_is_well(launch: Launch) -> None:
    first, second = launch.run(range(2), 2, "--json", "report.json")
    assert (first.returncode, second.returncode) == (0, 0), (first, second)
    assert (second.stdout, second.stderr, first.stderr) == ("", "", "")
    assert first.stdout.splitlines()[-1].startswith("all is well")
    known = json.loads((launch.folder / "report.json").read_text())
    assert known["well"]
    assert [worker["rank"] for worker in known["workers"]] == [0, 1]
    assert [speed["rank"] for speed in known["speeds"]] == [0, 1]
    [link] = known["links"]
    assert (link["kind"], link["transport"], link["first"], link["second"]) == ("within a host", "gloo", 0, 1)
    assert link["latency_seconds"] > 0
    assert link["bytes_per_second"] > 0
    assert sorted(path.name for path in launch.folder.iterdir()) == ["child.py", "report.json"]


@pytest.mark.parametrize(
    ("fault", "ranks", "variables", "said"),
    [
        ("slow", 3, {}, "rank 1 on {host} takes 3 times as long as the other workers for an LSTM step"),
        ("version", 2, {}, "torch is 1.0 on rank 1 ({host}), but "),
        ("dies", 2, {}, "rank 1"),
        ("fails", 2, {}, "rank 1 on {host}: this device is on fire"),
        ("hangs", 2, {"LONGEST_SECONDS": "6", "CARRYWAVE_START_SECONDS": "10"}, "did not end within 6 s"),
        ("", 1, {"CARRYWAVE_START_SECONDS": "8"}, "rank 1 of 2 did not show up within 8 s"),
    ],
)
def test_what_is_wrong_is_named_with_its_rank(fault: str, ranks: int, variables: dict[str, str], said: str, launch: Launch) -> None:
    found = launch.run(range(ranks), max(2, ranks), FAULT=fault, WHO="1", NO_COLOR="1", **variables)
    assert found[0].returncode == 1
    assert said.format(host=socket.gethostname()) in "".join(each.stdout + each.stderr for each in found)
    assert "Traceback" not in "".join(each.stderr for each in found)


def test_without_a_launcher_it_starts_workers_of_its_own(launch: Launch) -> None:
    known = {"CARRYWAVE_CACHE": str(launch.folder)}

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "child.py", "doctor", "--device", "cpu", *words]
        return subprocess.run(command, cwd=launch.folder, env=os.environ | known | variables, capture_output=True, text=True, timeout=200)

    two = run("--devices", "2", "--meet", f"127.0.0.1:{launch.port}")
    assert (two.returncode, two.stderr) == (0, ""), two
    assert "link within a host" in two.stdout
    assert f"127.0.0.1:{launch.port} can be reached" in two.stdout
    slow = run("--devices", "2", FAULT="slow", WHO="1")
    assert (slow.returncode, slow.stderr) == (1, ""), slow
    one = run("--devices", "1", "--json", "-")
    assert one.returncode == 0
    assert [worker["rank"] for worker in json.loads(one.stdout)["workers"]] == [0]


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def host(launch: Launch) -> Iterator[Start]:
    """Starts the doctor on one of two hosts: network namespaces with a wire between them, a host name and a hosts file each."""
    with wired("10.99.0.1") as names:

        def start(node: int, *words: str, own: tuple[str, str], **variables: str) -> subprocess.Popen[str]:
            lines = ["127.0.0.1 localhost", f"{own[node]} node{node}", f"{ADDRESSES[1 - node]} node{1 - node}"]
            (launch.folder / f"hosts-{node}").write_text("\n".join(lines) + "\n")
            script = f'mount --bind {launch.folder}/hosts-{node} /etc/hosts && hostname node{node} && exec "$@"'
            command = ["ip", "netns", "exec", names[node], "unshare", "-mu", "sh", "-c", script, "sh", sys.executable, "child.py", "doctor"]
            place = {"RANK": node, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": launch.port}
            known = {} if "TF_CONFIG" in variables else {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "node0"}
            known["CARRYWAVE_CACHE"] = str(launch.folder)
            return subprocess.Popen(
                [*command, "--device", "cpu", *words],
                cwd=launch.folder,
                env=os.environ | known | variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )

        yield start


def on_both(host: Start, *words: str, **how: Any) -> list[subprocess.CompletedProcess[str]]:
    return ends([host(node, *words, **how) for node in range(2)])


def test_two_hosts_that_reach_each_other(host: Start, launch: Launch) -> None:
    first, second = on_both(host, "--json", "report.json", own=ADDRESSES)
    assert (first.returncode, second.returncode) == (0, 0), (first, second)
    known = json.loads((launch.folder / "report.json").read_text())
    [link] = known["links"]
    assert (link["kind"], link["transport"]) == ("between hosts", "gloo")
    assert second.stdout == ""


def test_names_that_lead_home(host: Start) -> None:
    first, second = on_both(host, own=("127.0.1.1", "127.0.1.1"))
    assert (first.returncode, second.returncode) == (1, 1), (first, second)
    for node, each in enumerate((first, second)):
        assert f"carrywave: node{node} resolves its own name to loopback, so that other hosts cannot reach its workers" in each.stderr
    assert "a rendezvous would hang; set GLOO_SOCKET_IFNAME" in first.stdout


def test_hosts_of_a_tensorflow_cluster(host: Start, launch: Launch) -> None:
    """Each host starts its workers; the address in TF_CONFIG says which interface others reach, whatever the host's name leads to."""
    config = {"cluster": {"worker": [f"{address}:{launch.port}" for address in ADDRESSES]}}
    own = ("127.0.1.1", "127.0.1.1")
    hosts = [
        host(node, "--devices", "1", own=own, TF_CONFIG=json.dumps(config | {"task": {"type": "worker", "index": node}}))
        for node in range(2)
    ]
    first, second = ends(hosts)
    assert (first.returncode, second.returncode) == (0, 0), (first, second)
    assert "link between hosts" in first.stdout
    assert second.stdout == ""
