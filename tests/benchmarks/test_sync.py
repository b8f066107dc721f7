"""The comparison of ways of exchanging: what is asked of the workers, and one run of it with real ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from carrywave.benchmarks import sync
from carrywave.benchmarks.sync_runs import slow_links
from carrywave.errors import UserError
from carrywave.spec.load import parse


def test_settings_come_last_and_are_typed() -> None:
    found = sync._merged(sync.SPEC, sync.QUICK, sync._given(Path("/text"), None), sync._set(["model.hidden=64", "data.tokens=word"]))
    assert found["model"] == {"hidden": 64, "layers": 1}
    assert found["data"] == {"tokens": "word", "train": "/text"}
    with pytest.raises(UserError, match=r"--set hidden=3 is not a setting; write it as in model\.hidden=256"):
        sync._set(["hidden=3"])


def test_every_row_is_a_valid_spec() -> None:
    for mode in sync.MODES:
        parse(sync._merged(sync.SPEC, {"train": mode}, sync._short(mode, sync.EVERY, quick=False)))


def test_what_is_timed_has_several_rows_of_whole_rounds() -> None:
    assert sync._short({"sync": "step"}, 50, quick=False)["train"] == {"max_steps": 12, "log_every": 3}
    assert sync._short({"sync": "diloco"}, 50, quick=False)["train"] == {"max_steps": 150, "log_every": 50}
    assert sync._short({"sync": "async"}, 50, quick=False)["train"] == {"max_steps": 12, "log_every": 3, "sync_every": 3}


def test_links_that_cannot_be_made_are_skipped_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"sync": "step"}
    monkeypatch.setattr(sync, "_rows", lambda modes, specs, link, *, shares: [row])
    monkeypatch.setattr(slow_links, "reason", lambda: "network namespaces need root")
    assert sync.run(quick=True, link=100) == [row, {"sync": "all", "link_Mbit": 100, "note": "skipped: network namespaces need root"}]


def test_a_text_to_evaluate_on_needs_one_to_train_on() -> None:
    with pytest.raises(UserError, match="--valid needs --text"):
        sync.run(valid=Path("valid.txt"))


def test_shares_of_a_gpu_have_no_links() -> None:
    with pytest.raises(UserError, match="--link is for CPU workers"):
        sync.run(link=100, shares=True)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_ways_run() -> None:
    rows = sync.run(quick=True)
    assert [row["sync"] for row in rows] == ["step", "local", "diloco", "diloco, bf16", "async"]
    by_name = {row["sync"]: row for row in rows}
    assert all(0.5 < float(str(row["loss_to_step"])) < 2.0 for row in rows)
    # Every fifth step sends differences of the weights, instead of a gradient at every step.
    assert float(str(by_name["local"]["sent_MB"])) < 0.5 * float(str(by_name["step"]["sent_MB"]))
