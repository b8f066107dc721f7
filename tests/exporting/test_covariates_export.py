"""Forecasts with covariates in every format: fed as examples/exported_forecast.py does, they say what `carrywave predict` says."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

import carrywave as cw
from carrywave.exporting.portable import Portable
from carrywave.exporting.run_export import export_run
from carrywave.prediction.saved_run import open_run
from carrywave.spec.load import parse
from carrywave.train.fit import train

SNIPPET = (Path(__file__).parents[2] / "examples" / "exported_forecast.py").read_text(encoding="utf-8")
HAS_ONNX = all(find_spec(name) is not None for name in ("onnx", "onnxruntime"))
LOADED = 'program = torch.export.load(folder / "model.pt2").module()'
Program = Callable[[torch.Tensor, torch.Tensor], Sequence[torch.Tensor]]
CLOSE = 1e-4  # float32, beside values of some 20 units


def run_of(folder: Path) -> Path:
    """A run on the file of the documentation's example, and that file: two series, of which rows ahead are given."""
    draw = np.random.default_rng(2)
    parts = []
    for name in "ab":
        part = pd.DataFrame({"unique_id": name, "ds": pd.date_range("2025-12-20", periods=64), "y": 20 + 5 * draw.normal(size=64)})
        part = part.assign(price=draw.normal(size=64), promotion=draw.choice(["none", "flyer", "tv"], 64), temperature=draw.normal(size=64))
        part = part.assign(region="north" if name == "a" else "south", square_metres=120.0 if name == "a" else 300.0)
        part.loc[60:, ["y", "temperature", "region", "square_metres"]] = np.nan
        parts.append(part)
    frame = pd.concat(parts)
    frame.to_csv(folder / "sales.csv", index=False)
    data = {
        "train": str(folder / "sales.csv"),
        "targets": ["y"],
        "known": ["price", "promotion"],
        "calendar": ["weekday", "month"],
        "categorical": ["promotion"],
        "static": ["region", "square_metres"],
        "horizon": 4,
        "season": 7,
        "standardize": True,
    }
    spec: dict[str, Any] = {
        "task": "forecasting",
        "data": data,
        "model": {"hidden": 6, "layers": 1, "linear": 0},
        "batch": {"lanes": 2, "steps": 12},
    }
    train(parse({**spec, "train": {"max_steps": 4, "lr": 0.05, "precision": "fp32"}}), run=folder / "run", device="cpu")
    # A category that train does not contain is unknown to both.
    frame.loc[(frame["unique_id"] == "a") & (frame["ds"] == "2026-01-05"), "promotion"] = "radio"
    frame.sample(frac=1.0, random_state=1).to_csv(folder / "sales.csv", index=False)
    return folder / "run"


def forecast_of(run: Path) -> list[float]:
    return [row["y"] for row in cw.predict(run, run.parent / "sales.csv", device="cpu", note=lambda line: None) if row["unique_id"] == "a"]


def by_hand(folder: Path, run: Path, program: Program | None = None) -> dict[str, Any]:
    """What the program finds, with another program in place of the one that they load, if one is given."""
    assert LOADED in SNIPPET
    text = SNIPPET.replace("exports/NAME-torch", str(folder)).replace("sales.csv", str(run.parent / "sales.csv"))
    found: dict[str, Any] = {"given": program}
    exec(text if program is None else text.replace(LOADED, "program = given"), found)
    return found


def in_onnxruntime(folder: Path, file: str) -> Program:
    """An exported model; if it has a state, each call is a sequence of its own."""
    session = importlib.import_module("onnxruntime").InferenceSession(folder / file)
    ports = json.loads((folder / "model.json").read_text())["inputs"]

    def program(x: torch.Tensor, codes: torch.Tensor) -> list[torch.Tensor]:
        yes = np.array([[True]])
        given = {"x": x.numpy(), "codes": codes.numpy(), "lengths": np.array([x.shape[1]]), "fresh": yes, "ready": yes}
        state = {port["name"]: np.zeros((1, port["shape"][1]), np.float32) for port in ports if port["name"] not in given}
        taken = {port["name"]: given[port["name"]] for port in ports if port["name"] in given}
        return [torch.from_numpy(session.run(["forecast"], taken | state)[0])]

    return program


def test_a_step_is_what_the_description_says(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    out = export_run(run, "safetensors", tmp_path / "out").folder
    found = by_hand(out, run, Portable(open_run(run, "cpu").model))
    assert found["forecast"].tolist() == pytest.approx(forecast_of(run), abs=CLOSE)
    about = found["about"]
    assert [entry["column"] for entry in about["step"]["codes"]] == ["promotion", "region", *["promotion"] * 4]
    assert about["model"]["categories"] == [[4, 2], [3, 2]]
    weights = load_file(out / "model.safetensors")
    assert [list(weights[f"categories.{place}.weight"].shape) for place in range(2)] == [[4, 2], [3, 2]]
    assert about["weights"]["categories.0.weight"] == [4, 2]
    assert 0 in found["codes"][0, :, 0]  # the unknown category


@pytest.mark.slow
@pytest.mark.parametrize("form", ["torch", pytest.param("onnx", marks=pytest.mark.skipif(not HAS_ONNX, reason="no extra onnx"))])
def test_an_exported_program_says_what_predict_says(form: str, tmp_path: Path) -> None:
    run = run_of(tmp_path)
    for stateful in (False, True) if form == "onnx" else (False,):
        exported = export_run(run, form, tmp_path / f"out-{stateful}", stateful=stateful)
        program = in_onnxruntime(exported.folder, exported.files[0]) if form == "onnx" else None
        assert by_hand(exported.folder, run, program)["forecast"].tolist() == pytest.approx(forecast_of(run), abs=CLOSE)
