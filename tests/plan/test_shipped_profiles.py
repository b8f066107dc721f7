from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from _machines import machine

from carrywave.errors import PlanError
from carrywave.plan.cost import shipped_profiles


def test_links_are_marked_as_published_and_their_latency_as_assumed() -> None:
    for link in shipped_profiles.LINKS.values():
        assert link.source.startswith("published: ")
        assert link.source.endswith(" assumed")
        assert 1e9 < link.bytes_per_second < 1e12
        assert 1e-6 < link.latency_seconds < 1e-4
    assert shipped_profiles.LINKS["infiniband-ndr"].bytes_per_second == 400e9 / 8


def test_a_profile_is_found_by_file_or_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine().write(tmp_path / "some")
    monkeypatch.setattr(shipped_profiles, "_folder", lambda: tmp_path)
    assert shipped_profiles.find_profile(str(tmp_path / "some")).to_json() == machine().to_json()
    with pytest.raises(PlanError, match="profile other not found; use a file that carrywave measured"):
        shipped_profiles.find_profile("other")
    machine(name="h1").write(tmp_path / "h1.json")
    assert shipped_profiles.names() == ["h1"]
    assert shipped_profiles.find_profile("h1").name == "h1"
    for name in ("h2", "../h1"):
        with pytest.raises(PlanError, match=r"profile h2 not found; use h1, or a file|\.\./h1 cannot be read"):
            shipped_profiles.find_profile(name)
    with pytest.raises(PlanError, match="profile h2 not found; use h1"):
        shipped_profiles.shipped("h2")


def test_all_shipped_profiles_can_be_read() -> None:
    for name in shipped_profiles.names():
        assert shipped_profiles.shipped(name).samples
