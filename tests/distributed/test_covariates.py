"""Forecasts with covariates on several workers: the rows, weights and metrics of one worker, and the same after a stop. Real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

import carrywave as cw
from carrywave.prediction.evaluate import evaluate_run
from carrywave.prediction.predict import predict
from carrywave.spec.load import parse
from carrywave.train.fit import train

sys.path.insert(0, str(Path(__file__).parent))
from _train_jobs import carry_out, rows_of

CLOSE = 1e-9  # sums in another order, in float64, over some dozen steps
PLANS: list[tuple[int, dict[str, Any]]] = [
    (2, {"stages": 2, "chunk_steps": 3}),
    (2, {"replicas": 2}),
    (2, {"stages": 2, "cuts": [1], "micro_batches": 2, "chunk_steps": 4}),
]


def spec(folder: Path, plan: dict[str, Any] | None = None, **steps: Any) -> dict[str, Any]:
    data = {
        "train": str(folder / "sales.csv"),
        "cache": str(folder / "cache"),
        "targets": ["y"],
        "known": ["price", "promo"],
        "categorical": ["promo"],
        "static": ["region", "size"],
        "calendar": ["weekday"],
        "missing": "interpolate",
        "horizon": 3,
        "season": 7,
    }
    return {
        "task": "forecasting",
        "data": data,
        "model": {"hidden": 5, "layers": 2, "dropout": 0.2, "dropout_input": 0.1},
        "batch": {"lanes": 3, "steps": 8},
        "train": {"precision": "fp64", "lr": 0.02, "schedule": "constant", "epochs": 2, "log_every": 3, "evaluate_every": 5, **steps},
        **({"plan": plan} if plan else {}),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("covariates")
    draw = np.random.default_rng(3)
    parts = []
    for name, rows, first in (("p", 70, 1), ("q", 55, 9), ("r", 5, 1)):
        days = pd.date_range(f"2024-01-{first}", periods=rows + 3)
        part = pd.DataFrame({"unique_id": name, "ds": days, "y": draw.normal(size=rows + 3), "price": draw.normal(size=rows + 3)})
        part = part.assign(promo=draw.choice(["none", "tv", "web"], rows + 3), region=name < "q", size=rows)
        part.loc[rows:, "y"] = np.nan
        parts.append(part.drop(index=[2]))
    pd.concat(parts).to_csv(folder / "sales.csv", index=False)
    train(parse(spec(folder)), run=folder / "serial", device="cpu")
    return folder


@pytest.mark.slow
def test_any_plan_gives_the_answer_of_one_device(folder: Path) -> None:
    jobs = [{"run": f"plan{number}", "spec": spec(folder, plan)} for number, (_, plan) in enumerate(PLANS)]
    jobs += [{"evaluate": "serial"}, {"predict": "serial", "data": "sales.csv"}]
    told = carry_out(folder, 2, jobs, "jobs")[0]
    assert not [each["error"] for each in told if "error" in each]
    wanted, weights = rows_of(folder / "serial"), load_file(folder / "serial/weights.safetensors")
    assert {"train_loss", "mae[y]", "rmse[y]"} <= set(next(row for row in wanted if row["split"] == "valid"))
    for number in range(len(PLANS)):
        found = rows_of(folder / f"plan{number}")
        assert [list(row) for row in found] == [list(row) for row in wanted]
        for row, expected in zip(found, wanted, strict=True):
            for key, value in expected.items():
                assert row[key] == (pytest.approx(value, rel=CLOSE, abs=1e-12) if isinstance(value, float) else value), (key, row, expected)
        for name, tensor in load_file(folder / f"plan{number}/weights.safetensors").items():
            torch.testing.assert_close(tensor, weights[name], rtol=CLOSE, atol=1e-12)
    assert any(name.startswith("encoder.tables") for name in weights)
    serial = evaluate_run(folder / "serial", device="cpu")
    for key, value in serial.items():
        assert told[-2]["row"][key] == (pytest.approx(value, rel=CLOSE) if isinstance(value, float) else value), key
    alone = predict(folder / "serial", folder / "sales.csv", device="cpu", note=lambda _: None)
    assert [row["y"] for row in told[-1]["rows"]] == pytest.approx([row["y"] for row in alone], rel=1e-5)  # outputs travel in float32


@pytest.mark.slow
@pytest.mark.parametrize("own", [{"channels": "independent", "standardize": "window"}, {"transform": "log", "channels": "independent"}])
def test_any_plan_reads_columns_alike(folder: Path, tmp_path: Path, own: dict[str, Any]) -> None:
    draw = np.random.default_rng(4)
    values = np.exp(draw.normal(size=(90, 3)) / 4 + np.sin(np.arange(90)[:, None] / [1, 2, 3]))
    pd.DataFrame(values, columns=["a", "b", "c"]).to_csv(tmp_path / "wide.csv", index=False)
    data = {"train": str(tmp_path / "wide.csv"), "cache": str(tmp_path / "cache"), "horizon": 3, "season": 7, **own}
    train(parse(spec(folder) | {"data": data}), run=tmp_path / "serial", device="cpu")
    jobs = [{"run": f"plan{number}", "spec": spec(folder, plan) | {"data": data}} for number, (_, plan) in enumerate(PLANS)]
    jobs += [{"predict": "serial", "data": "wide.csv"}]
    told = carry_out(tmp_path, 2, jobs, "jobs")[0]
    assert not [each["error"] for each in told if "error" in each]
    wanted, weights = rows_of(tmp_path / "serial"), load_file(tmp_path / "serial/weights.safetensors")
    assert {"mae[a]", "mae[c]", "ridge_mae"} <= set(next(row for row in wanted if row["split"] == "valid"))
    for number in range(len(PLANS)):
        found = rows_of(tmp_path / f"plan{number}")
        for row, expected in zip(found, wanted, strict=True):
            for key, value in expected.items():
                assert row[key] == (pytest.approx(value, rel=CLOSE, abs=1e-12) if isinstance(value, float) else value), (key, row, expected)
        for name, tensor in load_file(tmp_path / f"plan{number}/weights.safetensors").items():
            torch.testing.assert_close(tensor, weights[name], rtol=CLOSE, atol=1e-12)
    alone = predict(tmp_path / "serial", tmp_path / "wide.csv", device="cpu", note=lambda _: None)
    for name in ("a", "b", "c"):
        assert [row[name] for row in told[-1]["rows"]] == pytest.approx([row[name] for row in alone], rel=1e-5)


@pytest.mark.slow
def test_a_backtest_on_two_workers_is_that_of_one(folder: Path) -> None:
    """Origins inside gaps, and a series that train does not contain, are read again; workers must agree on which."""
    frame = pd.read_csv(folder / "sales.csv")
    frame = pd.concat([frame, frame[frame["unique_id"] == "p"].assign(unique_id="new")])
    frame.loc[frame["ds"].between("2024-02-15", "2024-03-02"), "price"] = np.nan
    frame.to_csv(folder / "later.csv", index=False)
    found = []
    for workers in ("1", "2"):
        asked = f"backtest serial --data later.csv --origins 4 --devices {workers} --device cpu"
        words = [sys.executable, "-m", "carrywave", *asked.split()]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        found.append(pd.read_csv(folder / "serial" / "backtest.csv"))
    assert len(found[0]) == (4 + 4 + 1) * 3  # q ends earlier, and is forecast from the first origin alone; r from none
    pd.testing.assert_frame_equal(*found, rtol=1e-5)  # outputs travel in float32


@pytest.mark.slow
def test_a_run_that_goes_on_has_the_weights_of_one_in_one_go(folder: Path) -> None:
    train(parse(spec(folder, max_steps=7)), run=folder / "stopped", device="cpu")
    train(parse(spec(folder)), run=folder / "stopped", resume=True, device="cpu")
    at = [row for row in rows_of(folder / "stopped") if row["step"] != 7]  # the end of the first part was evaluated and logged
    wanted = [row for row in rows_of(folder / "serial") if row["step"] != 7]
    # The last snapshots, not the best weights: the evaluation at the stop may find others to be best.
    snapshots = (max(folder.glob(f"{run}/snapshots/step-*")) for run in ("stopped", "serial"))
    found, last = ({file.name: file for file in snapshot.glob("*.safetensors")} for snapshot in snapshots)
    assert found.keys() == last.keys()
    assert last
    for name, file in last.items():
        wanted_tensors, tensors = load_file(file), load_file(found[name])
        assert tensors.keys() == wanted_tensors.keys()
        assert all(tensors[key].equal(tensor) for key, tensor in wanted_tensors.items())
    assert [row["loss"] for row in at if row["split"] == "valid"] == [row["loss"] for row in wanted if row["split"] == "valid"]


@pytest.mark.slow
def test_errors_of_series_steps_and_columns_add_up(folder: Path) -> None:
    row: dict[str, Any] = evaluate_run(folder / "serial", device="cpu", by=("series", "step", "column"))
    [column] = row["by_column"]
    assert (column["mae"], column["rmse"]) == (row["mae[y]"], row["rmse[y]"])
    assert [each["series"] for each in row["by_series"]] == ["p", "q"]
    assert [each["step"] for each in row["by_step"]] == [1, 2, 3]
    for rows in (row["by_series"], row["by_step"]):
        assert sum(each["targets"] for each in rows) == column["targets"]
        mean = sum(each["mae"] * each["targets"] for each in rows) / column["targets"]
        assert mean == pytest.approx(column["mae"], rel=1e-12)


@pytest.mark.slow
def test_what_is_known_ahead_is_used(tmp_path: Path) -> None:
    """Noise that the past says nothing about, but a number and a category that are known ahead say everything."""
    draw = np.random.default_rng(1)
    number, kind = draw.normal(size=400), draw.choice(["a", "b", "c"], 400)
    y = 2 * number + np.array([-2.0, 0.0, 3.0])[np.searchsorted(["a", "b", "c"], kind)]
    frame = pd.DataFrame({"ds": pd.date_range("2024-01-01", periods=400), "y": y, "x": number, "kind": kind})
    covariates = {"known": ["x", "kind"], "categorical": ["kind"]}
    how: dict[str, Any] = {"task": "forecasting", "batch": {"lanes": 8, "steps": 16}, "train": {"epochs": 30, "lr": 0.02}, "device": "cpu"}
    data = {"targets": ["y"], "horizon": 2, **covariates}
    found = cw.fit({"hidden": 16, "layers": 1}, frame, data=data, run=tmp_path / "run", **how).metrics["valid"]
    assert found["mae"] < found["naive_mae"] / 10
