"""Looking at this machine for real: disks, ports, the meeting in a store, and the guard that ends what hangs. One process, or threads."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from carrywave.doctor import disk, gpu, network, worker
from carrywave.doctor.disk import Disk
from carrywave.doctor.examination import place_here
from carrywave.doctor.host import Host
from carrywave.doctor.links import MeasuredLink
from carrywave.doctor.meeting import Guard, Meeting
from carrywave.doctor.network import Listener, Network, Target
from carrywave.doctor.profile import completed, name_of
from carrywave.doctor.worker import Place
from carrywave.errors import WorkerError
from carrywave.plan.profile import Profile
from carrywave.train.start.machine import empty


def test_a_trial_of_a_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    found = disk.look("run folder", tmp_path / "not" / "yet", seconds=0.05)
    assert found.error == ""
    assert found.free_bytes > 0
    assert found.bytes_per_second > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert disk.look("cache", tmp_path).error == "Permission denied"


def test_a_disk_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    assert disk.look("cache", tmp_path) == Disk("cache", str(tmp_path), error="No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_a_token_is_seen_where_the_folder_is_shared(tmp_path: Path) -> None:
    token = disk.leave_token(tmp_path / "runs", "x")
    assert token is not None
    assert disk.sees_token(token)
    token.unlink()
    assert not disk.sees_token(token, seconds=0)


def test_a_listener_is_reached_until_it_closes() -> None:
    known = Network("a", ("127.0.0.1",), {"lo": ("127.0.0.1",)})
    listener = Listener(known)
    target = Target("a", 3, listener.address, listener.port)
    assert network.try_all([target]) == {}
    listener.close()
    assert network.try_all([target]) == {3: "Connection refused"}
    assert Listener(Network("a", (), {})).port == 0


def test_addresses_of_this_host_are_known() -> None:
    here = Network.here("127.0.0.1")
    loopback = [name for name, addresses in here.interfaces.items() if "127.0.0.1" in addresses]
    assert loopback == [here.way]


def test_a_name_that_leads_to_another_host_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_resolve", lambda name: ("192.0.2.77",))  # of a range that belongs to nobody
    assert Network.here().foreign
    monkeypatch.setattr(network, "_resolve", lambda name: ("127.0.0.1",))
    assert not Network.here().foreign


def test_the_meeting_point_is_free_taken_or_misleading() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert "something listens" in network.check_meeting("127.0.0.1", port, first=None).fact
        assert network.check_meeting("localhost", port, first=False).level == "fine"  # rank 0 is on this host after all
    found = network.check_meeting("localhost", port, first=False)
    assert found.level == "wrong"
    assert "is the host of rank 0, but leads to" in found.fact
    assert "the port is free" in network.check_meeting("localhost", port, first=True).fact
    assert "is not found from here" in network.check_meeting("no-such-host.invalid", port, first=None).fact


def test_a_port_that_is_bound_but_silent_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        found = network.check_meeting("127.0.0.1", taken.getsockname()[1], first=True)
    assert found.level == "wrong"
    assert "cannot be opened here (Address already in use)" in found.fact


def test_a_launchers_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert place_here() == Place()
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert place_here() == Place(5, 8, 1, 4)
    assert (place_here().several_hosts, place_here().first_host) == (True, False)
    assert not Place(1, 2, 1, 2).several_hosts
    assert Place(0, 2, 0, 1).several_hosts
    monkeypatch.setenv("WORLD_SIZE", "5")
    with pytest.raises(WorkerError, match="RANK=5 is out of range for WORLD_SIZE=5"):
        place_here()


def test_a_worker_looks_at_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYWAVE_CACHE", str(tmp_path))
    monkeypatch.setattr(disk, "TRIAL_BYTES", 1 << 16)
    own = worker.look(Place(), "cpu", Network.here(), str(tmp_path / "runs"))
    assert own.versions["torch"]
    assert [each.use for each in own.disks] == ["run folder", "cache"]
    assert own.host.cores == Host.here().cores
    stored = worker.look(Place(), "cpu", Network.here(), "s3://bucket/runs")
    assert [each.use for each in stored.disks] == ["cache"]  # an object store has no disk to look at


@pytest.mark.parametrize(
    ("asked", "shown", "built", "said"),
    [
        ("auto", 0, None, ""),
        ("auto", 2, None, "nvidia-smi shows 2 GPUs, but this torch is built for CPUs; install one for CUDA"),
        ("auto", 2, "13.0", "torch cannot use the GPU (The NVIDIA driver is too old. Update it); see whether the driver fits"),
        ("cpu", 2, "13.0", ""),
        ("cuda", 0, None, "device cuda was requested, but no GPU is available"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_told(asked: str, shown: int, built: str | None, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("The NVIDIA driver is too old. Update it.\nMore follows.")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", refuse)
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(gpu, "visible", lambda: list(range(shown)))
    device, why = gpu.choose(asked, 0)
    assert device == torch.device("cpu")
    assert why.startswith(said) if said else not why
    found = gpu.check_usable(why, "rank 0 on a")
    assert [each.level for each in found] == (["wrong"] if said else [])
    assert all(each.remedy for each in found)


def test_a_meeting_waits_for_everyone_but_not_for_ever(tmp_path: Path) -> None:
    def meeting(rank: int) -> Meeting:
        return Meeting(FileStore(str(tmp_path / "store")), Place(rank, 3, rank, 3))

    first, second = meeting(0), meeting(1)

    def follow() -> None:
        second.tell("worker", {"name": "second"})
        second.tell("at", second.hear("next", 20))

    thread = threading.Thread(target=follow)
    thread.start()
    first.tell("worker", {"name": "first"})
    assert first.collect("worker", [0, 1], 20) == {0: {"name": "first"}, 1: {"name": "second"}}
    begin = time.monotonic()
    assert sorted(first.collect("worker", range(3), 0.2)) == [0, 1]  # the third does not come
    assert time.monotonic() - begin < 5
    first.order("next", "links")
    thread.join()
    assert first.where() == {1: "links"}
    assert first.hear("never", 0.2) is None


def test_a_guard_ends_what_takes_too_long() -> None:
    said: list[Any] = []
    ended = threading.Event()
    guard = Guard(lambda what, seconds: said.append((what, seconds)), end=lambda code: (said.append(code), ended.set())[1])
    guard.allow("a disk", 60)
    guard.allow("the network", 0.05)
    assert ended.wait(10)
    assert said == [("the network", 0.05), 1]
    kept = threading.Event()
    other = Guard(lambda what, seconds: kept.set(), end=lambda code: None)
    other.allow("a disk", 0.2)
    other.done()
    assert not kept.wait(0.5)


def test_the_profile_has_the_slowest_links_that_were_measured(tmp_path: Path) -> None:
    def link(kind: Any, rate: float) -> MeasuredLink:
        return MeasuredLink(0, 1, kind, 1e-4, rate, "gloo")

    links = [link("within a host", 2e9), link("between hosts", 1e8), link("between hosts", 9e8)]
    path = tmp_path / "ours.json"
    found = completed(empty("cpu"), name_of(path), links)
    path.write_text(found.to_json())
    again = Profile.read(path)
    assert again.name == "ours"
    assert (again.within.bytes_per_second, again.within.transport) == (2e9, "gloo")
    assert again.between is not None
    assert again.between.bytes_per_second == 1e8
    assert completed(empty("cpu"), "x", ()).between == empty("cpu").between
