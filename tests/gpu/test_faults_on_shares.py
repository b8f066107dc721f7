"""Workers on shares of one GPU that are killed: the run goes on by itself, and ends with the bytes of an undisturbed one.

Messages and sums are in device memory, so that the others see a CUDA error, or go over NCCL, so that they wait on the device until the
launcher ends them; and steps are recorded. The data is numbers: the gradient of an embedding is a sum whose order CUDA does not fix.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

import _disturbed_run as disturbed_run
from _disturbed_run import RunSetup
from benchmarks.shares.mps import TOOL

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("two_shares"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which(TOOL) is None, reason=f"{TOOL} is not here"),
]

NUMBERS = ("task=tagging", "data.train=numbers.jsonl", "data.valid=numbers.jsonl", "model.hidden=64")
CASES = {
    "stages": RunSetup("2 stages", 2, (*NUMBERS, "plan.stages=2", "plan.chunk_steps=2"), shares=2),
    "replicas": RunSetup("2 replicas", 2, (*NUMBERS, "plan.replicas=2"), shares=2),
}


def write_numbers(folder: Path) -> None:
    """Write the same rows as numbers, with a label for every step: nothing in training on them is a sum whose order CUDA leaves open."""
    rows = [json.loads(line)["tokens"] for line in (folder / "rows.jsonl").read_text().splitlines()]
    numbered = [{"steps": [[math.sin(n), math.cos(0.1 * n)] for n in row], "labels": [str(n % 5) for n in row]} for row in rows]
    (folder / "numbers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in numbered))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("plan", CASES)
@pytest.mark.parametrize("kills", [1, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("transport", ["device", "nccl"])
def test_kills_do_not_change_the_answer(
    transport: str, kills: int, plan: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARRYWAVE_TRANSPORT", transport)
    case = CASES[plan]
    case = RunSetup(case.name, 2, (*case.words, f"train.precision={precision}"), steps=60 if kills == 1 else 150, shares=2)
    disturbed_run.write_data(tmp_path)
    write_numbers(tmp_path)
    calm = disturbed_run.calm(tmp_path, case)
    assert calm.code == 0, calm.lines
    assert f"{'in device memory' if transport == 'device' else 'over NCCL'}; whole steps are recorded" in calm.out
    told = disturbed_run.disturbed(tmp_path, case, kills, seed=kills)
    assert told.code == 0, told.lines
    assert (len(told.faults), told.restarts) == (kills, kills), told.lines
    restarts = [line for line in told.lines if "restarting from" in line]
    assert all("was killed (signal 9, SIGKILL); restarting from " in line for line in restarts), restarts
    ours, theirs = (disturbed_run.contents(tmp_path / run) for run in ("disturbed", "calm"))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []
    assert disturbed_run.each_once(tmp_path / "disturbed-ledger", 2 if plan == "stages" else 1)
