"""The file of the best weights after a resume: it is that of the best evaluation that the snapshot knows of, not of a later one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from carrywave.errors import RunError
from carrywave.runs.watcher import Silent
from carrywave.spec.load import parse
from carrywave.spec.spec import Spec
from carrywave.train.fit import train

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
