"""The loss in training that stands beside that of an evaluation: over all targets since the one before, however rows are logged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from carrywave.runs.watcher import Silent
from carrywave.spec.load import parse
from carrywave.train.fit import train
from carrywave.train.loop_state import LoopState


def test_sums_that_are_not_yet_written_count_once() -> None:
    state = LoopState.start(torch.device("cpu"))
    state.sums = torch.tensor([6.0, 4.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    state.logged()
    state.sums = torch.tensor([2.0, 4.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    assert state.train_loss() == 1.0
    assert state.train_loss() is None
    state.sums = state.sums + torch.tensor([3.0, 2.0, 0.0, 1.0, 0.0], dtype=torch.float64)  # two more targets before the row is written
    state.logged()
    again = LoopState.of_json(json.loads(json.dumps(state.to_json())), torch.device("cpu"))
    assert again.train_loss() == state.train_loss() == 1.5


def test_beside_each_evaluation_on_the_console_and_in_the_rows(tmp_path: Path) -> None:
    class Shown(Silent):
        rows: list[dict[str, Any]] = []  # noqa: RUF012

        def evaluated(self, row: Any) -> None:
            self.rows.append(dict(row))

    (tmp_path / "t.txt").write_text("the carry is passed along. " * 20)
    spec = parse(
        {
            "data": {"train": str(tmp_path / "t.txt"), "test": str(tmp_path / "t.txt"), "cache": str(tmp_path / "cache")},
            "model": {"hidden": 4, "layers": 1},
            "batch": {"lanes": 4, "steps": 10},
            "train": {"epochs": 2, "log_every": 3, "precision": "fp64"},
        }
    )
    train(spec, run=tmp_path / "run", device="cpu", watch=(shown := Shown()))
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    for row in (row for row in rows if row["split"] == "valid"):
        logged = [each for each in rows if each["split"] == "train" and each["epoch"] == row["epoch"]]
        assert len(logged) > 2
        mean = sum(each["loss"] * each["targets"] for each in logged) / sum(each["targets"] for each in logged)
        assert row["train_loss"] == pytest.approx(mean, rel=1e-12)
    assert [row.get("train_loss") for row in shown.rows] == [row.get("train_loss") for row in rows if row["split"] != "train"]
    assert "train_loss" not in shown.rows[-1]  # of test
