"""The weights that are kept are those of the best evaluation, by the metric that the spec names."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import carrywave as cw
from carrywave.errors import SpecError
from carrywave.runs.checkpoint.atomic_files import read_metadata
from carrywave.train import loop as loops
from carrywave.train.evaluations import check_metric, improves, score_of
from carrywave.train.result import Result

SEQUENCES = [([[float(up), float(step)] for step in range(4)], "up" if up else "down") for up in [0, 1] * 10]


def fit(run: Path, *, progress: bool | None = None, **train: Any) -> Result:
    how = {"task": "classification", "batch": {"tokens": 40}, "train": {"lr": 0.01, "weights": "best", **train}}
    return cw.fit({"hidden": 4, "layers": 1, "linear": 0}, SEQUENCES, **how, run=run, progress=progress)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations in which loss and accuracy disagree about which is the best, and one without an accuracy."""
    given = iter([(1.0, 0.5), (2.0, 0.75), (0.5, 0.625), (0.4, math.nan), (0.3, 0.75)])

    def evaluate(*_: Any, **__: Any) -> dict[str, float]:
        loss, accuracy = next(given)
        return {"loss": loss, "accuracy": accuracy, "macro_f1": accuracy}

    monkeypatch.setattr(loops, "evaluate_part", evaluate)


@pytest.mark.parametrize(("best", "epoch"), [("accuracy", 2), ("loss", 5)])
def test_the_metric_decides(best: str, epoch: int, tmp_path: Path, scripted: None) -> None:
    result = fit(tmp_path / "run", best=best, epochs=5)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    step = [row["step"] for row in rows if row["split"] == "valid"][epoch - 1]
    assert read_metadata(tmp_path / "run/weights.safetensors")["step"] == str(step)
    assert result.metrics["valid"]["accuracy"] == 0.75
    assert result.metrics["valid"]["loss"] == (2.0 if best == "accuracy" else 0.3)


def test_early_stopping_looks_at_the_same_metric(tmp_path: Path, scripted: None) -> None:
    assert fit(tmp_path / "run", best="accuracy", epochs=5, early_stop=2).ending == "early"
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert max(row["epoch"] for row in rows) == 4  # the third and the fourth were no better than the second


def test_what_is_not_a_number_is_never_better() -> None:
    nan = {"accuracy": math.nan}
    assert improves("accuracy", nan, None)  # there is nothing else yet
    assert not improves("accuracy", nan, {"accuracy": 0.1})
    assert improves("accuracy", {"accuracy": 0.1}, nan)
    assert not improves("accuracy", {"accuracy": 0.5}, {"accuracy": 0.5})  # the first of equals is kept


def test_a_metric_that_is_missing_is_said() -> None:
    with pytest.raises(SpecError, match=r"train\.best=mase, but the evaluation of valid gives only loss, mae; use one of these"):
        score_of("mase", {"loss": 1.0, "mae": 1.0, "naive_mae": 1.0, "coverage_0.5": 0.5})


class OnlyLoss(nn.Module):
    def loss(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return y.sum(), torch.tensor(1)


def test_a_metric_that_cannot_be_had_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="there are only 2 labels; use accuracy"):
        fit(tmp_path / "run", best="top_5_accuracy")
    assert not (tmp_path / "run").exists()
    model = cw.Model(nn.Linear(2, 2), cw.LSTM(2, 2), OnlyLoss())
    with pytest.raises(SpecError, match="the head has only a loss; add a forward method"):
        check_metric("accuracy", model, ["a", "b"])
    check_metric("loss", model, ["a", "b"])
