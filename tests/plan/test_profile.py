from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from _machines import machine

from carrywave.errors import PlanError
from carrywave.plan.cost.profile import Profile, Reduction


def known(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(machine().to_json())
    return {**found, **changes}


def test_a_profile_comes_back_from_its_file(tmp_path: Path) -> None:
    profile = machine(reductions=(Reduction(2, 1 << 20, 1e-3),), versions={"torch": "2.13"})
    profile.write(tmp_path / "here.json")
    again = Profile.read(tmp_path / "here.json")
    assert (again.name, again.within, again.reductions, again.versions) == (
        profile.name,
        profile.within,
        profile.reductions,
        profile.versions,
    )
    assert len(again.samples) == len(profile.samples)
    assert again.samples[0].forward_seconds == pytest.approx(profile.samples[0].forward_seconds, rel=1e-5)
    assert Profile.of(json.loads(again.to_json())) == again
    assert (tmp_path / "here.json").stat().st_size < 16_000
    assert [path.name for path in tmp_path.iterdir()] == ["here.json"]


SAMPLE = json.loads(machine().to_json())["samples"][0]
LINK = {"latency_seconds": 1e-5, "bytes_per_second": 1e9}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": 2}, "has format 2, but this version reads 3"),
        ({"memory": 1}, "unknown key 'memory'; did you mean memory_bytes"),
        ({"name": 3}, "name=3 is not a str"),
        ({"memory_bytes": 1.5}, "memory_bytes=1.5 is not an int"),
        ({"memory_bytes": -1}, "memory_bytes=-1 must be at least 0"),
        ({"memory_bytes": 10, "reserved_bytes": 10}, "must be more than reserved_bytes=10"),
        ({"devices_per_host": 0}, "devices_per_host=0"),
        ({"source": "guessed"}, "source='guessed' is not known; use 'measured' or 'published'"),
        ({"samples": {}}, "samples must be a list, got {}"),
        ({"samples": [3]}, r"samples\[0\] must be a mapping, got 3"),
        ({"samples": [{**SAMPLE, "kind": "gated"}]}, r"samples\[0\]: kind='gated' is not known"),
        ({"samples": [{**SAMPLE, "lanes": 0}]}, r"samples\[0\]: lanes=0 must be at least 1"),
        ({"samples": [{**SAMPLE, "forward_seconds": float("nan")}]}, "forward_seconds=nan must be finite"),
        ({"samples": [{**SAMPLE, "forward_seconds": 0}]}, "measure it again"),
        ({"samples": [{**SAMPLE, "deferred_seconds": 9.0}]}, "deferred_seconds=9 exceeds backward_seconds"),
        ({"samples": [{key: value for key, value in SAMPLE.items() if key != "lanes"}]}, "lanes is missing"),
        ({"within": {**LINK, "bytes_per_second": 0}}, "within: bytes_per_second=0 must be above 0"),
        ({"between": {**LINK, "speed": 1}}, "between: unknown key 'speed'"),
        ({"reductions": [{"workers": 1, "num_bytes": 1, "seconds": 1.0}]}, r"reductions\[0\]: workers=1 must be at least 2"),
        ({"contention": [{"workers": 2, "factor": 0.5}]}, r"contention\[0\]: factor=0.5 must be at least 1"),
        ({"overheads": {"overlap": 2.0}}, "overheads: overlap=2.0 must be at most 1"),
        ({"versions": {"torch": 2}}, "versions: torch=2 is not a str"),
        ({"versions": ["torch"]}, "versions must map names to versions"),
    ],
)
def test_a_bad_profile_is_refused_with_the_field_that_is_wrong(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said) as error:
        Profile.of(known(**changes), "here.json")
    assert str(error.value).startswith("here.json")
    assert "\n" not in str(error.value)


def test_a_profile_of_an_earlier_version_is_read() -> None:
    now = known(contention=[{"workers": 2, "factor": 1.5}])
    before = {("crowds" if key == "contention" else key): value for key, value in now.items()}
    before["samples"] = [
        {("deferred_seconds" if key == "deferred_seconds" else key): value for key, value in sample.items()} for sample in now["samples"]
    ]
    assert Profile.of(before) == Profile.of(now)
    assert any("deferred_seconds" in sample for sample in before["samples"])


@pytest.mark.parametrize("text", ["", "[", "[1]", "null", "\xff"])
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "here.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(PlanError, match=r"here\.json"):
        Profile.read(path)
    with pytest.raises(PlanError, match="cannot be read"):
        Profile.read(tmp_path / "nowhere.json")


def test_a_stale_profile_is_refused() -> None:
    profile = machine(versions={"torch": "2.11"})
    profile.check_fresh("none", {"torch": "2.11"})
    with pytest.raises(PlanError, match=r"measured with torch 2\.11, but this is 2\.13"):
        profile.check_fresh("none", {"torch": "2.13"})
    with pytest.raises(PlanError, match="was measured on none, but this machine is an abacus"):
        profile.check_fresh("an abacus", {})


@pytest.mark.parametrize(
    ("memory", "said"), [("1" + "0" * 400, "memory_bytes=1000.* must be at most"), ("1e999", "is not an int"), ("-1", "must be at least 0")]
)
def test_numbers_that_no_machine_has_are_refused(memory: str, said: str, tmp_path: Path) -> None:
    whole = json.loads(machine().to_json())
    (tmp_path / "profile.json").write_text(json.dumps({**whole, "memory_bytes": "HERE"}).replace('"HERE"', memory))
    with pytest.raises(PlanError, match=said) as found:
        Profile.read(tmp_path / "profile.json")
    assert len(str(found.value)) < 400


def test_a_file_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text("[" * 100_000)
    with pytest.raises(PlanError, match="nested too deeply"):
        Profile.read(tmp_path / "profile.json")
