"""A C file compiles without a warning, and its steps say what `predict` says of the rows so far."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import carrywave as cw
from carrywave.cli.main import app
from carrywave.errors import UserError
from carrywave.exporting import c_compiler, c_file
from carrywave.exporting.run_export import export_run

needs_compiler = pytest.mark.skipif(c_compiler.compiler() is None, reason="there is no C compiler")


def rows_of(task: str, *, several: bool = False) -> list[dict[str, Any]]:
    draw = np.random.default_rng(1)
    rows = []
    for _ in range(30):
        steps = (5 + 3 * draw.normal(size=(int(draw.integers(2, 9)), 2))).round(3).tolist()
        label: Any = "up" if steps[-1][0] > 5 else "down"
        label = {"tagging": label, "classification": label, "regression": sum(map(sum, steps))}[task]
        many = [["hot"] * (step[0] > 5) + ["wet"] * (step[1] > 5) for step in steps]
        labelled = {"labels": many if several else [label] * len(steps)} if task == "tagging" else {"label": label}
        rows.append({"steps": steps, **labelled})
    return rows


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "regression of means, a GRU, norms": ("regression", {"cell": "gru", "layer_norm": True, "pool": "mean"}, {}),
    "classes, a projection, the greatest": ("classification", {"projection": 4, "pool": "max"}, {}),
    "classes, attention": ("classification", {"pool": "attention"}, {}),
    "classes, widths, mean and max": ("classification", {"hidden": [6, 9], "pool": "mean_max", "learned_carry": True}, {}),
    "tags": ("tagging", {"bidirectional": False}, {}),
    "several labels": ("tagging", {"bidirectional": False}, {"multi_label": True}),
}


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_the_file_says_what_predict_says(name: str, tmp_path: Path) -> None:
    task, model, data = CASES[name]
    rows = rows_of(task, several=bool(data))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    how: dict[str, Any] = {"data": {"train": str(tmp_path / "rows.jsonl"), **data}, "batch": {"tokens": 64}}
    options = {"hidden": 10, "layers": 2, "front": "none", "linear": 0, "bidirectional": False, **model}
    cw.fit(options, None, task=task, run=tmp_path / "run", device="cpu", train={"max_steps": 6, "lr": 0.05}, **how)
    exported = export_run(tmp_path / "run", "c", tmp_path / "out")
    assert exported.files == ("model.c", "model.json")
    assert exported.difference is not None
    assert exported.difference < 1e-5
    program = tmp_path / "program"
    command = ["cc", "-std=c99", "-O2", "-DMODEL_MAIN", str(exported.folder / "model.c"), "-lm", "-o", str(program)]
    subprocess.run(command, check=True)
    text = "\n".join(" ".join(map(str, step)) for step in rows[0]["steps"])
    lines = subprocess.run([program], input=text, capture_output=True, text=True, check=True).stdout.splitlines()
    found = [float(value) for value in lines[-1].split()]
    assert len(lines) == len(rows[0]["steps"])
    [row] = cw.predict(tmp_path / "run", [{"steps": rows[0]["steps"]}], device="cpu")
    if task == "regression":
        assert found == pytest.approx([row["label"]], rel=1e-4)
    elif task == "classification":
        assert found == pytest.approx([row["probabilities"][label] for label in ("down", "up")], abs=1e-4)
    elif data:
        assert found == pytest.approx([row["probabilities"][label][-1] for label in ("hot", "wet")], abs=1e-4)
    else:
        said = [["down", "up"][int(np.argmax([float(value) for value in line.split()]))] for line in lines]
        assert said == row["labels"]


@needs_compiler
@pytest.mark.parametrize("tokens", ["char", "word", "byte"])
def test_texts_go_in_as_tokens(tokens: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text('the cat "sat" on the mät /* so */ ??! \n' * 40)
    data, batch = {"train": str(tmp_path / "text.txt"), "tokens": tokens}, {"lanes": 4, "steps": 16}
    how: dict[str, Any] = {"data": data, "batch": batch, "train": {"max_steps": 4}, "device": "cpu"}
    cw.fit({"hidden": 10, "layers": 1, "tie": True}, None, task="language", run=tmp_path / "run", **how)
    found = export_run(tmp_path / "run", "c", tmp_path / "out")
    assert found.difference is not None
    assert found.difference < 1e-5
    text = (found.folder / "model.c").read_text()
    assert ("model_vocabulary" in re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)) == (tokens != "byte")
    monkeypatch.setattr(c_file, "written", lambda value: f"{1.01 * value:.9f}f")
    with pytest.raises(UserError, match=r"the C file differs from the model by .*; nothing was written"):
        export_run(tmp_path / "run", "c", tmp_path / "other")
    monkeypatch.setattr(c_file, "written", lambda value: "nothing")
    with pytest.raises(UserError, match=r"did not accept the C file \(.*nothing.*\); nothing was written: please report this"):
        export_run(tmp_path / "run", "c", tmp_path / "other")
    monkeypatch.undo()
    monkeypatch.setattr(c_compiler, "compiler", lambda: None)
    result = CliRunner().invoke(app, ["export", str(tmp_path / "run"), "--to", "c", "-o", str(tmp_path / "other")])
    assert "no C compiler was found (cc, gcc or clang), so the file was written without being compiled and run" in result.stderr


@pytest.mark.parametrize("cell", ["rnn", "slstm"])
def test_what_has_no_form_in_c_is_refused(cell: str, tmp_path: Path) -> None:
    cw.fit({"hidden": 4, "layers": 1, "cell": cell}, "the cat sat on the mat\n" * 40, task="language", run=tmp_path / "run", device="cpu",
           batch={"lanes": 2, "steps": 8}, train={"max_steps": 1})  # fmt: skip
    with pytest.raises(UserError, match=f"a C file has no form of the cell {cell}; use --to onnx --step"):
        export_run(tmp_path / "run", "c", tmp_path / "out")
    assert not (tmp_path / "out").exists()
