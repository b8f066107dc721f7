"""Targets of weight 0: whatever they hold, nothing is learned of it, and no metric, scale or comparison sees it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import carrywave as cw
from carrywave.data.prepare import from_python
from carrywave.data.sequences import Sequences
from carrywave.errors import DataError
from carrywave.spec.load import parse
from carrywave.tasks.first_weights import class_counts, label_counts
from carrywave.tasks.mase_scale import change
from carrywave.tasks.ridge import fit_line
from carrywave.train.backtest import Rolling, backtest_run

MODEL = {"hidden": 6, "layers": 1, "dropout": 0.0}
DRAW = np.random.default_rng(7)
STEPS = [DRAW.normal(size=(4 + n % 4, 2)).tolist() for n in range(40)]


def rows_with(held: Any, *, each_step: bool) -> list[dict[str, Any]]:
    """Rows of which a third of the targets have weight 0, and hold something else."""
    rows = []
    for number, steps in enumerate(STEPS):
        if each_step:
            weights = [float((number + place) % 3) for place in range(len(steps))]
            labels = [held if not weight else 2.0 * step[0] + 1.0 for step, weight in zip(steps, weights, strict=True)]
            rows.append({"steps": steps, "labels": labels, "weight": weights})
        else:
            rows.append({"steps": steps, "label": held if not number % 3 else steps[0][0] + 3.0, "weight": float(number % 3)})
    return rows


@pytest.mark.parametrize(("each_step", "loss"), [(False, "mse"), (True, "mse"), (True, "nse")])
def test_numbers_of_weight_0_may_be_anything(each_step: bool, loss: str, tmp_path: Path) -> None:
    found = []
    for name, held in (("some", 1.0), ("none", -999.0)):
        rows = rows_with(held, each_step=each_step)
        how = {"data": {"each_step": each_step, "weight": "weight"}, "train": {"epochs": 2, "loss": loss, "precision": "fp64"}}
        how["batch"] = {"lanes": 4, "steps": 8} if each_step else {"tokens": 64}
        result = cw.fit(MODEL, {"train": rows[:30], "valid": rows[30:]}, task="regression", **how, run=tmp_path / name)
        found.append((json.loads((tmp_path / name / "codec.json").read_text()), result.metrics))
    assert found[0] == found[1]


@pytest.mark.parametrize("part", ["train", "valid", "test"])
def test_a_part_of_rows_of_weight_0_is_refused_before_training(part: str, tmp_path: Path) -> None:
    rows = [{"steps": steps, "label": "up" if steps[0][0] > 0 else "down", "weight": 1.0} for steps in STEPS]
    parts = {"train": rows[:20], "valid": rows[20:30], "test": rows[30:]}
    parts[part] = [row | {"weight": 0.0} for row in parts[part]]
    with pytest.raises(DataError, match=r"is 0, so nothing could be learned or measured"):
        cw.fit(MODEL, parts, task="classification", data={"weight": "weight"}, train={"epochs": 1}, run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_held_out_rows_of_weight_0_are_refused_before_training(tmp_path: Path) -> None:
    rows = [{"steps": steps, "label": steps[0][0], "weight": float(number == 0)} for number, steps in enumerate(STEPS)]
    with pytest.raises(DataError, match=r"valid: every weight in it is 0, so nothing could be learned or measured"):
        cw.fit(MODEL, rows, task="regression", data={"weight": "weight"}, train={"epochs": 1, "seed": 1}, run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_loss_shown_of_a_step_is_a_mean_however_small_the_weights(tmp_path: Path) -> None:
    shown: list[list[float]] = []

    class Losses(cw.Callback):
        def on_step(self, at: cw.Moment) -> None:
            shown[-1].append(at.loss)

    for weight in (1.0, 1e-3):
        shown.append([])
        rows = [{"steps": steps, "label": steps[0][0], "weight": weight} for steps in STEPS]
        how = {"data": {"weight": "weight"}, "train": {"epochs": 1, "precision": "fp64"}, "batch": {"tokens": 32}, "callbacks": [Losses()]}
        cw.fit(MODEL, {"train": rows[:30], "valid": rows[30:]}, task="regression", **how, run=tmp_path / f"{weight}")
    assert shown[0] == pytest.approx(shown[1], rel=1e-6)  # weights are float32
    assert min(shown[0]) > 0.0


def test_series_whose_targets_all_have_weight_0_are_left_out() -> None:
    frame = pd.concat(
        [pd.DataFrame({"unique_id": name, "x": np.arange(9.0), "y": np.arange(9.0), "w": w}) for name, w in (("a", 1.0), ("b", 0.0))]
    )
    spec = parse({"task": "regression", "data": {"each_step": True, "targets": ["y"], "weight": "w", "share": 0.0}})
    found = from_python(frame, spec)
    assert found.train.names == ("a",)
    assert any("1 of 2 series have no target in train" in note for note in found.notes)


@pytest.mark.parametrize("multi", [False, True])
def test_rows_of_weight_0_change_no_first_weight(multi: bool) -> None:
    spec = parse({"task": "classification", "data": {"share": 0.0, "multi_label": multi, "weight": "weight"}})
    rows = [{"text": "ab"[n % 2], "label": ["x"] * (n % 3 > 0) if multi else "xy"[n % 3 > 0], "weight": 1.0 + n} for n in range(6)]
    more = [{"text": "a", "label": ["x"] if multi else "x", "weight": 0.0}] * 50
    counts = [
        label_counts(data) if multi else class_counts("classification", data, 2)
        for data in (from_python(each, spec).train for each in (rows, rows + more))
    ]
    np.testing.assert_allclose(counts[0], counts[1])


def test_valid_rows_of_weight_0_are_not_enough_to_choose_weights_by(tmp_path: Path) -> None:
    rows = [{"steps": [[float(n % 2)]], "label": n % 2, "weight": float(n % 10 == 0)} for n in range(150)]
    train = [{**row, "weight": 1.0} for row in rows]
    kept = []
    for number, valid in enumerate((rows, train)):
        how = {"data": {"weight": "weight"}, "train": {"epochs": 1}}
        cw.fit(MODEL, {"train": train, "valid": valid}, task="classification", **how, run=tmp_path / str(number))
        kept.append("weights: last" in (tmp_path / str(number) / "spec.yaml").read_text())
    assert kept == [True, False]


def table(rows: int = 60, seed: int = 3) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    values = 20.0 + np.sin(np.arange(rows) / 2.0) * 4.0 + draw.normal(size=rows)
    return pd.DataFrame({"ds": pd.date_range("2026-01-01", periods=rows), "y": values, "w": (draw.random(rows) > 0.3).astype(float)})


def fitted(frame: pd.DataFrame, folder: Path, **data: Any) -> Path:
    frame.to_csv(folder / "table.csv", index=False)
    how: dict[str, Any] = {"weight": "w", "horizon": 3, "split": [0.6, 0.2, 0.2], **data}
    train = {"epochs": 1, "lr": 0.01, "precision": "fp64"}
    cw.fit(MODEL, str(folder / "table.csv"), task="forecasting", data=how, batch={"lanes": 1, "steps": 12}, train=train, run=folder / "run")
    return folder / "run"


def test_a_backtest_does_not_score_days_of_weight_0(tmp_path: Path) -> None:
    frame = table()
    run = fitted(frame, tmp_path)
    for given in (None, str(tmp_path / "table.csv"), frame):
        found = backtest_run(run, given, Rolling(origins=4), "cpu", lambda _: None)
        truth, made, naive = (
            np.array([getattr(each, name) for each in found.forecasts])[..., 0] for name in ("truth_HC", "forecast_HCQ", "naive_HC")
        )
        counted = np.array([frame.w[each.known : each.known + 3] for each in found.forecasts]) > 0
        assert 0 < counted.sum() < counted.size
        made = made.reshape(truth.shape)
        assert found.scores[0]["mae_in_units"] == pytest.approx(np.abs(made - truth)[counted].mean())
        assert found.scores[0]["naive_mae_in_units"] == pytest.approx(np.abs(naive - truth)[counted].mean())


def series_of(weights: list[float]) -> Sequences:
    rows = np.random.default_rng(1).normal(size=(len(weights), 1)).astype(np.float32)
    return Sequences(rows, np.array([0]), np.array([len(rows)]), step_weights=np.array(weights, np.float32))


def test_the_line_learns_nothing_from_weight_0_and_twice_from_weight_2() -> None:
    one, weights = np.array([0]), [float(n % 7 > 0) for n in range(80)]
    data = series_of(weights)
    line = fit_line(data, one, 2, 2)
    values = data.inputs[:, 0].astype(np.float64)
    for ahead in (1, 2):
        origins = [row for row in range(1, 78) if weights[row + ahead]]
        read = np.array([[values[row - 1] - values[row], 0.0, 1.0] for row in origins])
        solved = np.linalg.lstsq(read, np.array([values[row + ahead] - values[row] for row in origins]), rcond=None)[0]
        np.testing.assert_allclose(line.weights_CNK[0, 0, ahead - 1], solved[0], rtol=0.15)  # with a small penalty
        np.testing.assert_allclose(line.bias_CK[0, ahead - 1], solved[2], atol=0.02)
    ones, twos, none = (
        fit_line(Sequences(data.inputs, data.starts, data.lengths, step_weights=each), one, 2, 2)
        for each in (np.ones(80), np.full(80, 2.0), None)
    )
    for each in (ones, twos):
        np.testing.assert_allclose(each.weights_CNK, none.weights_CNK, rtol=1e-9)


def test_the_seasonal_change_within_train_leaves_out_rows_of_weight_0() -> None:
    rows = np.array([[1.0], [2.0], [900.0], [4.0], [6.0]])
    assert change(rows, 1, np.array([0]), real=np.array([True, True, False, True, True])[:, None]).tolist() == [1.5]
    assert change(rows, 1, np.array([0]), real=np.array([True, False, True, False, True])[:, None]).tolist() == [0.0]
