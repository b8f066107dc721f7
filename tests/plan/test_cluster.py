from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from _machines import machine

from carrywave.errors import PlanError
from carrywave.plan.cluster import Cluster, Host
from carrywave.plan.profile import Link

FAST, SLOW = machine(name="fast"), machine(name="slow")
LINKS = {"cable": Link(1e-5, 1e9)}


def test_hosts_that_differ_have_their_kinds() -> None:
    cluster = Cluster((Host(2, FAST), Host(4, SLOW)))
    placed = cluster.place(3, 2)
    assert [kind.name for kind in placed.kinds] == ["fast", "slow"]
    assert placed.crossing == (False,)
    assert cluster.place(1, 3).crossing == (False, True)
    with pytest.raises(PlanError, match="replicas=4 x stages=2 needs 8 devices, but the cluster has 6"):
        cluster.place(4, 2)


def test_devices_fill_hosts() -> None:
    assert [host.devices for host in Cluster.uniform(SLOW, 19).hosts] == [8, 8, 3]
    assert Cluster.uniform(SLOW, 8).devices == 8
    with pytest.raises(PlanError, match="devices=0"):
        Cluster.uniform(SLOW, 0)


def find(name: str) -> Any:
    return {"fast": FAST, "slow": SLOW}[name]


def test_a_cluster_is_read_from_keys() -> None:
    found = Cluster.of({"hosts": 2, "devices": 4, "profile": "fast", "between": "cable"}, find, LINKS)
    assert (found.devices, found.between, found.within) == (8, LINKS["cable"], None)
    mixed = Cluster.of({"devices": 4, "profile": "fast", "hosts": [{}, {"devices": 1, "profile": "slow"}]}, find)
    assert [(host.devices, host.profile.name) for host in mixed.hosts] == [(4, "fast"), (1, "slow")]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hosts": 0}, "hosts=0 is neither a number of hosts nor a list"),
        ({"hosts": []}, r"hosts=\[\] is neither"),
        ({"hosts": True}, "hosts=True is neither"),
        ({"devices": 0}, "devices=0 is not a number of devices"),
        ({"devices": None}, "devices=None"),
        ({"hosts": [{"devices": 0}]}, r"hosts\[0\]: devices=0"),
        ({"hosts": [{"gpus": 2}]}, r"hosts\[0\]: unknown key 'gpus'"),
        ({"profile": None}, "profile=None is not the name or file of a profile"),
        ({"betwen": "cable"}, "unknown key 'betwen'; did you mean between"),
        ({"between": "string"}, "between='string' is not a known link; use one of cable"),
        ({"between": {"latency_seconds": 0.1, "bytes_per_second": 0}}, "bytes_per_second: input should be greater than 0"),
        ({"within": {"latency_seconds": 0.1}}, "within: bytes_per_second: field required"),
    ],
)
def test_a_bad_cluster_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        Cluster.of({"hosts": 2, "devices": 4, "profile": "fast", **changes}, find, LINKS, "c.yaml")
    with pytest.raises(PlanError, match=r"c\.yaml must be a mapping with hosts, devices, profile, within, between, got \[\]"):
        Cluster.of([], find, LINKS, "c.yaml")


def test_a_cluster_must_have_hosts_with_devices_and_links() -> None:
    for hosts in ((), (Host(0, FAST),)):
        with pytest.raises(PlanError, match=r"has no hosts|devices=0"):
            Cluster(hosts)
    with pytest.raises(PlanError, match="the link between the 2 hosts of the cluster is unknown"):
        Cluster((Host(1, machine(between=None)),) * 2)


def test_sums_follow_the_link() -> None:
    def seconds(profile: Any, devices: int, workers: int, num_bytes: int, groups: int = 1) -> float:
        cluster = Cluster.uniform(profile, devices)
        return cluster.sum_seconds(cluster.place(devices, 1), workers, num_bytes, groups)

    plain = machine(within=Link(1e-6, 1e9), between=Link(1e-5, 1e8))
    assert seconds(plain, 1, 1, 1 << 20) == 0
    assert seconds(plain, 4, 4, 10**9) == pytest.approx(1.5, rel=1e-3)  # a ring sends everything 2 · 3/4 times
    assert seconds(plain, 16, 16, 10**9) == pytest.approx(2 * 15 / 16 * 10, rel=1e-3)
    assert seconds(plain, 16, 16, 10**9, groups=4) == pytest.approx(4 * 2 * 15 / 16 * 10, rel=1e-3)
    assert seconds(plain, 4096, 4096, 8) < 1e-3  # a tree, not 4,095 turns
    assert seconds(machine(within=Link(1e-6, 1e9), sums=Link(1e-6, 1e8)), 4, 4, 10**9) == pytest.approx(15, rel=1e-3)


@pytest.mark.parametrize(
    ("sizes", "replicas", "stages", "found"),
    [
        ((4, 4), 2, 4, ((False, False, False), 2, 4)),
        ((2, 2, 2), 1, 6, ((False, True, False, True, False), 3, 2)),
        ((8, 2), 5, 2, ((False,), 2, 8)),
        ((3, 3), 3, 2, ((True,), 2, 3)),
    ],
)
def test_hosts_are_filled_in_order(sizes: tuple[int, ...], replicas: int, stages: int, found: Any) -> None:
    placed = Cluster(tuple(Host(size, SLOW) for size in sizes)).place(replicas, stages)
    assert (placed.crossing, placed.hosts, placed.crowd) == found


def test_a_cluster_file_has_its_large_hosts_first() -> None:
    found = Cluster.of({"hosts": [{"devices": 2}, {"devices": 8}], "profile": "any"}, lambda name: machine())
    assert [host.devices for host in found.hosts] == [8, 2]


def test_more_devices_than_there_are_anywhere_are_refused() -> None:
    with pytest.raises(PlanError, match="use at most 65536"):
        Cluster.uniform(machine(), 10**9)
    with pytest.raises(PlanError, match="hosts=1000000 is more than the planner supports"):
        Cluster.of({"hosts": 10**6, "devices": 8, "profile": "any"}, lambda name: machine())
