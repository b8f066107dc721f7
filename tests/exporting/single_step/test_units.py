"""A step in the units of the data says what `predict` says of the same rows, and a stepper at every step."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from test_covariates_export import forecast_of, run_of

import carrywave as cw
from carrywave.errors import UserError
from carrywave.exporting.portable import Portable
from carrywave.exporting.run_export import export_run
from carrywave.exporting.single_step import c_library, units
from carrywave.exporting.single_step.formula import Formula
from carrywave.exporting.single_step.step_module import StepModule
from carrywave.exporting.single_step.units import in_units
from carrywave.prediction.saved_run import Saved, open_run
from carrywave.spec.load import parse
from carrywave.train.fit import train

CLOSE = 1e-5  # of the size of the values: predict computes in float32
needs_compiler = pytest.mark.skipif(c_library.compiler() is None, reason="there is no C compiler")


def learn(folder: Path, task: str, data: dict[str, Any], model: dict[str, Any] | None = None, **sections: Any) -> Path:
    how = {"max_steps": 2, "lr": 0.05, "precision": "fp32"}
    spec = {"task": task, "data": data, "model": {"hidden": 6, "layers": 1, **(model or {})}, "train": how, **sections}
    train(parse(spec), run=folder / "run", device="cpu")
    return folder / "run"


def step_of(run: Path) -> tuple[Saved, Formula]:
    saved = open_run(run, "cpu")
    return saved, in_units(saved.task, Portable(saved.model.double(), stateful=True).eval())


def after(formula: Formula, *rows: Tensor) -> list[Tensor]:
    """What comes out after each step of one sequence; `rows` are those of each input, [steps, …]."""
    module, state, found = StepModule(formula), formula.initial(1), []
    with torch.no_grad():
        for step in range(len(rows[0])):
            out, *state = module(*(each[step : step + 1] for each in rows), *state)
            found.append(out[0])
    return found


def sequences(folder: Path, label: Any, count: int = 20) -> str:
    draw = np.random.default_rng(1)
    steps = [(draw.normal(size=(int(draw.integers(2, 9)), 3)) * [1, 20, 0.1] + [0, 500, 3]).round(4).tolist() for _ in range(count)]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"steps": each, **label(each)}) + "\n" for each in steps))
    return str(folder / "rows.jsonl")


LABELS = {
    "classification": lambda steps: {"label": "up" if steps[-1][0] > 0 else "down"},
    "regression": lambda steps: {"label": [5000 + sum(step[1] for step in steps), steps[0][2]]},
    "tagging": lambda steps: {"labels": ["up" if step[0] > 0 else "down" for step in steps]},
}


@pytest.mark.parametrize("task", LABELS)
def test_numbers_in_and_answers_out_are_those_of_a_stepper(task: str, tmp_path: Path) -> None:
    how = {"batch": {"tokens": 64}}
    run = learn(tmp_path, task, {"train": sequences(tmp_path, LABELS[task])}, {"bidirectional": False, "front": "none"}, **how)
    _, formula = step_of(run)
    rows = torch.tensor([[0.5, 480.0, 3.1], [-1.0, 530.0, 2.9], [2.0, 500.0, 3.0]], dtype=torch.float64)
    stepper = cw.stepper(run, device="cpu")
    right = [stepper.step({1: row.tolist()})[1] for row in rows]
    for found, expected in zip(after(formula, rows), right, strict=True):
        torch.testing.assert_close(found, expected.double(), rtol=CLOSE, atol=CLOSE)


def test_labels_of_which_several_hold_have_probabilities_of_their_own(tmp_path: Path) -> None:
    data = {"train": sequences(tmp_path, lambda steps: {"label": ["a", "b"][: 1 + (steps[0][0] > 0)]}), "multi_label": True}
    run = learn(tmp_path, "classification", data, {"bidirectional": False, "front": "none"}, batch={"tokens": 64})
    _, formula = step_of(run)
    rows = torch.tensor([[0.5, 480.0, 3.1], [-1.0, 530.0, 2.9]], dtype=torch.float64)
    stepper = cw.stepper(run, device="cpu")
    right = torch.stack([stepper.step({1: row.tolist()})[1] for row in rows]).double()
    torch.testing.assert_close(torch.stack(after(formula, rows)), right, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("softmax", ["full", "adaptive"])
def test_tokens_in_and_probabilities_out(softmax: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the cat sat on the mat, and it was glad\n" * 30)
    model = {"softmax": "adaptive", "cutoffs": [4]} if softmax == "adaptive" else {}
    run = learn(tmp_path, "language", {"train": str(tmp_path / "text.txt")}, model, batch={"lanes": 2, "steps": 8})
    _, formula = step_of(run)
    tokens = torch.tensor([3, 1, 4, 1, 5])
    stepper = cw.stepper(run, device="cpu")
    right = torch.stack([stepper.step({1: int(token)})[1] for token in tokens]).double()
    torch.testing.assert_close(torch.stack(after(formula, tokens)), right, rtol=CLOSE, atol=CLOSE)


def table(folder: Path, *, columns: int = 1, series: int = 0, rows: int = 90) -> pd.DataFrame:
    draw = np.random.default_rng(3)
    parts = []
    for number in range(series or 1):
        level, size = 10.0 ** (number + 1), 10.0**number
        values = level + size * np.sin(np.arange(rows)[:, None] / 3 + np.arange(columns)) + 0.3 * size * draw.normal(size=(rows, columns))
        part = pd.DataFrame(values, columns=[f"y{place}" for place in range(columns)])
        parts.append(part if not series else part.assign(unique_id=f"s{number}", ds=pd.date_range("2026-01-01", periods=rows)))
    frame = pd.concat(parts)
    frame.to_csv(folder / "table.csv", index=False)
    return frame


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({"residual": "none"}, {"linear": 0}),
    "last, quantiles": ({"residual": "last", "quantiles": [0.1, 0.5, 0.9]}, {"linear": 0}),
    "season": ({"residual": "season", "season": 7}, {"linear": 0}),
    "season shorter than the horizon, quantiles": ({"residual": "season", "season": 2, "quantiles": [0.2, 0.8]}, {"linear": 0}),
    "line": ({}, {"linear": 6}),
    "line, season": ({"season": 5}, {"linear": 6}),
    "window": ({"standardize": "window", "residual": "last"}, {"linear": 8}),
    "window, season": ({"standardize": "window", "residual": "season", "season": 7}, {"linear": 0}),
    "log": ({"transform": "log", "residual": "last"}, {"linear": 0}),
    "log1p, season": ({"transform": "log1p", "season": 4}, {"linear": 5}),
    "diff": ({"transform": "diff", "residual": "none"}, {"linear": 0}),
    "diff, window": ({"transform": "diff", "standardize": "window"}, {"linear": 4}),
    "not standardised": ({"standardize": False, "residual": "last"}, {"linear": 0}),
}
QUICK = ("last, quantiles", "window, season", "log1p, season")


@pytest.mark.parametrize("kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS])
def test_forecasts_are_those_of_predict(kind: str, tmp_path: Path) -> None:
    data, model = KINDS[kind]
    frame = table(tmp_path, columns=2)
    data = {"train": str(tmp_path / "table.csv"), "horizon": 5, "channels": "joint", **data}
    if kind.startswith("line"):
        data["targets"] = ["y1"]  # y0 is only read
    run = learn(tmp_path, "forecasting", data, model, batch={"lanes": 2, "steps": 8})
    _, formula = step_of(run)
    for rows in (len(frame), 3):  # much of what is looked back at lies before so short a series
        frame[:rows].to_csv(tmp_path / "short.csv", index=False)
        predicted = cw.predict(run, tmp_path / "short.csv", device="cpu", note=lambda line: None)
        right = [[value for name, value in row.items() if name != "step"] for row in predicted]
        found = after(formula, torch.tensor(frame[:rows].to_numpy()))[-1]
        torch.testing.assert_close(found.reshape(5, -1), torch.tensor(right, dtype=torch.float64), rtol=CLOSE, atol=CLOSE)


def test_each_series_has_its_own_scale(tmp_path: Path) -> None:
    frame = table(tmp_path, series=3)
    data = {"train": str(tmp_path / "table.csv"), "horizon": 3, "residual": "last"}
    run = learn(tmp_path, "forecasting", data, {"linear": 0}, batch={"lanes": 3, "steps": 8})
    saved, formula = step_of(run)
    assert [port.name for port in formula.step_inputs] == ["series", "x"]
    predicted = cw.predict(run, frame, device="cpu", note=lambda line: None)
    for number, name in enumerate(saved.task.codec.names):
        values = torch.tensor(frame[frame["unique_id"] == name][["y0"]].to_numpy())
        found = after(formula, torch.full((len(values),), number), values)[-1]
        right = [row["y0"] for row in predicted if row["unique_id"] == name]
        assert found.flatten().tolist() == pytest.approx(right, rel=CLOSE)


def test_independent_channels_are_sequences_of_their_own(tmp_path: Path) -> None:
    frame = table(tmp_path, columns=3)
    data = {"train": str(tmp_path / "table.csv"), "horizon": 3, "channels": "independent", "residual": "last"}
    run = learn(tmp_path, "forecasting", data, {"linear": 0}, batch={"lanes": 3, "steps": 8})
    saved, formula = step_of(run)
    predicted = cw.predict(run, frame, device="cpu", note=lambda line: None)
    for column in saved.task.codec.channels:
        values = torch.tensor(frame[[column]].to_numpy())
        which = [torch.full((len(values),), saved.task.codec.names.index(column))] if saved.task.codec.names else []
        found = after(formula, *which, values)[-1]
        assert found.flatten().tolist() == pytest.approx([row[column] for row in predicted], rel=CLOSE)


def test_what_is_known_ahead_goes_in_with_each_row(tmp_path: Path) -> None:
    run = run_of(tmp_path, "season")
    saved, formula = step_of(run)
    codec = saved.task.codec
    rows = pd.read_csv(tmp_path / "sales.csv", parse_dates=["ds"])
    rows = rows[rows["unique_id"] == "a"].sort_values("ds", ignore_index=True)
    for name, position, cycle in (("weekday", rows["ds"].dt.day_of_week, 7), ("month", rows["ds"].dt.month - 1, 12)):
        rows[f"{name}_sin"], rows[f"{name}_cos"] = np.sin(2 * np.pi * position / cycle), np.cos(2 * np.pi * position / cycle)
    codes = pd.DataFrame(
        {
            column: [values.index(value) + 1 if value in values else 0 for value in rows[column]]
            for column, values in zip(codec.categorical, codec.categories, strict=True)
        }
    )
    known = [name for name in codec.columns if name in codec.known]
    x = [rows[list(codec.columns)], *(rows[known].shift(-ahead) for ahead in range(1, 5))]
    of_codes = [codes, *(codes[["promotion"]].shift(-ahead) for ahead in range(1, 5))]
    given = {
        "series": torch.full((60,), codec.names.index("a")),
        "x": torch.from_numpy(np.concatenate(x, axis=1)[:60]),
        "codes": torch.from_numpy(np.concatenate(of_codes, axis=1)[:60].astype(np.int64)),
    }
    found = after(formula, *(given[port.name] for port in formula.step_inputs))[-1]
    assert found.flatten().tolist() == pytest.approx(forecast_of(run), rel=1e-4)
    if c_library.compiler() is not None:  # which the export itself compares with this formula
        text = (export_run(run, "c", tmp_path / "out").folder / "model.c").read_text()
        assert "int model_step(model_state *state, int series, const float *x, const int *codes, float *forecast);" in text
        assert "[0] promotion, [1] region, [2] promotion, 1 ahead" in text


def rivers(folder: Path, **data: Any) -> tuple[Path, pd.DataFrame]:
    """A run that estimates y0 from y1 and a category, row by row."""
    frame = table(folder, columns=2, series=2).assign(kind=["wet", "dry", "dry"] * 60)
    if "missing" in data:
        frame = frame.assign(y1=frame["y1"].where(frame["kind"] == "dry"))
    frame.to_csv(folder / "table.csv", index=False)
    asked = {"each_step": True, "targets": ["y0"], "categorical": ["kind"], "train": str(folder / "table.csv"), "series": "unique_id"}
    run = learn(folder, "regression", {**asked, **data}, {"bidirectional": False, "front": "none"}, batch={"lanes": 2, "steps": 8})
    return run, frame


def test_estimates_at_every_step_are_those_of_predict(tmp_path: Path) -> None:
    run, frame = rivers(tmp_path)
    saved, formula = step_of(run)
    own = frame[frame["unique_id"] == "s1"]
    codes = [saved.task.codec.categories[0].index(kind) + 1 for kind in own["kind"]]
    found = torch.cat(after(formula, torch.tensor(own[["y1"]].to_numpy()), torch.tensor(codes)[:, None]))
    right = [row["y0"] for row in cw.predict(run, frame, device="cpu", note=lambda line: None) if row["unique_id"] == "s1"]
    torch.testing.assert_close(found, torch.tensor(right, dtype=torch.float64), rtol=CLOSE, atol=CLOSE)


def test_what_has_no_form_in_c_is_refused(tmp_path: Path) -> None:
    run, _ = rivers(tmp_path, missing="mask")
    with pytest.raises(UserError, match=r"a C file has no form of data.missing=mask; use --to onnx --step"):
        export_run(run, "c", tmp_path / "out")
    (tmp_path / "other").mkdir()
    table(tmp_path / "other")
    data = {"train": str(tmp_path / "other" / "table.csv"), "horizon": 2, "distribution": "normal"}
    run = learn(tmp_path / "other", "forecasting", data, {"linear": 0}, batch={"lanes": 2, "steps": 8})
    with pytest.raises(UserError, match=r"a C file has no form of the parameters of a distribution; use --to onnx --step"):
        export_run(run, "c", tmp_path / "out")


@needs_compiler
def test_the_exported_file_forecasts_a_series(tmp_path: Path) -> None:
    frame = table(tmp_path)
    data = {"train": str(tmp_path / "table.csv"), "horizon": 4, "season": 6, "residual": "season", "quantiles": [0.1, 0.5]}
    run = learn(tmp_path, "forecasting", data, batch={"lanes": 2, "steps": 8})
    found = export_run(run, "c", tmp_path / "out")
    assert found.files == ("model.c", "model.json")
    assert found.difference is not None
    assert found.difference < 1e-5
    about = json.loads((tmp_path / "out" / "model.json").read_text())
    assert about["inputs"][0]["name"] == "x"
    words = ["-std=c99", "-Wall", "-Wextra", "-pedantic", "-Werror", "-O2", "-DMODEL_MAIN", "model.c", "-lm", "-o", str(tmp_path / "model")]
    subprocess.run([str(c_library.compiler()), *words], cwd=tmp_path / "out", check=True)
    text = "\n".join(map(str, frame["y0"]))
    said = subprocess.run([tmp_path / "model"], input=text, text=True, check=True, capture_output=True).stdout.splitlines()
    assert len(said) == len(frame)
    predicted = cw.predict(run, frame, device="cpu", note=lambda line: None)
    right = [row[f"y0-q{level}"] for row in predicted for level in ("0.1", "0.5")]
    assert [float(number) for number in said[-1].split()] == pytest.approx(right, rel=1e-5)  # float32


@needs_compiler
def test_a_value_that_has_no_logarithm_is_refused(tmp_path: Path) -> None:
    table(tmp_path)
    data = {"train": str(tmp_path / "table.csv"), "horizon": 2, "transform": "log", "residual": "last"}
    run = learn(tmp_path, "forecasting", data, {"linear": 0}, batch={"lanes": 2, "steps": 8})
    export_run(run, "c", tmp_path / "out")
    formula = step_of(run)[1]
    step = c_library.runner((tmp_path / "out" / "model.c").read_text(), formula, str(c_library.compiler()))
    for value in (0.0, -1.0):
        with pytest.raises(UserError, match="refused its input"):
            step([torch.tensor([[value]]), *formula.initial(1)])


def test_the_scale_of_a_whole_sequence_is_refused(tmp_path: Path) -> None:
    data = {"train": sequences(tmp_path, LABELS["tagging"]), "standardize": "sequence"}
    run = learn(tmp_path, "tagging", data, {"bidirectional": False}, batch={"tokens": 64})
    with pytest.raises(UserError, match=r"data.standardize=sequence needs the whole sequence for its scale; .* or use --to onnx --step"):
        export_run(run, "c", tmp_path / "out")


def test_numbers_that_float32_cannot_tell_apart_are_refused(tmp_path: Path) -> None:
    run = learn(tmp_path, "tagging", {"train": sequences(tmp_path, LABELS["tagging"])}, {"bidirectional": False}, batch={"tokens": 64})
    codec = open_run(run, "cpu").task.codec
    units._check(codec)
    with pytest.raises(
        UserError, match=r"has a mean of 1e\+06 and a deviation of 0.1, which float32 does not resolve; scale it in the data"
    ):
        units._check(replace(codec, mean=(0.0, 1e6, 0.0), std=(1.0, 0.1, 1.0)))
    with pytest.raises(UserError, match="deviation of 1e-40"):
        units._check(replace(codec, std=(1.0, 1e-40, 1.0)))
