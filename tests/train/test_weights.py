"""Runs whose targets have weights: what is learned and measured, on arrays, frames and a user's own modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import carrywave as cw
from carrywave.errors import UserError
from carrywave.prediction.evaluate import evaluate_run

MODEL = {"hidden": 6, "layers": 1, "dropout": 0.0}
HOW: dict[str, Any] = {"batch": {"tokens": 64}, "train": {"epochs": 2, "lr": 0.05, "precision": "fp64"}}


def arrays(count: int = 24) -> tuple[Any, Any, Any]:
    draw = np.random.default_rng(3)
    weights = draw.uniform(0.0, 3.0, count)
    weights[::4] = 0.0
    return draw.normal(size=(count, 5, 2)), draw.integers(3, size=count), weights


def logits(result: Any, x: Any) -> Tensor:
    """Of all sequences, which have no padding."""
    batch = result.batch(x)
    with torch.no_grad():
        y, state = result.model(batch.inputs, lengths=batch.lengths)
        return result.model.output(y, state, linear=batch.linear)


def test_the_loss_is_weighted_and_other_metrics_are_not(tmp_path: Path) -> None:
    x, y, w = arrays()
    result = cw.fit(MODEL, {"train": (x, y, w), "valid": (x, y, w)}, task="classification", **HOW, run=tmp_path / "run")
    found, out, target = result.metrics["valid"], logits(result, x), torch.from_numpy(y)
    losses = cross_entropy(out, target, reduction="none")
    real = torch.from_numpy(w > 0)
    assert found["loss"] == pytest.approx(float((losses * torch.from_numpy(w)).sum() / w.sum()), rel=1e-6)  # weights are float32
    assert found["unweighted_loss"] == pytest.approx(float(losses[real].mean()), rel=1e-9)
    assert found["accuracy"] == pytest.approx(float((out.argmax(-1) == target)[real].double().mean()))
    plain = cw.fit(MODEL, {"train": (x, y), "valid": (x, y)}, task="classification", **HOW, run=tmp_path / "plain")
    assert "unweighted_loss" not in plain.metrics["valid"]
    ones = cw.fit(MODEL, {"train": (x, y, np.ones(24)), "valid": (x, y)}, task="classification", **HOW, run=tmp_path / "ones")
    assert ones.metrics["valid"]["loss"] == pytest.approx(plain.metrics["valid"]["loss"], rel=1e-9)
    assert abs(found["unweighted_loss"] - plain.metrics["valid"]["loss"]) > 1e-4


def test_targets_of_weight_0_are_not_learned(tmp_path: Path) -> None:
    x, y, w = arrays()
    how = {**HOW, "train": {**HOW["train"], "class_weights": "balanced"}, "data": {"share": 0.0}}
    model = {**MODEL, "init_bias": "frequency"}
    found = []
    for name, targets in (("as they are", y), ("others", np.where(w > 0, y, (y + 1) % 3))):
        result = cw.fit(model, (x, targets, w), task="classification", **how, run=tmp_path / name)
        found.append({name: p.detach() for name, p in result.model.named_parameters()})
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_numbers_and_tags_have_weights(tmp_path: Path) -> None:
    x, _, w = arrays()
    numbers = x[:, -1, :1] * 3.0
    result = cw.fit(MODEL, {"train": (x, numbers, w), "valid": (x, numbers, w)}, task="regression", **HOW, run=tmp_path / "numbers")
    out = logits(result, x)[:, 0]
    scaled = torch.from_numpy((numbers[:, 0] - result.task.codec.target_mean[0]) / result.task.codec.target_std[0])
    expected = ((out - scaled).square() * torch.from_numpy(w)).sum() / w.sum()
    assert result.metrics["valid"]["loss"] == pytest.approx(float(expected), rel=1e-5)  # inputs and weights are float32
    tags = [{"steps": row.tolist(), "labels": [int(step[0] > 0) for step in row], "weight": [1.0, 0.0, 2.0, 0.5, 1.0]} for row in x]
    result = cw.fit(MODEL, {"train": tags, "valid": tags}, task="tagging", data={"weight": "weight"}, **HOW, run=tmp_path / "tags")
    out, target = logits(result, x), torch.from_numpy((x[..., 0] > 0).astype(int)).T
    losses = cross_entropy(out.flatten(0, 1), target.flatten(), reduction="none").view(5, -1)
    weights = torch.tensor([1.0, 0.0, 2.0, 0.5, 1.0]).double()[:, None].expand(5, 24)
    assert result.metrics["valid"]["loss"] == pytest.approx(float((losses * weights).sum() / weights.sum()), rel=1e-6)
    assert result.metrics["valid"]["accuracy"] == pytest.approx(float((out.argmax(-1) == target)[weights > 0].double().mean()))


def test_forecasts_leave_out_rows_of_weight_0(tmp_path: Path) -> None:
    """In the loss, the metrics and the simple forecasts that they are compared with: a spike that has no weight is not seen."""
    rows = 80
    frame = pd.DataFrame({"ds": range(rows), "y": [float(row % 4) for row in range(rows)], "w": 1.0})
    spiked = frame.copy()
    spiked.loc[75, ["y", "w"]] = [1000.0, 0.0]
    how = {"data": {"weight": "w", "split": [60, 20]}, "train": {"epochs": 1}}
    forecaster = cw.Forecaster(2, model=MODEL, run=tmp_path / "run", **how).fit(spiked)  # type: ignore[arg-type]
    assert forecaster.result is not None
    found = forecaster.result.metrics["valid"]
    # Of 20 rows, 18 + 1 origins have 2 targets, less the 2 that are the spike; as an input it is read from row 75 on.
    assert found["last_mae"] < 200
    whole = evaluate_run(tmp_path / "run", data=frame)
    assert whole["last_mae"] < 2
    unweighted = evaluate_run(tmp_path / "run", data=spiked.assign(w=1.0))
    weighted = evaluate_run(tmp_path / "run", data=spiked)
    assert weighted["mae"] < unweighted["mae"]
    assert weighted["naive_mae"] < unweighted["naive_mae"]
    assert len(forecaster.predict(frame.drop(columns="w"))) == 2


def test_every_step_transcriptions_and_distributions_are_weighted(tmp_path: Path) -> None:
    """What a weight of 0 hides does not matter, wherever it is."""
    draw = np.random.default_rng(2)
    rows = [
        {"steps": draw.normal(size=(6, 2)).tolist(), "labels": draw.normal(size=6).tolist(), "weight": [1, 0, 2, 1, 0, 1]} for _ in range(9)
    ]
    spoiled = [
        {**row, "labels": [value + 1e4 * (weight == 0) for value, weight in zip(row["labels"], row["weight"], strict=True)]} for row in rows
    ]
    how = {**HOW, "data": {"each_step": True, "standardize": False, "weight": "weight"}}
    one, other = (
        cw.fit(MODEL, {"train": each, "valid": each}, task="regression", **how, run=tmp_path / name).metrics["valid"]
        for name, each in (("steps", rows), ("spoiled", spoiled))
    )
    assert other["loss"] == pytest.approx(one["loss"], rel=1e-9)
    assert other["mae"] == pytest.approx(one["mae"], rel=1e-9)
    spoken = [{"steps": row["steps"], "labels": "ab"[: 1 + n % 2], "weight": n % 3} for n, row in enumerate(rows)]
    weighted = {**HOW, "data": {"weight": "weight"}}
    hidden = [{**row, "labels": "ba"} if not row["weight"] else row for row in spoken]
    one, other = (
        cw.fit(MODEL, {"train": each, "valid": each}, task="transcription", **weighted, run=tmp_path / name).metrics["valid"]
        for name, each in (("spoken", spoken), ("hidden", hidden))
    )
    assert other == pytest.approx(one, rel=1e-9)
    frame = pd.DataFrame({"ds": range(60), "y": draw.poisson(3.0, 60).astype(float), "w": 1.0})
    frame.loc[58, ["y", "w"]] = [1000.0, 0.0]
    how = {"weight": "w", "split": [40, 20], "distribution": "negative_binomial"}
    forecaster = cw.Forecaster(2, model=MODEL, data=how, train={"epochs": 1}, run=tmp_path / "counts").fit(frame)
    assert forecaster.result is not None
    assert forecaster.result.metrics["valid"]["mae"] < 20


class Own(nn.Module):
    """A head without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)

    pooled = True

    def start(self, lanes: int, dtype: Any = None, device: Any = None) -> tuple[Tensor]:
        return (torch.zeros(lanes, 4, dtype=dtype, device=device),)

    def pool(self, y: Tensor, lengths: Tensor, acc: tuple[Tensor]) -> tuple[Tensor]:
        return (acc[0] + y.sum(0),)

    def loss(self, acc: tuple[Tensor], target: Tensor) -> tuple[Tensor, int]:
        return cross_entropy(self.out(acc[0]), target, reduction="sum"), len(target)


def test_a_users_head_without_weights_is_refused(tmp_path: Path) -> None:
    x, y, w = arrays()
    model = cw.Model(nn.Linear(2, 4), cw.LSTM(4, 4), Own())
    how = {"batch": {"tokens": 64}, "train": {"epochs": 1}, "data": {"share": 0.0}}
    with pytest.raises(UserError, match="the batch has weights, but the loss of the head Own takes none; give it a keyword weights=None"):
        cw.fit(model, (x, y, w), task="classification", **how, run=tmp_path / "run")
    cw.fit(model, (x, y), task="classification", **how, run=tmp_path / "plain")
