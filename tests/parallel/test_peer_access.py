"""Which workers write to each other's memory, by what each tells about its GPU. Here GPUs are names."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from carrywave.errors import SpecError, WorkerError
from carrywave.parallel.memory import peer_access
from carrywave.parallel.memory.peer_access import Neighbour, in_reach
from carrywave.parallel.startup.process_identity import identity
from carrywave.parallel.world import World

SHARE_GPU, OVERLAPPING = "CARRYWAVE_SHARE_GPU", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (SHARE_GPU, OVERLAPPING, peer_access.TRANSPORT):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"GPU-{index}"))


def told(device: str) -> Neighbour:
    [one] = peer_access.neighbours(World(0, 1, 0, 1, torch.device(device), ""))
    return one


def test_a_worker_tells_its_host_and_the_gpus_that_it_reaches() -> None:
    known = identity(os.getpid())
    host = f"{known['host']} {known['boot']}"
    assert known["boot"]  # hosts of one name are told apart by it
    assert told("cpu") == Neighbour(host, "", ())
    assert told("cuda:1") == Neighbour(host, "GPU-1", ("GPU-0",))


@pytest.mark.parametrize(
    ("shares", "allowed", "reaches"),
    [("2", "1", True), ("2", "", False), ("1", "1", False), ("0", "1", False), ("", "1", False)],
)
def test_workers_on_one_gpu_reach_each_other_only_if_they_have_shares_of_it(
    shares: str, allowed: str, reaches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SHARE_GPU, shares)
    monkeypatch.setenv(OVERLAPPING, allowed)
    assert in_reach([told("cuda:0"), told("cuda:0")], range(2)) == reaches


def test_shares_that_are_no_number_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARE_GPU, "some")
    with pytest.raises(WorkerError, match="CARRYWAVE_SHARE_GPU=some is not a number of workers from 0 to 48; use 1 to"):
        told("cuda:0")


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
    with pytest.raises(SpecError, match="CARRYWAVE_TRANSPORT=pigeons is not a transport; use one of auto, device, nccl, gloo"):
        peer_access.asked()
