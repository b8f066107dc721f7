"""A single step in onnxruntime, driven by the description that lies beside it."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import carrywave as cw
from carrywave.exporting.portable import Portable
from carrywave.exporting.run_export import export_run
from carrywave.prediction.saved_run import open_run


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speaker")
    how: dict[str, Any] = {"batch": {"lanes": 2, "steps": 16}, "train": {"max_steps": 4}}
    text = "the cat sat on the mat\n" * 40
    return Path(cw.fit({"hidden": 10, "learned_carry": True}, text, task="language", run=folder / "run", device="cpu", **how).run)


def test_in_onnxruntime(speaker: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="the extra onnx is not installed")
    pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    export_run(speaker, "onnx", tmp_path / "out", step=True)
    about = json.loads((tmp_path / "out" / "model.json").read_text())
    session = importlib.import_module("onnxruntime").InferenceSession(tmp_path / "out" / "model.onnx")
    assert isinstance(about["initial"]["h_l0"], list)  # it is learned
    shapes = {port["name"]: (1, *port["shape"][1:]) for port in about["inputs"]}
    state = {name: np.full(shapes[name], first, np.float32) for name, first in about["initial"].items()}
    tokens = torch.tensor([[about["codec"]["vocabulary"].index(character) for character in "the cat"]])
    for token in tokens[0].tolist():
        logits, *after = session.run(None, {"x": np.array([token]), **state})
        state = dict(zip(state, after, strict=True))
    with torch.no_grad():
        [right] = Portable(open_run(speaker, "cpu").model)(tokens)
    np.testing.assert_allclose(logits[0], right[0, -1], atol=1e-5)  # float32
