"""Workers that are killed or stopped at random moments: the run goes on by itself, and ends with the bytes of an undisturbed one."""

from __future__ import annotations

import json
import random
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import _disturbed_run as disturbed_run
from _disturbed_run import Fault, Outcome, Running, RunSetup
from carrywave.errors import RunError


def check(folder: Path, told: Outcome, stages: int = 1) -> None:
    assert told.code == 0, told.lines
    assert told.restarts == len(told.faults)
    assert len(told.lines) == len(told.faults), told.lines  # one line for each, and nothing else
    ours, theirs = (disturbed_run.contents(folder / run) for run in ("disturbed", "calm"))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []
    for run in ("calm", "disturbed"):
        assert disturbed_run.each_once(folder / f"{run}-ledger", stages)
    assert disturbed_run.trained_on(folder / "disturbed-ledger", stages) == disturbed_run.trained_on(folder / "calm-ledger", stages)
    assert not list((folder / "disturbed" / "snapshots").glob(".*"))  # no draft is left


KILLS = [
    pytest.param(disturbed_run.REPLICAS, 3, 1, id="short", marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    *(
        pytest.param(
            case, kills, 2 if case is disturbed_run.STAGES else 1, id=case.name, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]
        )
        for case, kills in disturbed_run.KILLS.items()
    ),
]


@pytest.mark.parametrize(("case", "kills", "stages"), KILLS)
def test_kills_do_not_change_the_answer(case: RunSetup, kills: int, stages: int, tmp_path: Path) -> None:
    case = replace(case, steps=60 if kills == 3 else case.steps)
    disturbed_run.write_data(tmp_path)
    assert disturbed_run.calm(tmp_path, case).code == 0
    told = disturbed_run.disturbed(tmp_path, case, kills, seed=kills)
    assert len(told.faults) == kills
    check(tmp_path, told, stages)
    assert all("was killed (signal 9, SIGKILL); restarting from " in line for line in told.lines)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_stopped_workers_do_not_change_the_answer(tmp_path: Path) -> None:
    case = replace(disturbed_run.REPLICAS, steps=60)
    disturbed_run.write_data(tmp_path)
    assert disturbed_run.calm(tmp_path, case).code == 0
    told = disturbed_run.disturbed(tmp_path, case, 2, seed=2, number=signal.SIGSTOP, moments=("step",))
    check(tmp_path, told)
    assert all("gave no sign of life for" in line for line in told.lines)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("devices", "left"), [(2, 1), (4, 2)])
def test_a_run_goes_on_with_those_that_are_left(devices: int, left: int, tmp_path: Path) -> None:
    """Whichever worker has the highest rank dies at every start, until so few are left."""
    case = RunSetup("fewer", devices, ("train.precision=fp64",), steps=60)
    disturbed_run.write_data(tmp_path)
    assert disturbed_run.calm(tmp_path, replace(case, devices=1)).code == 0
    running = Running(tmp_path, "disturbed", case, "--restarts", "9", "--min-devices", str(left))
    done: list[Fault] = []
    draw = random.Random(1)
    try:
        for size in range(devices, left, -1):
            for _ in range(2):  # first in training, then at its start
                moment = "step" if not done else "restart"
                done.append(disturbed_run.harm(running, size, len(done), draw, 20, moment, signal.SIGKILL, rank=size - 1))
        told = running.wait()
    finally:
        running.end()
    assert told.code == 0, told.lines
    assert f"continuing with {left} of {devices} workers from step " in told.lines[-1]
    ours, theirs = (load_file(tmp_path / run / "weights.safetensors") for run in ("disturbed", "calm"))
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-10, atol=1e-12)  # float64: sums in another order


# The judge is judged: it must see what is wrong.


def write_ledger(folder: Path, rank: int, *rows: tuple[int, int, list[list[int]]]) -> None:
    lines = [{"attempt": 0, "step": step, "seconds": 0.0, "windows": [[epoch, lanes]]} for step, epoch, lanes in rows]
    (folder / f"{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_ledger_counts_what_was_gone_back_over_by_its_last_time(tmp_path: Path) -> None:
    write_ledger(tmp_path, 0, (1, 0, [[0, 0, 0, 3]]), (2, 0, [[0, 0, 3, 2]]), (2, 0, [[0, 0, 3, 2]]), (3, 1, [[0, 0, 0, 3]]))
    assert disturbed_run.each_once(tmp_path, 1)
    assert disturbed_run.trained_on(tmp_path, 1)[0] == {(0, place): 1 for place in range(5)}


@pytest.mark.parametrize(
    "rows",
    [
        [(1, 0, [[0, 0, 0, 3]]), (2, 0, [[0, 0, 2, 3]])],  # one step of a sequence twice
        [(1, 0, [[0, 0, 0, 3], [1, 1, 0, 2]]), (2, 1, [[0, 0, 0, 3]]), (3, 2, [[0, 0, 0, 3]])],  # a sequence left out of the second epoch
    ],
    ids=["twice", "left out"],
)
def test_the_ledger_shows_what_was_not_trained_once(rows: list[tuple[int, int, list[list[int]]]], tmp_path: Path) -> None:
    write_ledger(tmp_path, 0, *rows)
    assert not disturbed_run.each_once(tmp_path, 1)


def test_a_ledger_with_a_gap_is_no_proof(tmp_path: Path) -> None:
    write_ledger(tmp_path, 0, (1, 0, [[0, 0, 0, 3]]), (3, 0, [[0, 0, 3, 2]]))
    with pytest.raises(RunError, match="does not record every step"):
        disturbed_run.trained_on(tmp_path, 1)
