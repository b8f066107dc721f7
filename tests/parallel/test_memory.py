"""Memory that workers share, without a GPU: who reaches whom, where they meet for it, its size, and what is said if there is none."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from carrywave.errors import SpecError, WorkerError
from carrywave.parallel.memory import host_memory, peer_access, symmetric
from carrywave.parallel.memory.peer_access import Neighbour, in_reach
from carrywave.parallel.memory.symmetric import GrowingMemory, SharedMemory, padded
from carrywave.parallel.startup.process_identity import identity
from carrywave.parallel.world import World

SHARE_GPU, OVERLAPPING = "CARRYWAVE_SHARE_GPU", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


@pytest.fixture(autouse=True)
def _two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (SHARE_GPU, OVERLAPPING, peer_access.TRANSPORT):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"GPU-{index}"))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=FileStore(str(tmp_path / "meeting"), 1), rank=0, world_size=1)
    try:
        yield dist.group.WORLD  # type: ignore[misc]
    finally:
        dist.destroy_process_group()


def told(device: str) -> Neighbour:
    [one] = peer_access.neighbours(World(0, 1, 0, 1, torch.device(device), ""))
    return one


def test_a_worker_tells_its_host_and_the_gpus_that_it_reaches() -> None:
    known = identity(os.getpid())
    host = f"{known['host']} {known['boot']}"
    assert known["boot"]  # hosts of one name are told apart by it
    assert told("cpu") == Neighbour(host, "", ())
    assert told("cuda:1") == Neighbour(host, "GPU-1", ("GPU-0",))


@pytest.mark.parametrize(("shares", "allowed", "reaches"), [("2", "1", True), ("2", "", False), ("1", "1", False), ("", "1", False)])
def test_workers_on_one_gpu_reach_each_other_only_if_they_have_shares_of_it(
    shares: str, allowed: str, reaches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SHARE_GPU, shares)
    monkeypatch.setenv(OVERLAPPING, allowed)
    assert in_reach([told("cuda:0"), told("cuda:0")], range(2)) == reaches


def test_all_of_a_group_reach_all_others_on_one_host() -> None:
    here = [Neighbour("a", "x", ("y",)), Neighbour("a", "y", ("x", "z")), Neighbour("a", "z", ("y",)), Neighbour("b", "x", ("y",))]
    assert in_reach(here, [0, 1])
    assert in_reach(here, [2, 1])
    assert not in_reach(here, [0, 1, 2])  # x and z do not
    assert not in_reach(here, [1, 3])  # another host
    assert not in_reach([Neighbour("a", "", ()), Neighbour("a", "", ())], [0, 1])  # no GPU


def test_a_transport_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peer_access.asked() == "auto"
    monkeypatch.setenv(peer_access.TRANSPORT, "pigeons")
    with pytest.raises(SpecError, match=r"CARRYWAVE_TRANSPORT=pigeons.*use one of auto, device, nccl, gloo"):
        peer_access.asked()


def test_every_buffer_has_a_meeting_of_its_own(world: dist.ProcessGroup) -> None:
    for _ in range(3):
        symmetric._meeting(world)
    assert len({store.name for store, _ in symmetric._kept[-3:]}) == 3


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("CUDA driver error: peer mapping resources exhausted\nsomewhere"), WorkerError),
        (torch.OutOfMemoryError("no room"), torch.OutOfMemoryError),
        (dist.DistNetworkError("connection reset by peer"), dist.DistNetworkError),
    ],
)
def test_memory_that_cannot_be_shared_is_told_with_a_way_out(
    error: Exception, kind: type[Exception], world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(symmetric, "SymmetricMemory", fail)
    with pytest.raises(kind) as raised:
        symmetric.symmetric_memory(world, 1, torch.device("cpu"))
    assert kind is not WorkerError or "set CARRYWAVE_TRANSPORT=nccl" in str(raised.value)


def test_the_first_that_is_large_enough_is_used_and_smaller_ones_are_kept() -> None:
    made: list[int] = []

    def make(size: int) -> SharedMemory:
        made.append(size)
        return cast(SharedMemory, SimpleNamespace(size=size))

    memory = GrowingMemory(make, least=64)
    given = [memory.of(size) for size in (1, 64, 65, 129, 2, 128, 256)]
    assert made == [64, 128, 256]
    assert [each.size for each in given] == [64, 64, 128, 256, 64, 128, 256]
    assert given[4] is given[0]  # what was captured with it is still valid
    assert [padded(size) for size in (0, 1, 256, 257)] == [0, 256, 256, 512]


@pytest.mark.skipif(sys.platform != "linux", reason="needs memfd_create and /proc")
@pytest.mark.parametrize("fails", ["ftruncate", "pwrite"])
def test_a_file_without_room_is_closed(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(os, fails, refuse)
    assert host_memory._made(64, 7) == (None, None)
    assert os.listdir("/proc/self/fd") == before
