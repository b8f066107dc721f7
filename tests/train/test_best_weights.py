"""The file of the best weights after a resume: it is that of the best evaluation that the snapshot knows of, not of a later one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from carrywave.errors import Diverged, RunError
from carrywave.runs.checkpoint import own_weights
from carrywave.runs.run_source import weights_file
from carrywave.runs.trained_run import open_run
from carrywave.runs.watcher import Silent
from carrywave.spec.load import parse
from carrywave.spec.spec import Spec
from carrywave.train.checkpointer import Checkpointer
from carrywave.train.evaluations import improves
from carrywave.train.fit import train
from carrywave.train.loop import Loop
from carrywave.train.loop_state import LoopState

TEXT = "the carry is passed along, and work moves through layers and time as a wave. " * 8


class Watch(Silent):
    """Listens."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def spec(folder: Path, **train: Any) -> Spec:
    (folder / "train.txt").write_text(TEXT)
    (folder / "valid.txt").write_text(TEXT)
    files = {"train": "train.txt", "valid": "valid.txt", "test": "valid.txt"}
    return parse(
        {
            "data": {part: str(folder / name) for part, name in files.items()},
            "model": {"hidden": 4, "layers": 1},
            "batch": {"lanes": 4, "steps": 8, "eval_lanes": 1},
            "train": {"epochs": 2, "evaluate_every": 5, "snapshot_every": 3, "keep": 50, "lr": 0.01, **train},
        }
    )


def rows(run: Path, split: str) -> list[dict[str, Any]]:
    return [row for line in (run / "metrics.jsonl").read_text().splitlines() if (row := json.loads(line))["split"] == split]


@pytest.mark.parametrize("case", [{}, {"ema": 0.9}])
@pytest.mark.parametrize("step", [15, 18])
def test_a_run_that_goes_on_from_an_older_snapshot_has_the_best_weights_of_then(step: int, case: dict[str, Any], tmp_path: Path) -> None:
    run, watch = tmp_path / "run", Watch()
    train(spec(tmp_path, **case), run=run, device="cpu", watch=Watch())
    assert rows(run, "test")[0]["weights_step"] > 20
    (run / "snapshots" / "last").write_text(f"step-{step:08d}\n")
    train(spec(tmp_path, max_steps=15, **case), run=run, device="cpu", watch=watch, resume=True)
    best = min(rows(run, "valid"), key=lambda row: row["loss"])
    [test] = rows(run, "test")
    # The same data: the best weights have the same loss on it.
    assert (test["weights_step"], test["loss"]) == (best["step"], best["loss"])
    assert any(
        line.endswith("does not hold the best weights so far, which are of step 15: they were restored from their snapshot")
        for line in watch.lines
    )


def test_best_weights_that_are_gone_are_not_replaced_by_later_ones(tmp_path: Path) -> None:
    run, watch = tmp_path / "run", Watch()
    train(spec(tmp_path), run=run, device="cpu", watch=Watch())
    (run / "snapshots" / "last").write_text("step-00000018\n")
    shutil.rmtree(run / "snapshots" / "step-00000015")
    with pytest.raises(
        RunError, match="which are of step 15, and their snapshot is gone; resume from another snapshot, or restore the file"
    ):
        train(spec(tmp_path, max_steps=15, evaluate_every=1000, snapshot_every=1000), run=run, device="cpu", watch=watch, resume=True)
    train(spec(tmp_path, max_steps=19, evaluate_every=1000), run=run, device="cpu", watch=watch, resume=True)
    assert any(line.endswith("their snapshot is gone: the next evaluation counts as the best") for line in watch.lines)
    assert rows(run, "test")[0]["weights_step"] == 19


def test_damaged_best_weights_are_restored_from_their_snapshot(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(spec(tmp_path), run=run, device="cpu", watch=Watch())
    whole = (run / "weights.safetensors").read_bytes()
    (run / "weights.safetensors").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    train(spec(tmp_path), run=run, device="cpu", watch=Watch(), resume=True)
    assert (run / "weights.safetensors").read_bytes() == whole


def test_the_weights_of_another_run_are_refused_and_restored(tmp_path: Path) -> None:
    """Of the same shapes, the same number of steps, and with a checksum of their own."""
    run, other, watch = tmp_path / "run", tmp_path / "other", Watch()
    train(spec(tmp_path), run=run, device="cpu", watch=Watch())
    train(spec(tmp_path, seed=2), run=other, device="cpu", watch=Watch())
    own = (run / "weights.safetensors").read_bytes()
    metrics = (run / "metrics.jsonl").read_bytes()
    assert rows(run, "test")[0]["weights_step"] == rows(other, "test")[0]["weights_step"]
    shutil.copy(other / "weights.safetensors", run)
    for used in (lambda: open_run(run, "cpu"), lambda: weights_file(str(run))):
        with pytest.raises(RunError, match=r"is from another run, or the first row of metrics\.jsonl was changed"):
            used()
    assert weights_file(str(run / "weights.safetensors")).is_file()  # as a file, anybody's
    train(spec(tmp_path), run=run, device="cpu", watch=watch, resume=True)
    assert (run / "weights.safetensors").read_bytes() == own
    assert (run / "metrics.jsonl").read_bytes() == metrics
    assert any(line.endswith("they were restored from their snapshot") for line in watch.lines)
    (run / "metrics.jsonl").unlink()  # of a folder with only the weights, nothing can be said
    open_run(run, "cpu")


def test_going_back_behind_the_best_evaluation_gives_the_weights_of_the_best_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of that evaluation there is no snapshot (a full disk, say): its rows are gone, and its weights are not those of the step before."""
    save, step = Checkpointer.save, Loop._step
    met = list[int]()

    def full(self: Checkpointer, state: LoopState, *, final: bool = False) -> None:
        if met or state.step < 8:
            save(self, state, final=final)

    def bad(self: Loop, *given: Any) -> Any:
        if self.state.step == 12 and not met:
            met.append(12)
            raise Diverged("the loss is no longer finite at step 12; lower train.lr")
        return step(self, *given)

    def better(metric: str, values: Any, best: Any) -> bool:
        return not met and improves(metric, values, best)

    monkeypatch.setattr(Checkpointer, "save", full)
    monkeypatch.setattr(Loop, "_step", bad)
    monkeypatch.setattr("carrywave.train.loop.improves", better)
    run = tmp_path / "run"
    train(spec(tmp_path, on_nan="back", max_steps=20), run=run, device="cpu", watch=Watch())
    [test] = rows(run, "test")
    [kept] = [row["loss"] for row in rows(run, "valid") if row["step"] == test["weights_step"]]
    assert (test["weights_step"], test["loss"]) == (5, kept)
    own_weights.check(run / "weights.safetensors")
