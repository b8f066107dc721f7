"""Which workers use NCCL, and what it is told before it starts. NCCL itself: tests/gpu/test_exactness_gpu.py."""

from __future__ import annotations

import os

import pytest

from carrywave.parallel.startup import nccl

OWN, ONE, NONE = ["a", "b"], ["a", "a"], ["a", ""]
SHARES = {"CARRYWAVE_SHARE_GPU": "2", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
NAMES = ("NCCL_HOSTID", "NCCL_SOCKET_IFNAME", "NCCL_LAUNCH_ORDER_IMPLICIT")


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SHARES, *NAMES, "CARRYWAVE_TRANSPORT"):
        monkeypatch.setenv(name, "")  # so that what a test leaves is taken back
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("gpus", "said", "backend"),
    [
        (OWN, {}, "nccl"),
        (OWN, {"CARRYWAVE_TRANSPORT": "gloo"}, "gloo"),
        (NONE, {"CARRYWAVE_TRANSPORT": "nccl"}, "gloo"),
        (ONE, {}, "gloo"),
        (ONE, SHARES, "gloo"),
        (ONE, {"CARRYWAVE_TRANSPORT": "nccl"}, "gloo"),
        (ONE, {"CARRYWAVE_TRANSPORT": "nccl", "CARRYWAVE_SHARE_GPU": "2"}, "gloo"),  # they take turns
        (ONE, SHARES | {"CARRYWAVE_TRANSPORT": "nccl"}, "nccl"),
    ],
)
def test_the_backend(gpus: list[str], said: dict[str, str], backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    assert nccl.backend_for(gpus) == backend


def test_ranks_on_one_gpu_are_hosts_of_their_own() -> None:
    nccl.prepare(1, OWN, one_host=True)
    assert [os.environ.get(name) for name in NAMES] == [None, None, "1"]
    nccl.prepare(1, ONE, one_host=False)
    assert [os.environ.get(name) for name in NAMES] == ["carrywave-1", None, "1"]
    nccl.prepare(0, ONE, one_host=True)
    assert [os.environ.get(name) for name in NAMES] == ["carrywave-0", "lo", "1"]


def test_what_the_user_says_to_nccl_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    nccl.prepare(0, ONE, one_host=True)
    assert [os.environ[name] for name in NAMES] == ["carrywave-0", "eth0", "0"]
