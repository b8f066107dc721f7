"""Ray without Ray: who sits where, what becomes of several ends, one seat with a real worker, and what is refused."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest

from carrywave.errors import WorkerError
from carrywave.launch.engines.ray_cluster import by_node, combined, connected, variables
from carrywave.launch.engines.ray_seat import SeatPlace
from carrywave.launch.exit_reports import Ended


def place(node: str, *gpus: str) -> SeatPlace:
    return SeatPlace(node, f"host-{node}", f"10.0.0.{ord(node)}", f"eth{node}", 20_000 + ord(node), gpus)


def test_seats_of_a_node_are_neighbours() -> None:
    places = [place(node) for node in "babba"]
    assert [places[index].node for index in by_node(places)] == ["b", "b", "b", "a", "a"]
    assert by_node(places) == [0, 2, 3, 1, 4]


def test_variables_on_two_nodes() -> None:
    found = variables([place("a", "0"), place("a", "3"), place("b", "1")])
    assert [each["RANK"] for each in found] == ["0", "1", "2"]
    assert [(each["LOCAL_RANK"], each["LOCAL_WORLD_SIZE"]) for each in found] == [("0", "2"), ("1", "2"), ("0", "1")]
    assert {(each["MASTER_ADDR"], each["MASTER_PORT"], each["WORLD_SIZE"]) for each in found} == {("10.0.0.97", "20097", "3")}
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == ["0,3", "0,3", "1"]
    assert [each["GLOO_SOCKET_IFNAME"] for each in found] == ["etha", "etha", "ethb"]


def test_variables_on_one_node() -> None:
    for own in variables([place("a"), place("a")]):
        assert (own["MASTER_ADDR"], own["GLOO_SOCKET_IFNAME"], own["NCCL_SOCKET_IFNAME"]) == ("127.0.0.1", "lo", "lo")
        assert "CUDA_VISIBLE_DEVICES" not in own


def test_one_end_of_several() -> None:
    killed = Ended(1, "worker 1 was killed", rank=1, died=True)
    lost = Ended(1, "contact was lost", rank=0, died=True, lost=True)
    named = Ended(1, "contact with rank 3 was lost", rank=2, died=True, lost=True, peer=3)
    assert combined([Ended(0), Ended(0)]) == Ended(0)
    assert combined([Ended(75), Ended(75)]) == Ended(75)
    assert combined([Ended(75), Ended(130)]) == Ended(130)
    assert combined([Ended(75), lost, killed]).rank == 1
    assert combined([lost, named]).rank == 2
    assert combined([Ended(143), Ended(75)]) == Ended(143)


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(WorkerError, match=r"--on ray needs Ray, which is not installed; install it with: pip install 'carrywave\[ray\]'"),
        connected("cpu"),
    ):
        pass


def test_the_head_of_a_cluster_that_is_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ray = types.ModuleType("ray")
    ray.is_initialized = lambda: False  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        (tmp_path / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{closed.getsockname()[1]}")
        with (
            pytest.raises(WorkerError, match=r"ray_current_cluster names a Ray cluster at 127\.0\.0\.1:\d+, but nothing answers there"),
            connected("cpu"),
        ):
            pass


def test_a_cluster_that_we_start_listens_on_loopback_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[dict[str, Any]] = []
    ray = types.ModuleType("ray")
    ray.__dict__.update(is_initialized=lambda: False, init=lambda **words: given.append(words), shutdown=lambda: None)
    ray.__dict__.update(cluster_resources=dict)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with connected("cpu"):
        pass
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with connected("cpu"):
        pass
    assert [(words.get("address"), words.get("_node_ip_address")) for words in given] == [("local", "127.0.0.1"), (None, None)]


SEAT = """
    import json, os, sys, threading, time
    from carrywave.launch.engines.ray_seat import Seat

    seat = Seat()
    shown, errors = os.dup(1), os.dup(2)
    sys.excepthook = lambda kind, error, trace: os.write(errors, repr(error).encode())  # descriptor 2 becomes the seat's
    found = []
    variables = {"RANK": "1", "WORLD_SIZE": "2", "PYTHONPATH": os.environ["PYTHONPATH"]}
    thread = threading.Thread(target=lambda: found.append(seat.work(["-c", sys.argv[1]], sys.argv[2], {"launch": "x"}, variables, 2)))
    thread.start()
    told = b""
    while thread.is_alive():
        told += seat.news().get(1, b"")
        if b"ready" in told and sys.argv[3:]:
            seat.stop(*(int(number) for number in sys.argv.pop(3).split(",")))
        time.sleep(0.01)
    told += seat.news().get(1, b"")
    outcome = found[0]
    said = [outcome.ended.code, outcome.ended.message, told.decode(), sorted(outcome.logs)]
    os.write(shown, json.dumps(said).encode())
"""


def seated(tmp_path: Path, program: str, *signals: str, folder: str = ".") -> list[object]:
    import json

    path = tmp_path / "seat.py"
    path.write_text(textwrap.dedent(SEAT))
    source = str(Path(__file__).parents[2] / "src")
    words = [sys.executable, str(path), program, str(tmp_path / folder), *signals]
    ended = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": source}, timeout=60)
    assert ended.returncode == 0, ended.stderr
    found: list[object] = json.loads(ended.stdout)
    return found


def test_a_seat_passes_on_what_its_worker_prints(tmp_path: Path) -> None:
    found = seated(tmp_path, "import os; print('I am', os.environ['RANK'], flush=True)")
    assert found == [0, "", "I am 1\n", ["rank-1.log", "rank-1.out"]]


def test_a_seat_passes_signals_to_its_worker(tmp_path: Path) -> None:
    stops = "import signal, sys, time; signal.signal(10, lambda *_: sys.exit(75)); print('ready', flush=True); time.sleep(60)"
    assert seated(tmp_path, stops, str(int(signal.SIGUSR1)))[0] == 75
    deaf = "import signal, time; signal.signal(15, lambda *_: None); print('ready', flush=True); time.sleep(60); time.sleep(60)"
    assert seated(tmp_path, deaf, "15,9")[0] == 143


def test_a_seat_whose_worker_dies(tmp_path: Path) -> None:
    found = seated(tmp_path, "import os; os.kill(os.getpid(), 9)")
    assert found[:2] == [1, "worker 1 of 2 was killed (signal 9, SIGKILL); if memory ran out, use fewer workers or a smaller batch"]


def test_a_node_without_the_folder(tmp_path: Path) -> None:
    found = seated(tmp_path, "pass", folder="absent")
    assert found[0] == 2
    assert "has no folder" in str(found[1])
    assert "start the run in a folder that all nodes of Ray have" in str(found[1])
