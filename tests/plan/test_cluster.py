"""Machines: constants are found again in the times that they give, a profile is a file, and a cluster places workers and times sums."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from _machines import machine

from carrywave.errors import PlanError
from carrywave.plan.cluster import Cluster
from carrywave.plan.profile import LINKS, Link, Profile, find_profile, names, shipped
from carrywave.plan.rates import CallSize, Rate, TimedCall, fit

LAYERS = [CallSize(inputs, 4 * 256, lanes, steps, 4 * 256 * 256) for inputs in (64, 512) for lanes in (1, 8, 64) for steps in (4, 32, 128)]
HEADS = [CallSize(inputs, outputs, 16, steps) for inputs in (64, 512) for outputs in (10, 10_000) for steps in (4, 64)]
UPDATES = [CallSize(0, parameters, 1, 1) for parameters in (10**4, 10**6, 10**8)]


@pytest.mark.parametrize(
    ("rate", "sizes"),
    [
        (Rate("layer", "fp32", 5e-5, 1e-5, 0.0, 0.0, 1e-9, 2e-11, forward_share=0.4), LAYERS),
        (Rate("head", "fp32", 2e-5, 0.0, 0.0, 1e-11, 0.0, 3e-11), HEADS),
        (Rate("update", "fp32", 1e-5, element_seconds=1e-9, forward_share=1.0), UPDATES),
    ],
)
def test_constants_are_found_in_the_times_that_they_give(rate: Rate, sizes: list[CallSize]) -> None:
    timed = [TimedCall(size, rate.of(size).forward, rate.of(size).all) for size in sizes]
    found = fit(rate.kind, rate.precision, timed, workers=2)
    # Coordinate descent ends near the optimum, not at it.
    assert all(found.of(size).all == pytest.approx(rate.of(size).all, rel=0.05) for size in sizes)
    assert (found.error < 0.05, found.workers) == (True, 2)
    assert found.forward_share == pytest.approx(rate.forward_share)


def test_the_nearest_number_of_workers_counts() -> None:
    base = machine()
    both = replace(base, rates=(*base.rates, *(replace(rate, workers=4, call_seconds=1.0) for rate in base.rates)))
    assert [both.rate("layer", "fp32", workers).workers for workers in (1, 2, 3, 8)] == [1, 4, 4, 4]  # of two as near, the slower one
    with pytest.raises(PlanError, match="has no figures of layer in bf16; measure"):
        both.rate("layer", "bf16", 1)


def test_a_profile_is_a_file(tmp_path: Path) -> None:
    base = machine(sums=LINKS["pcie4"], common_memory=True, versions={"torch": "2"})
    base.write(tmp_path / "machine.json")
    again = find_profile(str(tmp_path / "machine.json"))
    assert again.to_json() == base.to_json()  # constants have four digits there
    assert replace(again, rates=()) == replace(base, rates=())
    assert names() == ["h200"]
    assert shipped("h200").error("bf16") > 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 3}, "has format 3, but this version reads 4; measure it again"),
        ({"nam": "x"}, "p.json: nam: unknown key; correct it"),
        ({"memory_bytes": 0}, "memory_bytes must be more than reserved_bytes=0"),
        ({"within": {"latency_seconds": 1.0}}, "p.json: within.bytes_per_second: field required"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(change: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.json").write_text(json.dumps(json.loads(machine().to_json()) | change))
    with pytest.raises(PlanError) as refused:
        Profile.read("p.json")
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def read(**values: Any) -> Cluster:
    return Cluster.of({"hosts": 2, "devices": 4, "profile": "any", **values}, lambda name: machine(), "c.yaml")


def test_a_cluster_file_has_links_by_name_or_figures_and_its_large_hosts_first() -> None:
    assert read().sizes == (4, 4)
    found = read(hosts=None, devices=[2, 8], within="nvlink4", between={"latency_seconds": 1e-5, "bytes_per_second": 5e9})
    assert (found.sizes, found.devices, found.within) == ((8, 2), 10, LINKS["nvlink4"])
    assert found.link(crossing=True).bytes_per_second == 5e9
    assert read().link(crossing=True) == machine().between


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"devices": 0}, "devices"),
        ({"hosts": 10**6}, "hosts: input should be less than or equal to 65536"),
        ({"hosts": 3, "devices": [1, 2]}, "hosts=3, but devices lists 2"),
        ({"betwen": "cable"}, "betwen: unknown key"),
        ({"between": "string"}, "between='string' is not a known link; use nvlink3"),
        ({"between": {"latency_seconds": 0.1, "bytes_per_second": 0}}, "bytes_per_second: input should be greater than 0"),
    ],
)
def test_a_bad_cluster_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=rf"c\.yaml.*{said}"):
        read(**changes)


def test_sums_follow_the_link() -> None:
    def seconds(profile: Any, devices: int, num_bytes: int, groups: int = 1) -> float:
        cluster = Cluster.uniform(profile, devices)
        return cluster.sum_seconds(cluster.place(devices, 1), devices, num_bytes, groups)

    plain = machine(within=Link(1e-6, 1e9), between=Link(1e-5, 1e8))
    assert seconds(plain, 1, 1 << 20) == 0
    assert seconds(plain, 4, 10**9) == pytest.approx(1.5, rel=1e-3)  # a ring sends everything 2 · 3/4 times
    assert seconds(plain, 16, 10**9) == pytest.approx(2 * 15 / 16 * 10, rel=1e-3)
    assert seconds(plain, 16, 10**9, groups=4) == pytest.approx(4 * 2 * 15 / 16 * 10, rel=1e-3)
    assert seconds(plain, 4096, 8) < 1e-3  # a tree, not 4,095 turns
    assert seconds(machine(within=Link(1e-6, 1e9), sums=Link(1e-6, 1e8)), 4, 10**9) == pytest.approx(15, rel=1e-3)


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
    placed = Cluster(machine(), sizes).place(replicas, stages)
    assert (placed.crossing, placed.hosts, placed.crowd) == found
