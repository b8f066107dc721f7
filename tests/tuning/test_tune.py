"""A search: which trials it makes, how they end, and that it goes on after an interruption as if there had been none."""

from __future__ import annotations

import errno
import hashlib
import itertools
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
from carrywave.tuning.child_runs import ChildRun, Job
from carrywave.tuning.study import Journal, Search, Trial
from typer.testing import CliRunner

import carrywave as cw
from carrywave.cli.main import app
from carrywave.errors import PlanError, ResourceError, RunError, SpecError, UserError, WorkerError
from carrywave.spec.load import load
from carrywave.tuning import child_runs, study
from carrywave.tuning import tune as tuning
from carrywave.tuning.tune import TuneResult

SPEC: dict[str, Any] = {"task": "classification", "data": {"train": "a.jsonl", "valid": "b.jsonl"}, "model": {"hidden": 4}}
RATES = (1e-3, 1e-1)


@pytest.fixture(autouse=True)
def _quick_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_runs, "COMMAND", (sys.executable, str(Path(__file__).with_name("_fake_run.py"))))
    monkeypatch.setattr(child_runs, "POLL_SECONDS", 0.01)


def tune(folder: Path, keys: dict[str, Any], **how: Any) -> TuneResult:
    return cw.tune(SPEC, keys, run=folder, device="cpu", **how)


def test_the_best_spec_is_written_and_every_trial_has_a_folder(tmp_path: Path) -> None:
    lines: list[str] = []
    found = tune(tmp_path / "s", {"train.lr": RATES, "model.hidden": [4, 8]}, trials=4, say=lines.append)
    assert [row["trial"] for row in found.rows] == [1, 2, 3, 4]
    assert found.value == min(row["loss"] for row in found.rows)
    assert found.best is not None
    assert load(tmp_path / "s" / "best.yaml") == found.best
    best = next(row for row in found.rows if row["loss"] == found.value)
    assert (found.best.train.lr, found.best.model.hidden) == (best["train.lr"], best["model.hidden"])
    assert json.loads((tmp_path / "s" / "trial-3" / "trial.json").read_text())["state"] == "finished"
    assert len(lines) == 4
    page = (tmp_path / "s" / "tune.html").read_text()
    assert "loss by trial" in page
    assert "loss by train.lr" in page
    assert page.count("<svg") == 3


def test_the_same_seed_gives_the_same_trials(tmp_path: Path) -> None:
    first, again = (tune(tmp_path / name, {"train.lr": RATES}, trials=7, seed=3).rows for name in ("a", "b"))
    assert [row["train.lr"] for row in first] == [row["train.lr"] for row in again]
    other = tune(tmp_path / "c", {"train.lr": RATES}, trials=2, seed=4).rows
    assert [row["train.lr"] for row in other] != [row["train.lr"] for row in first[:2]]


@pytest.mark.slow
def test_a_search_in_two_parts_makes_the_trials_of_one(tmp_path: Path) -> None:
    whole = tune(tmp_path / "a", {"train.lr": RATES}, trials=8)
    tune(tmp_path / "b", {"train.lr": RATES}, trials=3)
    parts = tune(tmp_path / "b", {"train.lr": RATES}, trials=8, resume=True)
    for row in (*whole.rows, *parts.rows):
        del row["seconds"]
    assert parts.rows == whole.rows


def test_no_combination_of_choices_is_tried_twice(tmp_path: Path) -> None:
    rows = tune(tmp_path / "s", {"model.hidden": [4, 8], "model.layers": [1, 2]}, trials=20, prune=False).rows
    assert sorted((row["model.hidden"], row["model.layers"]) for row in rows) == [(4, 1), (4, 2), (8, 1), (8, 2)]


@pytest.mark.slow
def test_a_hopeless_trial_is_stopped_and_its_folder_says_so(tmp_path: Path) -> None:
    found = tune(tmp_path / "s", {"train.lr": (1e-3, 1.0)}, trials=14)
    pruned = [row for row in found.rows if row["state"] == "pruned"]
    assert pruned
    assert all(row["trial"] > study.STARTUP for row in pruned)
    for row in pruned:
        told = json.loads((tmp_path / "s" / f"trial-{row['trial']}" / "trial.json").read_text())
        assert told["state"] == "pruned"
        assert row["epochs"] == len(told["values"]) < 4
    assert found.value == min(row["loss"] for row in found.rows if row["state"] == "finished")
    assert all(row["state"] == "finished" for row in tune(tmp_path / "t", {"train.lr": (1e-3, 1.0)}, trials=8, prune=False).rows)


def test_a_run_that_dies_ends_only_its_trial(tmp_path: Path) -> None:
    lines: list[str] = []
    found = tune(tmp_path / "s", {"model.hidden": [4, 13, 14]}, trials=3, say=lines.append)
    why = {row["model.hidden"]: row.get("why", "") for row in found.rows}
    assert why[4] == ""
    assert "brings bad luck" in why[13]
    assert "SIGKILL" in why[14]
    assert found.best is not None
    assert found.best.model.hidden == 4


@pytest.mark.parametrize("hidden", [26, 27, 28, 29])
def test_a_trial_that_the_machine_or_somebody_else_ended_goes_on_with_the_search(hidden: int, tmp_path: Path) -> None:
    keys = {"model.hidden": [4, hidden]}
    fact = "1 of 2 trials ended before their end, the first with: .*exit code (74|75|129|138);.*go on with resume"
    with pytest.raises(ResourceError, match=fact):
        tune(tmp_path / "s", keys)
    assert load(tmp_path / "s" / "best.yaml").model.hidden == 4
    found = tune(tmp_path / "s", keys, resume=True)
    assert [row["state"] for row in found.rows] == ["finished", "finished"]
    assert found.best is not None
    assert found.best.model.hidden == hidden


def test_evaluations_from_before_a_trial_went_back_are_forgotten(tmp_path: Path) -> None:
    """Even where it has come as far again, or further, before the next look."""
    trial = Trial(1, {"train.lr": 0.01})
    search = Search("loss", {}, 1, prune=False)
    going = tuning._Going(tmp_path, search, SPEC, tuning.How(1, None, None, "cpu", None, print), Journal(tmp_path / "tune.jsonl"), [trial])
    child = ChildRun(Job(tmp_path / "trial-1", ()), {}, None)  # type: ignore[arg-type]
    rows = tmp_path / "trial-1" / "metrics.jsonl"
    rows.parent.mkdir()
    for number, losses in enumerate([[3.5, 1.5], [3.5, 2.5], [3.5, 2.25, 2.0]]):
        rows.write_text("".join(f'{{"split": "valid", "epoch": {epoch}, "loss": {loss}}}\n' for epoch, loss in enumerate(losses)))
        os.utime(rows, ns=(number, number))
        going.look(child)
        assert list(going.trials[1].values) == losses


def test_a_search_is_kept_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match="s3://bucket/search is an address in a store"):
        tune(Path("s3://bucket/search"), {"train.lr": RATES}, trials=1)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_a_search_had_just_begun_when_it_was_killed_is_free(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    folder.mkdir()
    (folder / "tune.yaml").write_text("task: lang")
    assert len(tune(folder, {"train.lr": RATES}, trials=1).rows) == 1
    assert "classification" in (folder / "tune.yaml").read_text()
    with pytest.raises(RunError, match="not empty"):
        tune(folder, {"train.lr": RATES}, trials=1)


@pytest.mark.parametrize("draft", [".tune.yaml.tmp", ".tune.jsonl.tmp"])
def test_a_file_that_a_killed_search_was_writing_is_in_nobodys_way(draft: str, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    folder.mkdir()
    (folder / "tune.yaml").write_text("task: lang")
    (folder / draft).write_text("task: l")
    assert len(tune(folder, {"train.lr": RATES}, trials=1).rows) == 1
    assert not (folder / draft).exists()


@pytest.mark.parametrize("written", [0, 1, 2])
def test_a_search_that_found_a_full_disk_can_be_started_again(written: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, sync = itertools.count(), os.fsync

    def full(handle: int) -> None:
        if next(calls) == written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResourceError, match="could not be written: No space left on device"):
        tune(tmp_path / "s", {"train.lr": RATES}, trials=1)
    assert len(tune(tmp_path / "s", {"train.lr": RATES}, trials=1).rows) == 1


def test_a_trial_that_goes_on_without_its_killed_search_is_waited_for(tmp_path: Path) -> None:
    lines: list[str] = []
    folder, keys = tmp_path / "s", {"model.hidden": [4, 8]}
    tune(folder, keys, trials=1)
    Journal(folder / "tune.jsonl").write(Trial(1, {"model.hidden": 4}))  # as a search that was killed leaves it
    (folder / "trial-1" / "metrics.jsonl").unlink()
    left = child_runs._start(child_runs.Job(folder / "trial-1", ("model.hidden=15",)), {})
    assert left is not None
    threading.Timer(0.5, left.stop).start()
    found = tune(folder, keys, trials=1, resume=True, say=lines.append)
    assert left.process.poll() == 75
    assert [row["state"] for row in found.rows] == ["finished"]
    assert "trial-1 is still being trained by a process that was started before; waiting for it to end" in lines[0]


def test_a_search_is_not_resumed_on_other_data_than_its_trials_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.jsonl"):
        Path(name).write_text('{"steps": [[1.0]], "label": "x"}\n')
    tune(tmp_path / "s", {"train.lr": RATES}, trials=2)
    digest = hashlib.sha256(Path("b.jsonl").read_bytes()).hexdigest()
    (tmp_path / "s" / "trial-1" / "facts.json").write_text(json.dumps({"files": {"valid": digest}}))
    tune(tmp_path / "s", {"train.lr": RATES}, trials=3, resume=True)
    with Path("b.jsonl").open("a") as file:
        file.write('{"steps": [[2.0]], "label": "y"}\n')
    with pytest.raises(
        RunError, match=r"the data has changed since trial 1 of .* \(b.jsonl\).*; restore the old data, or start a new search"
    ):
        tune(tmp_path / "s", {"train.lr": RATES}, trials=4, resume=True)


def test_a_search_in_which_all_fail_ends(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="the first 3 trials failed, the first with: this brings bad luck"):
        tune(tmp_path / "s", {"train.lr": (6.0, 9.0)})


@pytest.mark.slow
def test_trials_side_by_side(tmp_path: Path) -> None:
    found = tune(tmp_path / "s", {"train.lr": RATES}, trials=5, at_once=3)
    assert [row["state"] for row in found.rows] == ["finished"] * 5


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
    waiting = tmp_path / "s" / "trial-1" / "again"
    thread = _stop_when(waiting.exists)
    keys = {"model.hidden": [15, 16]}
    first = cw.tune(SPEC, keys, run=tmp_path / "s", seed=_seed_with_15_first(keys), device="cpu")
    thread.join()
    assert first.ending == "terminated"
    assert first.best is None
    assert [row["state"] for row in first.rows] == ["stopped"]
    again = cw.tune(SPEC, keys, run=tmp_path / "s", seed=_seed_with_15_first(keys), device="cpu", resume=True)
    assert [(row["model.hidden"], row["state"]) for row in again.rows] == [(15, "finished"), (16, "finished")]
    assert again.ending is None


def _seed_with_15_first(keys: dict[str, Any]) -> int:
    return next(seed for seed in range(99) if Search("loss", cw_space(keys), seed, True).next_keys([])["model.hidden"] == 15)


def cw_space(keys: dict[str, Any]) -> Any:
    from carrywave.tuning.search_space import space_from

    return space_from(keys)


def test_the_time_limit_stops_in_order(tmp_path: Path) -> None:
    keys = {"model.hidden": [15, 16]}
    found = cw.tune(SPEC, keys, run=tmp_path / "s", seed=_seed_with_15_first(keys), hours=0.5 / 3600, device="cpu")
    assert found.ending == "time"
    assert found.rows[0]["state"] == "stopped"


def test_a_higher_metric_is_better_where_it_is(tmp_path: Path) -> None:
    found = cw.tune(SPEC | {"train": {"best": "accuracy"}}, {"train.lr": RATES}, trials=4, run=tmp_path / "s", device="cpu")
    assert found.value == max(row["accuracy"] for row in found.rows)


def test_what_cannot_be_searched_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune(tmp_path / "s", {"train.lr": RATES}, trials=1)
    cases: list[tuple[type[UserError], str, Callable[[], Any]]] = [
        (RunError, "already exists and is not empty", lambda: tune(tmp_path / "s", {"train.lr": RATES})),
        (RunError, "another keys", lambda: tune(tmp_path / "s", {"train.lr": (1e-3, 1.0)}, resume=True)),
        (RunError, "another seed", lambda: tune(tmp_path / "s", {"train.lr": RATES}, seed=2, resume=True)),
        (RunError, "another spec", lambda: cw.tune({}, {"train.lr": RATES}, run=tmp_path / "s", resume=True)),
        (RunError, "nothing to resume", lambda: tune(tmp_path / "other", {"train.lr": RATES}, resume=True)),
        (SpecError, "validation data", lambda: cw.tune({"data": {"train": "a.txt", "share": 0.0}}, {"train.lr": RATES})),
        (SpecError, "read the data from files", lambda: cw.tune({"data": {"train": None}}, {"train.lr": RATES})),
        (UserError, "trials=... is 0", lambda: tune(tmp_path / "t", {"train.lr": RATES}, trials=0)),
    ]
    for kind, said, act in cases:
        with pytest.raises(kind, match=said):
            act()
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UserError, match=r"carrywave\[tune\]"):
        tune(tmp_path / "t", {"train.lr": RATES})


def test_a_line_that_was_cut_off_is_as_if_it_had_not_been_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "tune.jsonl")
    search = Search("loss", cw_space({"train.lr": RATES}), 1, True)
    journal.begin(search)
    journal.write(Trial(1, {"train.lr": 0.01}))
    journal.write(Trial(1, {"train.lr": 0.01}, "finished", (1.0, None, 0.5), 3, 7))
    with journal.path.open("ab") as file:
        file.write(b'{"trial": {"num')
    assert journal.read() == (search, [Trial(1, {"train.lr": 0.01}, "finished", (1.0, None, 0.5), 3, 7)])
    journal.write(Trial(2, {"train.lr": 0.02}))
    assert len(journal.read()[1]) == 2
    journal.path.write_text('{"search": {}}\n')
    with pytest.raises(RunError, match="is damaged"):
        journal.read()


def test_the_command_shows_a_table_and_says_how_to_go_on(tmp_path: Path) -> None:
    given = ["task=classification", "data.train=a.jsonl", "data.valid=b.jsonl", "train.lr=1e-3..1e-1", "model.hidden=4,8"]
    words = ["tune", *given, "--run", str(tmp_path / "s"), "--device", "cpu"]
    shown = CliRunner().invoke(app, [*words, "--trials", "2", "--json", str(tmp_path / "rows.json")])
    assert shown.exit_code == 0, shown.output
    assert f"carrywave train {tmp_path / 's' / 'best.yaml'}" in shown.output
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["state"] for row in rows] == ["finished"] * 2
    again = CliRunner().invoke(app, ["tune", "--run", str(tmp_path / "s"), "--resume", "--trials", "3", "--device", "cpu"])
    assert again.exit_code == 0, again.output
    assert again.output.count("finished") == 1 + 3  # the new one, and the table
    seed = _seed_with_15_first({"model.hidden": [15, 16]})
    where = ["--run", str(tmp_path / "t"), "--device", "cpu"]
    stopped = CliRunner().invoke(app, ["tune", *given[:3], "model.hidden=15,16", "--seed", str(seed), "--minutes", "0.01", *where])
    assert stopped.exit_code == 0, stopped.output
    assert f"the time is over; go on with: carrywave tune --resume --run {tmp_path / 't'} --trials 20" in stopped.output
    refused = CliRunner().invoke(app, ["tune", "a.yaml", "b.yaml", "train.lr=1,2"])
    assert refused.exit_code == 2


def test_gpus_are_dealt_out_and_cores_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(child_runs, "visible", lambda: [0, 1, 2, 3, 4])
    monkeypatch.setattr(child_runs, "cores", lambda: 8)
    name = "CUDA_VISIBLE_DEVICES"
    assert child_runs.places_for(None, "auto", None) == [{name: str(number)} for number in range(5)]
    assert child_runs.places_for(None, "cuda", 2) == [{name: "0,1"}, {name: "2,3"}]
    assert child_runs.places_for(3, "auto", 2) == [{name: "0,1"}, {name: "2,3"}, {name: "0,1"}]
    assert child_runs.places_for(2, "cpu", None) == [{"OMP_NUM_THREADS": "4"}] * 2
    assert child_runs.places_for(None, "cpu", None) == [{}]
    with pytest.raises(PlanError, match="there are 5 GPUs"):
        child_runs.places_for(None, "auto", 6)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(WorkerError, match="start this command once"):
        child_runs.places_for(None, "auto", None)
