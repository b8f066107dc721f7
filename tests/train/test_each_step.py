"""Regression at every step from the table to the prediction: synthetic catchments, rows with gaps, all that a run is asked for."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

import carrywave as cw
from _catchments import catchments
from carrywave.cli.main import app
from carrywave.errors import UserError
from carrywave.prediction.evaluate import evaluate_run
from carrywave.prediction.predict import predict
from carrywave.spec.load import parse

STATIC = ["quick", "fast", "slow"]


def sections(folder: Path, **data: Any) -> dict[str, Any]:
    asked = {"each_step": True, "train": str(folder / "rivers.csv"), "cache": str(folder / "cache"), "series": "basin", "targets": ["flow"]}
    return {
        "task": "regression",
        "data": {**asked, "static": STATIC, "split": [160, 40, 40], "warmup": 10, "season": 20, **data},
        "model": {"hidden": 6, "dropout": 0.0},
        "batch": {"lanes": 3, "steps": 16},
        "train": {"epochs": 2, "lr": 0.02, "loss": "nse", "best": "nse_median"},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rivers")
    catchments(3, 240).to_csv(folder / "rivers.csv", index=False)
    cw.fit(None, None, spec=parse(sections(folder)), run=folder / "run", device="cpu")
    return folder


def test_what_a_run_says(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    for split in ("valid", "test"):
        found = next(row for row in rows if row["split"] == split)
        assert {"loss", "mae", "rmse", "nse_median", "kge_median"} <= found.keys()


def test_a_row_for_each_step(folder: Path) -> None:
    given = pd.read_csv(folder / "rivers.csv")
    rows = predict(folder / "run", folder / "rivers.csv", device="cpu")
    assert [(row["basin"], row["date"]) for row in rows] == list(zip(given.basin, given.date, strict=True))
    without = predict(folder / "run", given.drop(columns="flow").sample(frac=1.0, random_state=1), device="cpu")
    assert {(row["basin"], row["date"]): row["flow"] for row in without} == pytest.approx(
        {(row["basin"], row["date"]): row["flow"] for row in rows}, rel=1e-5
    )  # targets are not read, and the order of rows does not matter
    called = CliRunner().invoke(
        app, ["predict", str(folder / "run"), str(folder / "rivers.csv"), "--device", "cpu", "-o", str(folder / "out.csv")]
    )
    assert called.exit_code == 0, called.output
    written = pd.read_csv(folder / "out.csv")
    assert list(written) == ["basin", "date", "flow"]
    np.testing.assert_allclose(written.flow, [row["flow"] for row in rows], rtol=1e-5)
    with pytest.raises(UserError, match="is for rows, but predictions for series have their names and times anyway"):
        predict(folder / "run", given, keep="rain", device="cpu")


def test_an_evaluation_is_that_of_the_predictions(folder: Path) -> None:
    found = evaluate_run(folder / "run", device="cpu", by=["series", "column"])
    given = pd.read_csv(folder / "rivers.csv").assign(
        estimate=[row["flow"] for row in predict(folder / "run", folder / "rivers.csv", device="cpu")]
    )
    tested = given.groupby("basin").tail(40).dropna()
    wanted = {}
    for basin, own in tested.groupby("basin"):
        wanted[basin] = 1 - ((own.estimate - own.flow) ** 2).sum() / ((own.flow - own.flow.mean()) ** 2).sum()
    # A prediction starts with the first row, an evaluation of a part with the rows before it that warm up the carry.
    assert {row["series"]: row["nse"] for row in found["by_series"]} == pytest.approx(wanted, abs=2e-3)
    assert found["nse_median"] == pytest.approx(np.median([row["nse"] for row in found["by_series"]]))
    assert [row["column"] for row in found["by_column"]] == ["flow"]
    with pytest.raises(UserError, match=r"by label.*; use column, series"):
        evaluate_run(folder / "run", device="cpu", by=["label"])


def test_the_nse_loss_is_one_minus_the_nse_with_large_deviations(folder: Path) -> None:
    """The loss of a single series is its mean square error over (deviation in train + 0.1)²."""
    frame = catchments(1, 200, holes=0.2)
    asked = sections(folder, split=[150, 50], warmup=0) | {"train": {"epochs": 1, "loss": "nse"}}
    del asked["data"]["train"]
    result = cw.fit(None, frame, spec=parse(asked), run=folder / "single", device="cpu")
    codec = result.task.codec
    spread = frame.flow[:150].std(ddof=0) / codec.target_std[0]
    rmse = result.metrics["valid"]["rmse"] / codec.target_std[0]
    assert result.metrics["valid"]["loss"] == pytest.approx(rmse**2 / (spread + 0.1) ** 2, rel=1e-5)


def test_rows_with_gaps(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    rows = []
    for _ in range(40):
        steps = draw.normal(size=(12, 2))
        labels = np.cumsum(steps[:, 0]) / 3
        holes = draw.random((12, 2)) < 0.2
        seen = [[None if hole else value for value, hole in zip(*pair, strict=True)] for pair in zip(steps.tolist(), holes, strict=True)]
        rows.append({"steps": seen, "labels": [None if draw.random() < 0.3 else [value, -value] for value in labels.tolist()]})
    for row in rows:
        row["labels"] = [[None, None] if label is None else label for label in row["labels"]]
    how = {"task": "regression", "data": {"each_step": True, "missing": "mask"}, "train": {"epochs": 2}}
    result = cw.fit({"hidden": 8}, rows, run=tmp_path / "run", device="cpu", **how)
    assert {"nse_median[label 0]", "rmse[label 1]"} <= result.metrics["valid"].keys()
    found = predict(tmp_path / "run", rows[:2], device="cpu")
    assert len(found) == 24
    assert list(found[0]) == ["unique_id", "step", "label 0", "label 1"]
    with pytest.raises(UserError, match=r"data.missing=mask, which counts the steps"):
        result.stepper()


def test_a_batch_without_targets_changes_nothing(tmp_path: Path) -> None:
    frame = catchments(1, 120, holes=0.0)
    frame.loc[30:, "flow"] = np.nan
    frame.loc[110:, "flow"] = 1.0
    asked = sections(tmp_path, split=[100, 20], warmup=0, static=None) | {"batch": {"lanes": 1, "steps": 10}}
    asked["train"] = {"epochs": 1, "optimizer": "sgd", "lr": 0.1}
    del asked["data"]["train"]
    result = cw.fit(None, frame, spec=parse(asked), run=tmp_path / "run", device="cpu")
    assert all(torch.isfinite(p).all() for p in result.model.parameters())


@pytest.mark.slow
def test_a_catchment_is_learned_better_than_by_a_line(tmp_path: Path) -> None:
    """The NSE of the median basin in the last part is above 0.9, and above that of a linear regression on 30 days of weather."""
    os.environ["OMP_NUM_THREADS"] = "1"
    frame = catchments(8, 1000)
    asked = sections(tmp_path, split=[700, 100, 200], warmup=60)
    asked |= {"model": {"hidden": 32, "dropout": 0.0}, "batch": {"lanes": 8, "steps": 60}}
    asked["train"] = {"epochs": 25, "lr": 0.01, "loss": "nse", "best": "nse_median"}
    del asked["data"]["train"]
    result = cw.fit(None, frame, spec=parse(asked), run=tmp_path / "run", device="cpu")
    line = []
    for _, own in frame.groupby("basin"):  # a line for each basin, which knows it better than one for all could
        weather = own[["rain", "warmth"]].to_numpy()
        lags = np.concatenate([np.ones((len(own), 1)), *(np.roll(weather, lag, axis=0) for lag in range(30))], axis=1)
        flow = own.flow.to_numpy()
        trained = np.flatnonzero(~np.isnan(flow[:700]))
        trained = trained[trained >= 60]
        weights = np.linalg.lstsq(lags[trained], flow[trained], rcond=None)[0]
        tested = 800 + np.flatnonzero(~np.isnan(flow[800:]))
        line.append(1 - ((lags[tested] @ weights - flow[tested]) ** 2).sum() / ((flow[tested] - flow[tested].mean()) ** 2).sum())
    assert result.metrics["test"]["nse_median"] > max(0.9, float(np.median(line)))
