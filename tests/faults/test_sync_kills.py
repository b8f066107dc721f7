"""Replicas that train on their own between exchanges, killed at random moments: the run ends with the bytes of an undisturbed one."""

from __future__ import annotations

from pathlib import Path

import pytest

import _disturbed_run as disturbed_run
from _disturbed_run import RunSetup

# A snapshot is due every 8 steps, and written at the next exchange.
LOCAL = RunSetup("local", 2, ("train.sync=local", "train.sync_every=5", "train.sync_momentum=0.5"), steps=50)
STAGES = RunSetup("stages", 4, ("train.sync=diloco", "train.sync_every=4", "plan.stages=2", "plan.chunk_steps=2"), steps=40)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("case", "kills", "stages"), [(LOCAL, 2, 1), (STAGES, 2, 2)], ids=lambda each: str(each)[:20])
def test_kills_do_not_change_the_answer(case: RunSetup, kills: int, stages: int, tmp_path: Path) -> None:
    disturbed_run.write_data(tmp_path)
    calm = disturbed_run.calm(tmp_path, case)
    assert calm.code == 0, calm.lines
    told = disturbed_run.disturbed(tmp_path, case, kills, seed=kills)
    assert told.code == 0, told.lines
    assert told.restarts == kills
    ours, theirs = (disturbed_run.contents(tmp_path / run) for run in ("disturbed", "calm"))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []
    assert any("replica-" in name for name in ours)  # each replica's own state was compared, too
    assert disturbed_run.trained_on(tmp_path / "disturbed-ledger", stages) == disturbed_run.trained_on(tmp_path / "calm-ledger", stages)
