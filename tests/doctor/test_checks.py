"""Verdicts from made-up facts: what is said of a host, a disk, a network, a GPU, and of all workers together."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import to_json

from carrywave.doctor import agreement, disk, gpu, host, network, worker
from carrywave.doctor.device_speed import DeviceSpeed
from carrywave.doctor.disk import Disk
from carrywave.doctor.finding import Finding, merged, ranks, several, size, well
from carrywave.doctor.gpu import Gpu
from carrywave.doctor.host import Host
from carrywave.doctor.links import MeasuredLink, Pair, check_links, pairs
from carrywave.doctor.meeting import behind
from carrywave.doctor.network import Network, Target
from carrywave.doctor.report import Report, lines
from carrywave.doctor.speed import check_speeds
from carrywave.doctor.verdicts import failed, fell_silent, of_launch, of_self_test, other_devices, stayed_away, stuck
from carrywave.doctor.worker import Place, Worker
from carrywave.parallel.memory.peer_access import Neighbour
from carrywave.plan.show.text import seconds_text

HOST = Host("a", "Linux", 8, None, 4, 64 << 30, 32 << 30, 8 << 30, 65536, 0.5)
NETWORK = Network("a", ("10.0.0.1",), {"lo": ("127.0.0.1",), "eth0": ("10.0.0.1",)})
HOME = replace(NETWORK, resolved=("127.0.1.1",))
GPU = Gpu("NVIDIA H200", "u0", 140 << 30, "580.1", 0, 40, 0, 0)
H200 = Finding("fine", "GPU", "NVIDIA H200, 150 GB, driver 580.1", where="a")


def make(rank: int, *, name: str = "a", on: Gpu | None = None, reaches: tuple[str, ...] = (), **changes: Any) -> Worker:
    """A worker whose rank is its place on the host too, unless told otherwise."""
    near = Neighbour(name, "" if on is None else on.uuid, reaches)
    own = Worker(
        rank,
        changes.pop("local_rank", rank),
        name,
        {"carrywave": "0.1.0", "torch": "2.13"},
        changes.pop("settings", {}),
        replace(HOST, host=name),
        replace(NETWORK, host=name),
        "cpu" if on is None else f"cuda:{rank}",
        near,
        on,
    )
    return replace(own, **changes)


def level_of(found: Finding) -> str:
    assert bool(found.remedy) == (found.level != "fine"), found
    return found.level


@pytest.mark.parametrize(
    ("known", "hosts", "level", "said"),
    [
        (NETWORK, 2, "fine", "a resolves to 10.0.0.1"),
        (HOME, 2, "wrong", "a resolves its own name to 127.0.1.1, so that other hosts cannot reach its workers: a rendezvous would hang"),
        (HOME, 1, "fine", "enough on one machine"),
        (replace(NETWORK, foreign=True), 2, "wrong", "a resolves its own name to 10.0.0.1, which is not an address of this host"),
        (replace(NETWORK, foreign=True), None, "warning", "not an address of this host"),
        (replace(NETWORK, foreign=True), 1, "fine", "a resolves to 10.0.0.1"),
        (HOME, None, "warning", "with several, a rendezvous at that name hangs"),
        (replace(HOME, resolved=()), 2, "wrong", "resolves its own name to nothing"),
        (replace(HOME, named="eth0"), 2, "fine", "through eth0 (10.0.0.1)"),
        (replace(HOME, named="lo"), 2, "wrong", "GLOO_SOCKET_IFNAME=lo is loopback (127.0.0.1)"),
        (replace(NETWORK, named="ib0"), 2, "wrong", "has no network interface ib0 (it has lo, eth0)"),
        (replace(HOME, interfaces={"lo": ("127.0.0.1",)}), None, "fine", "one machine"),  # no network: nobody else will come
    ],
)
def test_a_name_that_leads_home_is_wrong_where_there_are_others(known: Network, hosts: int | None, level: str, said: str) -> None:
    found = network.check_name(known, hosts=hosts)
    assert level_of(found) == level
    assert said in found.fact


def test_the_remedy_names_the_interface_that_leads_to_the_meeting_point() -> None:
    known = replace(HOME, interfaces={**HOME.interfaces, "docker0": ("172.17.0.1",), "ib0": ("10.9.0.1",)}, way="ib0")
    assert "set GLOO_SOCKET_IFNAME=ib0 on it" in network.check_name(known, hosts=2).remedy
    assert "set GLOO_SOCKET_IFNAME=eth0 on it" in network.check_name(replace(known, way="lo"), hosts=2).remedy


def test_whoever_cannot_be_reached_is_named_with_the_one_who_tried() -> None:
    hosts, targets = {0: "a", 2: "b"}, {0: Target("a", 0, "10.0.0.1", 5), 2: Target("b", 2, "10.0.0.2", 6)}
    assert [level_of(found) for found in network.check_reach(hosts, targets, {0: {}, 2: {}})] == ["fine"]
    [found] = network.check_reach(hosts, targets, {0: {2: "no answer within 3 s"}, 2: {}})
    assert level_of(found) == "wrong"
    assert found.fact.startswith("a cannot connect to b at 10.0.0.2 (no answer within 3 s)")


@pytest.mark.parametrize(
    ("known", "workers", "level", "said"),
    [
        (HOST, 2, "fine", "8 cores, 2 workers of 4 threads"),
        (HOST, 3, "warning", "3 workers of 4 threads share 8 cores; set OMP_NUM_THREADS=2"),
        (replace(HOST, threads=1), 9, "warning", "9 workers of 1 thread share 8 cores; use at most 8 workers"),
        (replace(HOST, threads=None), 3, "fine", "3 workers of 2 threads"),
        (replace(HOST, quota=2.0), 2, "warning", "may use the time of 2; 2 x 4 threads would be held up; set OMP_NUM_THREADS=1"),
        (replace(HOST, quota=2.0, threads=1), 2, "fine", "8 cores"),
        (replace(HOST, quota=16.0), 2, "fine", "8 cores"),
    ],
)
def test_threads_fit_the_cores_and_the_container(known: Host, workers: int, level: str, said: str) -> None:
    found = host.check_cores(known, workers=workers, on_gpu=False)
    assert (level_of(found), said in found.sentence) == (level, True), found


def test_limits_of_a_container_are_read_in_both_forms(tmp_path: Path) -> None:
    assert host.quota(tmp_path) is None
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("150000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert host.quota(tmp_path) == 1.5
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    assert host.quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("400000 100000\n")
    assert host.quota(tmp_path) == 4
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert host.quota(tmp_path) is None


@pytest.mark.parametrize(
    ("check", "level"),
    [
        (lambda: host.check_memory(HOST), "fine"),
        (lambda: host.check_memory(replace(HOST, free_bytes=1 << 20)), "warning"),
        (lambda: host.check_shared_memory(replace(HOST, shared_bytes=64 << 20), gpus=1), "fine"),
        (lambda: host.check_shared_memory(replace(HOST, shared_bytes=64 << 20), gpus=2), "warning"),
        (lambda: host.check_shared_memory(replace(HOST, shared_bytes=None), gpus=2), "warning"),
        (lambda: host.check_files(replace(HOST, open_files=1024), world=64), "fine"),
        (lambda: host.check_files(replace(HOST, open_files=1024), world=1024), "wrong"),
        (lambda: host.check_files(replace(HOST, open_files=-1), world=1024), "fine"),
        (lambda: host.check_load(replace(HOST, load=8.0)), "fine"),
        (lambda: host.check_load(replace(HOST, load=20.0)), "warning"),
        (lambda: host.check_cores(replace(HOST, cores=2, threads=1), workers=2, on_gpu=True), "fine"),
        (lambda: host.check_cores(replace(HOST, quota=1.0, cores=4, threads=None), workers=4, on_gpu=True), "warning"),
    ],
)
def test_verdicts_on_a_host(check: Callable[[], Finding], level: str) -> None:
    assert level_of(check()) == level


@pytest.mark.parametrize(
    ("known", "level", "said"),
    [
        (Disk("cache", "/c", "nfs", 1 << 40, 5e8), "fine", "cache /c: 1.1 TB free, 500 MB/s written and synced (nfs)"),
        (Disk("cache", "/c", "nfs", 1 << 40, 5e6), "warning", "5 MB/s written and synced (nfs): snapshots will take long"),
        (Disk("cache", "/c", "", 1 << 28, 5e8), "warning", "little room"),
        (Disk("cache", "/c", "", 0, 0.0), "wrong", "nothing can be written"),
        (Disk("cache", "/c", error="Read-only file system"), "wrong", "cache /c cannot be written (Read-only file system)"),
    ],
)
def test_verdicts_on_disks(known: Disk, level: str, said: str) -> None:
    found = disk.check_disk(known, "a")
    assert (level_of(found), said in found.fact) == (level, True), found


def test_a_folder_that_one_host_does_not_see_is_not_shared() -> None:
    assert level_of(disk.check_shared("runs", {"a": True, "b": True})) == "fine"
    found = disk.check_shared("runs", {"a": True, "b": False, "c": False})
    assert (level_of(found), found.fact) == (
        "fine",
        "runs of rank 0 is not seen on b and c: parts of snapshots go there over the network",
    )


@pytest.mark.parametrize(
    ("known", "found"),
    [
        (GPU, ["fine"] * 3),
        (replace(GPU, held_bytes=3 << 30), ["warning", "fine", "fine"]),
        (replace(GPU, ecc_errors=2), ["fine", "wrong", "fine"]),
        (replace(GPU, throttle=0x40), ["fine", "warning", "fine"]),
        (replace(GPU, throttle=0x1), ["fine"] * 3),  # idle
        (replace(GPU, throttle=0x4), ["fine"] * 3),  # its power cap, under load
        (replace(GPU, celsius=91), ["fine", "warning", "fine"]),
        (replace(GPU, refusal="it needs a Hopper GPU (compute capability 9.0)"), ["fine"] * 3),
        (replace(GPU, refusal="CUDA code cannot be compiled here (no nvrtc)"), ["fine", "fine", "warning"]),
        (Gpu("old", "u", 1 << 30), ["fine"] * 3),  # nvidia-smi is not there
    ],
)
def test_verdicts_on_gpus(known: Gpu, found: list[str]) -> None:
    assert [level_of(each) for each in worker.check_device(make(0, on=known))] == found


def test_workers_that_share_a_gpu_hold_memory_of_it_too() -> None:
    held = replace(GPU, held_bytes=3 << 30)
    assert [each.level for each in worker.check_device(make(0, on=held), sharing=4)] == ["fine"] * 3


def test_nvidia_smi_is_asked_field_by_field(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "uuid": ("GPU-u0", "GPU-u1"),
        "driver_version": ("580.1", "580.1"),
        "memory.used": ("7", "2048"),
        "temperature.gpu": ("31", "33"),
        "ecc.errors.uncorrected.volatile.total": ("[N/A]", "3"),
        "clocks_throttle_reasons.active": ("0x0000000000000001", "0x0000000000000040"),
    }
    monkeypatch.setattr(gpu, "nvidia_smi", lambda field: answers.get(field, ()))
    told = gpu.ask_smi()
    assert told["u1"]["memory.used"] == "2048"
    assert told["u1"]["throttle"].endswith("40")
    assert [gpu._number(text) for text in ("0x0000000000000040", "[N/A]", None, "7")] == [64, None, None, 7]


def test_shares_need_their_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.shutil, "which", lambda tool: None)
    assert gpu.check_shares("a", {}) is None
    assert gpu.check_shares("a", {"CARRYWAVE_SHARE_GPU": "1"}) is None
    missing = gpu.check_shares("a", {"CARRYWAVE_SHARE_GPU": "4"})
    assert missing is not None
    assert level_of(missing) == "wrong"
    monkeypatch.setattr(gpu.shutil, "which", lambda tool: f"/usr/bin/{tool}")
    there = gpu.check_shares("a", {"CARRYWAVE_SHARE_GPU": "4"})
    assert there is not None
    assert level_of(there) == "fine"


def test_ranks_with_other_versions_are_named() -> None:
    there = [make(rank) for rank in range(4)]
    [found] = agreement.check_versions(there)
    assert (level_of(found), found.fact) == ("fine", "carrywave 0.1.0, torch 2.13, the same on 4 workers")
    there[1] = make(1, name="b", versions={"carrywave": "0.1.0", "torch": "2.12"})
    there[3] = make(3, name="b", versions={"carrywave": "0.1.0", "torch": "2.12"})
    there[0] = make(0, versions={"carrywave": "0.1.0", "torch": "2.13", "python": "3.12.1"})
    torch, python = agreement.check_versions([*there, make(4)])
    assert (level_of(torch), torch.fact) == ("wrong", "torch is 2.12 on ranks 1 and 3 (b), but 2.13 elsewhere")
    assert (level_of(python), python.fact) == ("warning", "python is 3.12.1 on rank 0 (a), but none elsewhere")


def test_other_settings_and_drivers_are_named() -> None:
    there = [make(0), make(1), make(2, settings={"CARRYWAVE_TRANSPORT": "gloo", "OMP_NUM_THREADS": "3"})]
    transport, threads = agreement.check_settings(there)
    assert (level_of(transport), level_of(threads)) == ("wrong", "warning")
    assert transport.fact == "CARRYWAVE_TRANSPORT is gloo on rank 2 (a), but unset elsewhere"
    mixed = [make(0, on=GPU), make(1, on=replace(GPU, uuid="u1", driver="550"))]
    assert "the GPU driver is 550 (1 workers), but 580.1 elsewhere" in agreement.check_versions(mixed)[0].fact


def on_gpus(count: int, hosts: int = 1, *, reach: bool = True, **changes: Any) -> list[Worker]:
    uuids = [f"u{rank}" for rank in range(count)]
    reaches = tuple(uuids) if reach else ()
    each = -(-count // hosts)
    return [make(rank, name=f"h{rank // each}", on=replace(GPU, uuid=uuids[rank]), reaches=reaches, **changes) for rank in range(count)]


@pytest.mark.parametrize(
    ("there", "name", "why"),
    [
        ([make(0)], "", "one worker sends nothing"),
        ([make(0), make(1)], "gloo", "the workers are on CPUs"),
        (on_gpus(2), "device memory", "GPUs of one host that reach each other's memory"),
        (on_gpus(2, reach=False), "NCCL", "but they do not reach each other's memory"),
        (on_gpus(4, 2), "NCCL", "on 2 hosts"),
        (on_gpus(2, settings={"CARRYWAVE_TRANSPORT": "nccl"}), "NCCL", "asks for it"),
        (on_gpus(2, settings={"CARRYWAVE_TRANSPORT": "gloo"}), "gloo", "asks for it"),
        ([make(0, on=GPU), make(1, on=GPU)], "gloo", "workers share a GPU"),
        ([make(0, on=GPU), make(1)], "gloo", "some workers have no GPU"),
    ],
)
def test_the_transport_and_why(there: list[Worker], name: str, why: str) -> None:
    found = agreement.transport(there)
    assert found.name == name
    assert why in found.why


@pytest.mark.parametrize(
    ("there", "asked", "level"),
    [
        (on_gpus(2), "device", "fine"),
        (on_gpus(4, 2), "device", "wrong"),
        ([make(0), make(1)], "nccl", "wrong"),
        ([make(0), make(1)], "carrier pigeon", "wrong"),
        ([make(0)], "nccl", "fine"),
    ],
)
def test_a_transport_that_is_not_possible_is_refused(there: list[Worker], asked: str, level: str) -> None:
    there = [replace(each, settings={"CARRYWAVE_TRANSPORT": asked}) for each in there]
    assert level_of(agreement.check_transport(there)) == level


def test_workers_without_a_gpu_of_their_own_are_named() -> None:
    assert agreement.check_gpus(on_gpus(2)) == []
    [found] = agreement.check_gpus([make(0, on=GPU), make(1), make(2)])
    assert found.fact.startswith("ranks 1 and 2 of 3 have no GPU")
    [found] = agreement.check_gpus([make(0, on=GPU), make(1, on=GPU)])
    assert found.fact == "ranks 0 and 1 share a GPU"
    assert agreement.check_gpus([make(rank, on=GPU, settings={"CARRYWAVE_SHARE_GPU": "2"}) for rank in range(2)]) == []


def test_clocks_that_are_apart() -> None:
    assert agreement.check_clocks({}) == []
    assert [level_of(each) for each in agreement.check_clocks({"b": (0.2, 0.01), "c": (1.5, 0.6)})] == ["fine"]  # it may be 0.9 s
    [found] = agreement.check_clocks({"b": (-90.0, 0.01), "c": (0.0, 0.01)})
    assert (level_of(found), found.fact) == ("warning", "the clock of b is 90 s behind that of rank 0")


def test_the_slow_worker_is_named_with_its_factor() -> None:
    names = {rank: f"rank {rank} on h{rank}" for rank in range(4)}
    equal = {rank: DeviceSpeed(1e-3, 1e9, 2e-3) for rank in range(4)}
    assert [level_of(each) for each in check_speeds(equal, names)] == ["fine"]
    assert [each.level for each in check_speeds({0: equal[0]}, names)] == ["fine"]
    summary, slow = check_speeds(equal | {2: DeviceSpeed(3e-3, 3e8, 5e-3)}, names)
    assert (level_of(summary), level_of(slow)) == ("fine", "wrong")
    assert slow.fact.startswith("rank 2 on h2 takes 2.5 times as long as the other workers for an LSTM step and 3 times for a matrix")
    assert [each.level for each in check_speeds(equal | {2: DeviceSpeed(1.5e-3, 3e8, 3e-3)}, names)] == ["fine", "warning"]
    assert [each.level for each in check_speeds(equal | {2: DeviceSpeed(9e-3, 3e8, 2e-3)}, names)] == ["fine"]  # a disturbance
    # Of two, each is compared with the other.
    assert "rank 1 on h1 takes 4 times" in check_speeds({0: equal[0], 1: DeviceSpeed(4e-3, 1e8, 8e-3)}, names)[1].fact


def test_pairs_of_a_round_have_no_rank_in_common() -> None:
    assert pairs(["a"]) == []
    assert pairs(["a", "a"]) == [[Pair(0, 1, "within a host")]]
    assert pairs(["a", "b"]) == [[Pair(0, 1, "between hosts")]]
    for hosts in range(1, 9):
        for each in (1, 2, 3):
            rounds = pairs([f"h{rank // each}" for rank in range(hosts * each)])
            for one in rounds:
                ends = [rank for pair in one for rank in pair[:2]]
                assert len(ends) == len(set(ends))
            between = {frozenset(pair[:2]) for one in rounds for pair in one if pair.kind == "between hosts"}
            ring = {frozenset((host * each, (host + 1) % hosts * each)) for host in range(hosts)}
            assert between == {edge for edge in ring if len(edge) == 2}
            assert sum(pair.kind == "within a host" for one in rounds for pair in one) == (hosts if each > 1 else 0)


def test_a_slow_link_is_named() -> None:
    hosts = {0: "a", 2: "b", 4: "c"}
    links = [MeasuredLink(first, second, "between hosts", 1e-4, 1e9, "gloo") for first, second in ((0, 2), (2, 4), (0, 4))]
    [found] = check_links(links, hosts)
    assert (level_of(found), found.fact) == ("fine", "100 us, 1 GB/s by gloo (median of 3)")
    _, slow = check_links([links[0], replace(links[1], bytes_per_second=1e8), links[2]], hosts)
    assert level_of(slow) == "warning"
    assert slow.fact.startswith("the link between b (rank 2) and c (rank 4) carries 100 MB/s, others 1 GB/s: 10 times as slow")
    [noisy] = check_links([replace(links[0], bytes_per_second=1e15), *links[1:]], hosts)  # one that noise made fast slows no other down
    assert noisy.fact == "100 us, 1 GB/s by gloo (median of 3)"
    [alone] = check_links([replace(links[0], bytes_per_second=1e15)], hosts)
    assert alone.fact == "100 us, a rate that noise hides by gloo"
    assert check_links([], hosts) == []


def test_whoever_stays_away_is_named_by_all_that_is_known() -> None:
    there = {rank: make(rank) for rank in (0, 1)}
    found = stayed_away([2, 3], there, Place(0, 4, 0, 2), 60)
    assert found.fact == "ranks 2 and 3 of 4 (host number 1, from 0, with all workers) did not show up within 60 s; workers on a did"
    assert "(host number 1, from 0)" in stayed_away([3], there, Place(0, 4, 0, 2), 60).fact
    assert stayed_away([1], there, Place(0, 2, 0, None), 9).fact == "rank 1 of 2 did not show up within 9 s; workers on a did"


def test_whoever_falls_silent_is_named() -> None:
    found = fell_silent([1], {0: make(0), 1: make(1, name="b")}, 20)
    assert (level_of(found), found.fact) == ("wrong", "rank 1 on b did not say within 20 s whether other hosts can be reached")


def test_whoever_hangs_is_named() -> None:
    assert behind({0: "links", 1: "clocks", 2: "links"}, ("clocks", "links")) == ([1], "clocks")
    found = stuck({0: "links", 1: "device speed"}, {0: make(0), 1: make(1)}, 90)
    assert "rank 1 on a had come no further than device speed" in found.fact
    found = stuck({0: "waiting for the others", 1: "failed: no memory"}, {0: make(0), 1: make(1)}, 90)
    assert found.fact == "rank 1 on a: no memory"
    assert level_of(stuck({}, {}, 90)) == "wrong"


def test_of_several_that_fail_the_cause_is_named() -> None:
    there = {0: make(0), 1: make(1)}
    lost = {"error": "contact with rank 1 was lost; see that worker's output", "lost": True}
    assert failed({0: lost}, [1], there).fact == "rank 0 on a: contact with rank 1 was lost"
    found = failed({0: lost, 1: {"error": "no memory; use less", "lost": False}}, [], there)
    assert (found.fact, found.remedy) == ("rank 1 on a: no memory", "use less")
    assert failed({}, [1], there).fact == "rank 1 did not finish the measurement"


def test_devices_that_the_profile_does_not_describe_are_told() -> None:
    assert other_devices([make(0), make(1)]) == []
    [found] = other_devices([make(0, on=GPU), make(1, name="b", on=replace(GPU, name="A100"))])
    assert (level_of(found), found.fact) == ("warning", "the profile describes the devices of a; those of b differ")


def test_a_worker_survives_the_wire() -> None:
    share = Finding("fine", "shares of a GPU", "2 for each GPU")
    own = make(1, on=GPU, reaches=("u1",), disks=(Disk("cache", "/c"),), shares=share, door=("10.0.0.1", 5))
    assert Worker.of(json.loads(to_json(own))) == own


def test_a_launch_is_well_where_all_is() -> None:
    found = of_launch(on_gpus(4, 2), hosts=2)
    assert well(found)
    assert {"versions", "transport", "host name", "cores", "GPU", "kernels"} <= {each.what for each in found}
    assert not well(of_launch([replace(each, network=HOME) for each in on_gpus(4, 2)], hosts=2))


def test_a_report_says_the_same_of_several_hosts_once() -> None:
    found = [Finding("fine", "memory", "64 GB", where=where) for where in ("a", "b")] + [Finding("warning", "load", "busy", "end it", "b")]
    report = Report(tuple(found))
    assert merged(found)[0] == Finding("fine", "memory", "64 GB", where="a and b")
    assert lines(report) == ["ok      memory  a and b: 64 GB", "WARNING load    b: busy; end it", "all is well, with 1 warning"]
    assert (report.code, report.to_json()["well"]) == (0, True)
    bad = Report((*found, Finding("wrong", "disk", "full", "free it")))
    assert (bad.code, bad.verdict, bad.to_json()["well"]) == (1, "1 thing is wrong, and there is 1 warning", False)


def test_words() -> None:
    assert ranks([3]) == "rank 3"
    assert ranks([3, 1]) == "ranks 1 and 3"
    assert several([str(number) for number in range(12)]) == "0, 1, 2, 3, 4, 5, 6, 7 and 4 others"
    assert [size(number) for number in (5, 1500, 2e9, 3e13)] == ["5 B", "1.5 kB", "2 GB", "30 TB"]
    assert [seconds_text(seconds) for seconds in (5e-6, 0.0015, 3)] == ["5 us", "1.5 ms", "3 s"]


def test_a_self_test_that_differs_on_any_worker_is_wrong() -> None:
    same = {"plan": "2 stages", "over": "NCCL", "precision": "fp32", "error": 3e-7, "limit": 1e-4}
    [found] = of_self_test({0: [same], 1: [same]}, {0: make(0), 1: make(1)})
    assert (found.level, found.fact) == ("fine", "2 stages over NCCL in fp32 (3e-07) have the losses of one device, up to this error")
    for error in (0.02, float("nan")):
        [found] = of_self_test({0: [same], 1: [{**same, "error": error}]}, {0: make(0), 1: make(1)})
        assert found.level == "wrong"
        assert f"rank 1 on a is off by {error:.1g}" in found.fact
        assert "do not train on these devices" in found.remedy
    assert of_self_test({}, {}) == []
    assert of_self_test({0: []}, {0: make(0)}) == []
