"""`bench faults` says what came of its runs; that they are real is seen by tests/faults."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from carrywave.benchmarks import faults
from carrywave.benchmarks.fault_runs.disturbed_run import Fault, Outcome
from carrywave.errors import RunError

COLUMNS = ("scenario", "workers", "faults", "in_saves", "in_restarts", "restarts", "noticed_s", "again_s", "equal", "once", "target")

SEEN = [
    Fault("step", 0, 5, 10.0, noticed_seconds=0.2, again_seconds=4.0, in_a_save=True),
    Fault("restart", 1, 0, 20.0, noticed_seconds=0.6),
    Fault("save", 1, 9, 30.0, noticed_seconds=0.3, again_seconds=8.0, in_a_save=True),
]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    said: dict[str, Any] = {"code": 0, "disturbed": b"same", "once": True}
    lines = ["worker 1 of 2 was killed (signal 9, SIGKILL); restarting from step 8 (restart 1 of 4)"] * 3
    monkeypatch.setattr(faults, "calm", lambda *_: Outcome(0, []))
    monkeypatch.setattr(faults, "disturbed", lambda *_, **more: Outcome(said["code"], lines, SEEN))
    monkeypatch.setattr(faults, "contents", lambda run: {"weights": said.get(Path(run).name, b"same")})
    monkeypatch.setattr(faults, "each_once", lambda ledger, stages: said["once"])
    return said


def test_a_row(stand_in: dict[str, Any]) -> None:
    row = faults.row_of(faults.REPLICAS, 3, signal.SIGKILL)
    assert tuple(row) == COLUMNS
    assert (row["faults"], row["in_saves"], row["in_restarts"], row["restarts"]) == (3, 2, 1, 3)
    assert (row["noticed_s"], row["again_s"]) == ("0.30 (most 0.60)", "6.00 (most 8.00)")
    assert (row["equal"], row["once"]) == ("yes", "yes")


def test_what_is_not_equal_is_said(stand_in: dict[str, Any]) -> None:
    stand_in["disturbed"], stand_in["once"] = b"other", False
    row = faults.row_of(faults.STAGES, 3, signal.SIGKILL)
    assert (row["equal"], row["once"]) == ("no", "no")


def test_a_run_that_does_not_end_well_is_no_row(stand_in: dict[str, Any]) -> None:
    stand_in["code"] = 1
    with pytest.raises(RunError, match="a run of 2 replicas exited with code 1: worker 1 of 2"):
        faults.row_of(faults.REPLICAS, 3, signal.SIGKILL)
