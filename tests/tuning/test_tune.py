"""A search: which trials it makes, how they end, and that it goes on after an interruption as if there had been none."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import carrywave as cw
from carrywave.cli.main import app
from carrywave.errors import PlanError, ResourceError, RunError, SpecError, UserError, WorkerError
from carrywave.runs import owner
from carrywave.spec.load import load
from carrywave.tuning import children
from carrywave.tuning import tune as tuning
from carrywave.tuning.tune import TuneResult

SPEC: dict[str, Any] = {"task": "classification", "data": {"train": "a.jsonl", "valid": "b.jsonl"}, "model": {"hidden": 4}}
RATES = (1e-3, 1e-1)


@pytest.fixture(autouse=True)
def _quick_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "COMMAND", (sys.executable, str(Path(__file__).with_name("_fake_run.py"))))
    monkeypatch.setattr(children, "POLL_SECONDS", 0.01)


def tune(folder: Path, keys: dict[str, Any], **how: Any) -> TuneResult:
    return cw.tune(SPEC, keys, run=folder, device="cpu", **how)


def plain(found: TuneResult) -> list[dict[str, Any]]:
    """The rows without their seconds."""
    return [{name: value for name, value in row.items() if name != "seconds"} for row in found.rows]


def test_the_best_spec_is_written_and_every_trial_has_a_folder(tmp_path: Path) -> None:
    lines: list[str] = []
    found = tune(tmp_path / "s", {"train.lr": RATES, "model.hidden": [4, 8]}, trials=4, say=lines.append)
    assert [row["trial"] for row in found.rows] == [1, 2, 3, 4]
    assert found.value == min(row["loss"] for row in found.rows)
    assert load(tmp_path / "s" / "best.yaml") == found.best
    best = next(row for row in found.rows if row["loss"] == found.value)
    assert found.best is not None
    assert (found.best.train.lr, found.best.model.hidden) == (best["train.lr"], best["model.hidden"])
    assert len(lines) == 4
    higher = cw.tune(SPEC | {"train": {"best": "accuracy"}}, {"train.lr": RATES}, trials=4, run=tmp_path / "h", device="cpu")
    assert higher.value == max(row["accuracy"] for row in higher.rows)


def test_a_search_in_two_parts_makes_the_trials_of_one_and_a_seed_repeats_them(tmp_path: Path) -> None:
    whole = tune(tmp_path / "a", {"train.lr": RATES}, trials=7)
    tune(tmp_path / "b", {"train.lr": RATES}, trials=3)
    with (tmp_path / "b" / "tune.journal").open("ab") as file:
        file.write(b'{"op_code": 4, "wor')  # a process was killed while it wrote
    assert plain(tune(tmp_path / "b", {"train.lr": RATES}, trials=7, resume=True)) == plain(whole)
    other = tune(tmp_path / "c", {"train.lr": RATES}, trials=2, seed=4).rows
    assert [row["train.lr"] for row in other] != [row["train.lr"] for row in whole.rows[:2]]


def test_every_combination_is_tried_once_if_there_are_as_many_trials(tmp_path: Path) -> None:
    rows = tune(tmp_path / "s", {"model.hidden": [4, 8], "model.layers": [1, 2]}, trials=20, prune=False).rows
    assert sorted((row["model.hidden"], row["model.layers"]) for row in rows) == [(4, 1), (4, 2), (8, 1), (8, 2)]


@pytest.mark.slow
def test_a_hopeless_trial_is_stopped(tmp_path: Path) -> None:
    found = tune(tmp_path / "s", {"train.lr": (1e-3, 1.0)}, trials=14)
    pruned = [row for row in found.rows if row["state"] == "pruned"]
    assert pruned
    assert all(row["trial"] > tuning.STARTUP and row["epochs"] < 4 for row in pruned)
    assert found.value == min(row["loss"] for row in found.rows if row["state"] == "finished")
    assert all(row["state"] == "finished" for row in tune(tmp_path / "t", {"train.lr": (1e-3, 1.0)}, trials=8, prune=False).rows)


def test_a_run_that_dies_ends_only_its_trial(tmp_path: Path) -> None:
    found = tune(tmp_path / "s", {"model.hidden": [4, 13, 14]}, trials=3, at_once=2)
    why = {row["model.hidden"]: row.get("why", "") for row in found.rows}
    assert why[4] == ""
    assert "brings bad luck" in why[13]
    assert "SIGKILL" in why[14]
    assert found.best is not None
    assert found.best.model.hidden == 4
    with pytest.raises(RunError, match="the first 3 trials failed, the first with: this brings bad luck"):
        tune(tmp_path / "t", {"train.lr": (6.0, 9.0)})


@pytest.mark.parametrize("hidden", [26, pytest.param(27, marks=pytest.mark.slow), pytest.param(29, marks=pytest.mark.slow)])
def test_a_trial_that_the_machine_or_somebody_else_ended_goes_on_with_the_search(hidden: int, tmp_path: Path) -> None:
    keys = {"model.hidden": [4, hidden]}
    with pytest.raises(ResourceError, match=r"1 of 2 trials ended before their end, the first with: .*exit code (74|75|138);.*with resume"):
        tune(tmp_path / "s", keys)
    assert load(tmp_path / "s" / "best.yaml").model.hidden == 4
    found = tune(tmp_path / "s", keys, resume=True)
    assert [row["state"] for row in found.rows] == ["finished", "finished"]
    assert found.best is not None
    assert found.best.model.hidden == hidden


def test_a_trial_that_goes_on_without_its_killed_search_is_waited_for(tmp_path: Path) -> None:
    lines: list[str] = []
    (tmp_path / "trial-1").mkdir()
    claim = owner.take(tmp_path / "trial-1")
    threading.Timer(0.3, claim.release).start()
    asked = [children.ChildRun(tmp_path / "trial-1", ("model.hidden=4",))]
    ended: list[int] = []
    why = children.run_children(
        lambda: asked.pop() if asked else None, [{}], lambda _: False, lambda _, code: ended.append(code), say=lines.append
    )
    assert (why, ended) == (None, [0])
    assert "trial-1 is still being trained by a process that was started before; waiting for it to end" in lines[0]


def _stop_when(there: Callable[[], bool]) -> threading.Thread:
    """A thread that interrupts this process once something is there."""

    def wait() -> None:
        while not there():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_a_search_that_is_stopped_goes_on_with_the_same_trial(tmp_path: Path) -> None:
    keys = {"model.hidden": [15, 16]}
    thread = _stop_when(lambda: any(tmp_path.glob("s/trial-*/again")))
    first = tune(tmp_path / "s", keys, at_once=2)
    thread.join()
    assert first.ending == "terminated"
    assert "stopped" in {row["state"] for row in first.rows if row["model.hidden"] == 15}
    again = tune(tmp_path / "s", keys, resume=True)
    assert sorted((row["model.hidden"], row["state"]) for row in again.rows) == [(15, "finished"), (16, "finished")]
    assert again.ending is None
    found = tune(tmp_path / "t", keys, at_once=2, hours=0.5 / 3600)
    assert found.ending == "time"


def test_what_cannot_be_searched_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune(tmp_path / "s", {"train.lr": RATES}, trials=1)
    cases: list[tuple[type[UserError], str, Callable[[], Any]]] = [
        (RunError, "not empty", lambda: tune(tmp_path / "s", {"train.lr": RATES})),
        (RunError, "another keys", lambda: tune(tmp_path / "s", {"train.lr": (1e-3, 1.0)}, resume=True)),
        (RunError, "another seed", lambda: tune(tmp_path / "s", {"train.lr": RATES}, seed=2, resume=True)),
        (RunError, "another spec", lambda: cw.tune({}, {"train.lr": RATES}, run=tmp_path / "s", resume=True)),
        (RunError, "nothing to resume", lambda: tune(tmp_path / "other", {"train.lr": RATES}, resume=True)),
        (RunError, "is an address in a store", lambda: tune(Path("s3://bucket/search"), {"train.lr": RATES}, trials=1)),
        (SpecError, "validation data", lambda: cw.tune({"data": {"train": "a.txt", "share": 0.0}}, {"train.lr": RATES})),
        (SpecError, "read the data from files", lambda: cw.tune({"data": {"train": None}}, {"train.lr": RATES})),
        (UserError, "trials=... is 0", lambda: tune(tmp_path / "t", {"train.lr": RATES}, trials=0)),
    ]
    for kind, said, act in cases:
        with pytest.raises(kind, match=said):
            act()
    (tmp_path / "s" / "tune.journal").write_text("")
    with pytest.raises(RunError, match="is damaged"):
        tune(tmp_path / "s", {"train.lr": RATES}, resume=True)
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UserError, match=r"carrywave\[tune\]"):
        tune(tmp_path / "t", {"train.lr": RATES})


def test_the_command_shows_a_table_and_says_how_to_go_on(tmp_path: Path) -> None:
    given = ["task=classification", "data.train=a.jsonl", "data.valid=b.jsonl", "train.lr=1e-3..1e-1", "model.hidden=4,8"]
    words = ["tune", *given, "--run", str(tmp_path / "s"), "--device", "cpu"]
    shown = CliRunner().invoke(app, [*words, "--trials", "2", "--json", str(tmp_path / "rows.json")])
    assert shown.exit_code == 0, shown.output
    assert f"carrywave train {tmp_path / 's' / 'best.yaml'}" in shown.output
    assert [row["state"] for row in json.loads((tmp_path / "rows.json").read_text())] == ["finished"] * 2
    again = CliRunner().invoke(app, ["tune", "--run", str(tmp_path / "s"), "--resume", "--trials", "3", "--device", "cpu"])
    assert again.exit_code == 0, again.output
    assert again.output.count("finished") == 1 + 3  # the new one, and the table
    assert CliRunner().invoke(app, ["tune", "a.yaml", "b.yaml", "train.lr=1,2"]).exit_code == 2


def test_gpus_are_dealt_out_and_cores_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(children, "visible", lambda: [0, 1, 2, 3, 4])
    monkeypatch.setattr(children, "cores", lambda: 8)
    name = "CUDA_VISIBLE_DEVICES"
    assert children.places_for(None, "auto", None) == [{name: str(number)} for number in range(5)]
    assert children.places_for(None, "cuda", 2) == [{name: "0,1"}, {name: "2,3"}]
    assert children.places_for(3, "auto", 2) == [{name: "0,1"}, {name: "2,3"}, {name: "0,1"}]
    assert children.places_for(2, "cpu", None) == [{"OMP_NUM_THREADS": "4"}] * 2
    assert children.places_for(None, "cpu", None) == [{}]
    with pytest.raises(PlanError, match="there are 5 GPUs"):
        children.places_for(None, "auto", 6)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(WorkerError, match="start this command once"):
        children.places_for(None, "auto", None)
