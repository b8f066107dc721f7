"""The documentation's lines on single steps run as they stand there, with whichever converters are installed."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import carrywave as cw
from carrywave.exporting.portable import Portable
from carrywave.exporting.run_export import export_run
from carrywave.prediction.saved_run import open_run

DOCS = Path(__file__).parents[2] / "docs" / "export.md"
[SECTION] = re.findall(r"\n## One step at a time\n(.*?)\n## ", DOCS.read_text(encoding="utf-8"), flags=re.DOTALL)
[CONVERTERS] = re.findall(r"```python\n(.*?)```", SECTION, flags=re.DOTALL)
OPENED, LITERT, EXECUTORCH, COREML = re.split(r"\n\n# ", CONVERTERS)


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


@pytest.fixture
def opened(speaker: Path, tmp_path: Path) -> dict[str, Any]:
    """What the lines find that open the program for a converter."""
    export_run(speaker, "torch", tmp_path / "out", step=True)
    found: dict[str, Any] = {}
    exec(OPENED.replace("exports/NAME-torch", str(tmp_path / "out")), found)
    return found


def first(opened: dict[str, Any]) -> list[torch.Tensor]:
    about = json.loads((opened["folder"] / "model.json").read_text())
    states = [torch.tensor(value).expand(1, len(value)).clone() for value in about["initial"].values()]
    return [torch.tensor([3]), *states]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of what converters themselves are built on
def test_litert(opened: dict[str, Any]) -> None:
    pytest.importorskip("litert_torch", reason="litert-torch is not installed")
    exec("# " + LITERT, opened)
    from ai_edge_litert.interpreter import Interpreter

    run = Interpreter(model_path=str(opened["folder"] / "model.tflite")).get_signature_runner()
    given = first(opened)
    found = run(**{f"args_{place}": part.to(torch.int32 if place == 0 else part.dtype).numpy() for place, part in enumerate(given)})
    for place, right in enumerate(opened["program"](*given)):
        np.testing.assert_allclose(found[f"output_{place}"], right.detach(), atol=1e-5)  # float32


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of what converters themselves are built on
def test_executorch(opened: dict[str, Any]) -> None:
    pytest.importorskip("executorch", reason="executorch is not installed")
    exec("# " + EXECUTORCH, opened)
    from executorch.runtime import Runtime

    found = Runtime.get().load_program(opened["folder"] / "model.pte").load_method("forward").execute(first(opened))
    for part, right in zip(found, opened["program"](*first(opened)), strict=True):
        torch.testing.assert_close(part, right.detach(), rtol=0, atol=1e-5)  # float32


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of what converters themselves are built on
def test_coreml(opened: dict[str, Any]) -> None:
    pytest.importorskip("coremltools", reason="coremltools is not installed")
    exec("# " + COREML, opened)
    assert (opened["folder"] / "model.mlpackage").is_dir()
