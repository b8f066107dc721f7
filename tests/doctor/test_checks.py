"""What the doctor's checks say, and how findings become a report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from carrywave.doctor import host, together
from carrywave.doctor.report import Finding, Report, of_error, several, size
from carrywave.errors import SpecError


def worker(rank: int, **versions: str) -> dict[str, Any]:
    return {"rank": rank, "host": f"h{rank}", "versions": {"torch": "2.13", "python": "3.11"} | versions, "settings": {}}


def test_a_report_names_each_thing_once_with_its_hosts() -> None:
    tight = [Finding("warning", "memory", "1 GB free", "end other programs", name) for name in ("a", "b", "c")]
    wrong = of_error("devices", SpecError("rank 1 has no GPU; pass --device cpu"), "rank 1")
    report = Report((Finding("fine", "versions", "torch 2.13"), *tight, wrong))
    assert report.code == 1
    assert report.lines == [
        "ok      versions  torch 2.13",
        "WARNING memory    a, b and c: 1 GB free; end other programs",
        "WRONG   devices   rank 1 has no GPU; pass --device cpu",
        "1 thing is wrong, with 1 warning",
    ]
    assert Report(tuple(tight)).code == 0
    assert several([str(number) for number in range(20)]).endswith("7 and 12 others")
    assert size(2.5e9) == "2.5 GB"


def test_other_versions_are_named_with_their_ranks() -> None:
    [found] = together.check_alike([worker(0), worker(1), worker(2, torch="1.0")])
    assert (found.level, found.fact) == ("wrong", "torch is 1.0 on rank 2 (h2), but 2.13 elsewhere")
    [found] = together.check_alike([worker(0), worker(1, python="3.12")])
    assert (found.level, found.what) == ("warning", "versions")
    unlike = worker(1) | {"settings": {"CARRYWAVE_TRANSPORT": "gloo"}}
    assert [each.level for each in together.check_alike([worker(0), worker(2), unlike])] == ["wrong"]
    assert together.check_alike([worker(0), worker(1)])[0].fact.endswith("the same on 2 workers")


@pytest.mark.parametrize(
    ("steps", "levels"), [([1.0, 1.1], ["fine"]), ([1.0, 1.0, 1.4], ["fine", "warning"]), ([2.0, 5.0], ["fine", "wrong"])]
)
def test_who_is_slow(steps: list[float], levels: list[str]) -> None:
    found = list(together.check_speeds(steps, ["rank 0", "rank 1", "rank 2"]))
    assert [each.level for each in found] == levels
    assert all(f"rank {len(steps) - 1} takes" in each.fact for each in found[1:])


def test_links_are_a_ring_of_hosts_and_a_pair_within_each() -> None:
    assert together.pairs(["a", "a", "b", "b", "c"]) == [(0, 1), (2, 3), (0, 2), (2, 4), (0, 4)]
    assert together.pairs(["a", "b"]) == [(0, 1)]
    rows = [
        {"first": first, "second": second, "kind": "between hosts", "transport": "gloo", "latency_seconds": 1e-4, "bytes_per_second": rate}
        for first, second, rate in ((0, 1, 1e9), (1, 2, 1e8), (0, 2, 1e9))
    ]
    summary, slow = together.check_links(rows, ["a", "b", "c"])
    assert summary.fact == "100 µs, 1 GB/s by gloo"
    assert slow.fact == "the link between b and c carries 100 MB/s, others 1 GB/s"


def test_cores_of_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert host.check_cores(8, None, 4, "a").fact == "8 cores, 4 workers of 2 threads"
    held = host.check_cores(8, 2.0, 2, "a")
    assert (held.level, held.remedy) == ("warning", "set OMP_NUM_THREADS=1, or start fewer workers")
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    assert host.check_cores(8, None, 1, "a").level == "warning"


def test_disks(tmp_path: Path) -> None:
    assert host.check_disk("cache", tmp_path / "not" / "there", "a").what == "disk"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert host.check_disk("cache", Path("/proc/1/none"), "a").level == "wrong"


def test_a_name_that_leads_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "leads_home", lambda: True)
    levels = {several: host.check_name(several_hosts=several).level for several in (True, None, False)}
    assert levels == {True: "wrong", None: "warning", False: "fine"}
