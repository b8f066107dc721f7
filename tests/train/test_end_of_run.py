"""The end of a run: where it is over, where it is to end before where it stands, and where it is asked to stop in an evaluation."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from carrywave.errors import RunError
from carrywave.runs.watcher import Silent, StepInfo
from carrywave.spec.load import load, parse
from carrywave.spec.spec import Spec
from carrywave.train import progress
from carrywave.train.fit import Result, train

TEXT = "the carry is passed along, and work moves through layers and time as a wave. " * 8


class Watch(Silent):
    """Listens; and asks the process to stop at the first sight of an evaluation of this part."""

    def __init__(self, stop_in: str = "") -> None:
        self.stop_in = stop_in
        self.lines: list[str] = []
        self.rows: list[dict[str, object]] = []
        self.infos: list[StepInfo] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    def evaluated(self, row: Any) -> None:
        self.rows.append(dict(row))

    def step(self, info: StepInfo) -> None:
        self.infos.append(info)
        if info.phase == self.stop_in:
            self.stop_in = ""
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(autouse=True)
def _tell_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "TICK_SECONDS", 0.0)


def spec(folder: Path, **train: Any) -> Spec:
    for name, text in (("train", TEXT), ("test", TEXT[::-1])):
        if not (folder / f"{name}.txt").exists():
            (folder / f"{name}.txt").write_text(text)
    return parse(
        {
            "data": {"train": str(folder / "train.txt"), "test": str(folder / "test.txt")},
            "model": {"hidden": 4, "layers": 1},
            "batch": {"lanes": 4, "steps": 8, "eval_lanes": 1},
            "train": {"epochs": 2, "log_every": 10, **train},
        }
    )


def rows(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def go(asked: Spec, run: Path, watch: Watch | None = None, **how: Any) -> Result:
    return train(asked, run=run, device="cpu", watch=watch or Watch(), **how)


def state(run: Path) -> dict[str, bytes]:
    names = ("spec.yaml", "plan.json", "codec.json", "facts.json", "metrics.jsonl", "weights.safetensors")
    return {name: (run / name).read_bytes() for name in names}


def test_a_run_that_is_over_keeps_its_files_and_says_so(tmp_path: Path) -> None:
    asked, run = spec(tmp_path), tmp_path / "run"
    result = go(asked, run)
    before = state(run)
    for changed, why in (
        (asked, "train.epochs=2"),
        (spec(tmp_path, max_steps=7, log_every=99), "train.max_steps=7"),
        (spec(tmp_path, epochs=1), "train.epochs=1"),
    ):
        watch = Watch()
        again = go(changed, run, watch, resume=True)
        step = rows(run)[-1]["step"]
        assert watch.lines == [f"nothing is left to train: the run ended at step {step} with {why}; raise it to continue training"]
        assert (again.ending, again.metrics) == ("done", result.metrics)
        assert state(run) == before
    longer = Watch()
    go(spec(tmp_path, epochs=3), run, longer, resume=True)
    assert longer.lines[0] == f"resuming from step {step} (epoch 3)"
    assert load(run / "spec.yaml").train.epochs == 3


def test_a_run_that_stands_beyond_its_new_end_trains_no_further(tmp_path: Path) -> None:
    run, watch = tmp_path / "run", Watch("valid")
    assert go(spec(tmp_path, evaluate_every=15), run, watch).ending == "terminated"
    assert go(spec(tmp_path, evaluate_every=15, max_steps=12), run, resume=True).ending == "done"
    assert [(row["split"], row["step"]) for row in rows(run)] == [("train", 10), ("train", 15), ("valid", 15), ("test", 15)]
    assert load(run / "spec.yaml").train.max_steps is None  # what was trained by it


@pytest.mark.parametrize(
    ("part", "case"),
    [
        ("valid", {}),
        ("valid", {"evaluate_every": 10}),
        pytest.param("valid", {"max_steps": 13}, marks=pytest.mark.slow),
        pytest.param("valid", {"early_stop": 1, "evaluate_every": 5, "lr": 1e-9}, marks=pytest.mark.slow),
        ("test", {}),
    ],
)
def test_a_stop_in_an_evaluation_is_a_stop_like_any_other(part: str, case: dict[str, Any], tmp_path: Path) -> None:
    asked = spec(tmp_path, **case)
    whole = go(asked, tmp_path / "whole")
    left = go(asked, tmp_path / "left", Watch(part))
    assert (left.ending, left.metrics) == ("terminated", {})
    assert part not in [row["split"] for row in rows(tmp_path / "left")]
    again = go(asked, tmp_path / "left", resume=True)
    assert (again.ending, again.metrics) == (whole.ending, whole.metrics)
    assert state(tmp_path / "left") == state(tmp_path / "whole")
    history = [json.loads(line) for line in (tmp_path / "left" / "history.jsonl").read_text().splitlines()]
    assert [row.get("ending", row["event"]) for row in history] == ["start", "terminated", "start", whole.ending]


def test_the_test_row_names_the_end_and_the_step_of_the_weights(tmp_path: Path) -> None:
    watch = Watch()
    go(spec(tmp_path, evaluate_every=5, lr=0.5, optimizer="sgd"), tmp_path / "run", watch)
    valid = {row["step"]: row["loss"] for row in rows(tmp_path / "run") if row["split"] == "valid"}
    last = rows(tmp_path / "run")[-1]
    best = min(valid, key=lambda step: valid[step])
    assert (last["split"], last["step"], last["weights_step"]) == ("test", max(valid), best)
    assert watch.rows[-1]["weights_step"] == best
    assert all("weights_step" not in row for row in watch.rows[:-1])


def test_rows_say_of_how_many_steps_they_are_the_mean(tmp_path: Path) -> None:
    go(spec(tmp_path), tmp_path / "run")
    found = [row for row in rows(tmp_path / "run") if row["split"] == "train"]
    steps = [row["step"] for row in found]
    assert [row["steps"] for row in found] == [b - a for a, b in zip([0, *steps], steps, strict=False)]
    assert len({row["steps"] for row in found}) > 1  # an epoch's end cuts a span short
    train = len(TEXT) * 9 // 10
    assert sum(row["targets"] for row in found) == pytest.approx(2 * train, abs=2 * 4)  # the last of each lane has none


def test_weights_of_another_vocabulary_are_what_is_recorded(tmp_path: Path) -> None:
    words = spec(tmp_path, epochs=1)
    words = words.model_copy(update={"data": words.data.model_copy(update={"tokens": "word", "min_count": 2})})
    go(words, tmp_path / "words")
    asked = {"data": {"train": str(tmp_path / "train.txt")}, "model": {"hidden": 4, "layers": 1}, "batch": {"lanes": 4, "steps": 8}}
    fine = parse(asked | {"train": {"epochs": 1}})
    go(fine, tmp_path / "fine", init=str(tmp_path / "words"))
    found = load(tmp_path / "fine" / "spec.yaml").data
    assert (found.tokens, found.min_count) == ("word", 2)
    assert json.loads((tmp_path / "fine" / "codec.json").read_text())["kind"] == "word"
    assert go(load(tmp_path / "fine" / "spec.yaml", ["train.epochs=2"]), tmp_path / "fine", resume=True).ending == "done"
    longer = parse(asked | {"train": {"epochs": 3}})
    assert go(longer, tmp_path / "fine", resume=True).ending == "done"
    (tmp_path / "words").rename(tmp_path / "moved")
    longest = parse(asked | {"train": {"epochs": 4}})
    assert go(longest, tmp_path / "fine", resume=True, init=str(tmp_path / "words")).ending == "done"  # as --continue and restarts have it
    (tmp_path / "moved").rename(tmp_path / "words")
    other = parse({**asked, "data": {**asked["data"], "tokens": "char"}})
    with pytest.raises(RunError, match=r"was started with data.tokens=word, not char"):
        go(other, tmp_path / "fine", resume=True)
    message = r"data.tokens=char, but the weights of .*words were trained with data.tokens=word, .*; remove data.tokens, or remove init="
    with pytest.raises(RunError, match=message):
        go(other, tmp_path / "other", init=str(tmp_path / "words"))
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("accumulate", [1, 3])
def test_progress_counts_to_the_last_batch_that_is_taken(tmp_path: Path, accumulate: int) -> None:
    watch = Watch()
    go(spec(tmp_path, max_steps=4, accumulate=accumulate, epochs=1), tmp_path / "run", watch)
    shown = [(info.step, info.steps) for info in watch.infos if info.phase == "train"]
    assert shown == [(step * accumulate, 4 * accumulate) for step in (1, 2, 3, 4)]
