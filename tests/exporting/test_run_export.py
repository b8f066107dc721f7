"""From run folders to every format and back: what is written can be used as the documentation says, and refusals leave nothing behind."""

from __future__ import annotations

import json
import math
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import carrywave as cw
from _zoo import Zoo
from carrywave.cli.main import app
from carrywave.errors import UserError
from carrywave.exporting import comparison, onnx_file, run_export
from carrywave.exporting.portable import Portable
from carrywave.exporting.run_export import export_run
from carrywave.prediction.saved_run import open_run
from carrywave.spec.load import parse
from carrywave.train.fit import train

DOCS = Path(__file__).parents[2] / "docs" / "export.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), flags=re.DOTALL)
HAS_ONNX = all(find_spec(name) is not None for name in ("onnx", "onnxruntime"))
needs_onnx = pytest.mark.skipif(not HAS_ONNX, reason="the extra onnx is not installed")


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speaker")
    (folder / "text.txt").write_text("the cat sat on the mat\n" * 40)
    data, model = {"train": str(folder / "text.txt")}, {"hidden": 10, "layers": 2, "tie": True}
    how = {"batch": {"lanes": 4, "steps": 16}, "train": {"max_steps": 6, "lr": 0.05}}
    train(parse({"task": "language", "data": data, "model": model, **how}), run=folder / "run", device="cpu")
    return folder / "run"


TASKS = ("text", "labels", "tags", "spans", "spoken", "series", "numbers", "each step", "several")


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.sampled(3)
def test_every_task_to_safetensors_and_back(kind: str, zoo: Zoo, tmp_path: Path) -> None:
    run = zoo(kind)
    out = export_run(run, "safetensors", tmp_path / "out").folder / "model.safetensors"
    spec = open_run(run, "cpu").spec
    again = spec.model_copy(update={"train": spec.train.model_copy(update={"max_steps": 1, "lr": 1e-30})})
    train(again, run=tmp_path / "next", device="cpu", init=str(out))
    before, after = (load_file(folder / "weights.safetensors") for folder in (run, tmp_path / "next"))
    assert all(torch.equal(before[name], after[name]) for name in before)


@needs_onnx
@pytest.mark.parametrize("kind", TASKS)
def test_every_task_to_onnx(kind: str, zoo: Zoo, tmp_path: Path) -> None:
    found = export_run(zoo(kind), "onnx", tmp_path / "out")
    assert found.difference is not None
    assert found.difference < 1e-5
    assert json.loads((found.folder / "model.json").read_text())["task"] == open_run(zoo(kind), "cpu").spec.task
    if kind in ("text", "each step"):
        assert export_run(zoo(kind), "onnx", tmp_path / "stateful", stateful=True).files
    elif kind == "tags":
        for to in ("onnx", "torch", "c"):
            with pytest.raises(UserError, match="bidirectional layers read whole sequences, so there is no carry to pass on; "):
                export_run(zoo(kind), to, tmp_path / to, step=to != "c")
            assert not (tmp_path / to).exists()


def test_safetensors_run_in_plain_torch_as_documented(speaker: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export_run(speaker, "safetensors", tmp_path / "out")
    found: dict[str, Any] = {}
    exec(SNIPPETS[0].replace("exports/NAME-safetensors", str(tmp_path / "out")), found)
    saved = open_run(speaker, "cpu")
    with torch.no_grad():
        [expected] = Portable(saved.model)(found["tokens"].T)
    torch.testing.assert_close(found["logits"].transpose(0, 1).detach(), expected, rtol=1e-5, atol=1e-6)  # float32
    assert "comes next" in capsys.readouterr().out


def test_export_from_python_takes_paths_as_text(speaker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cw.export is export_run  # also now, with every module of the folder imported
    monkeypatch.chdir(tmp_path)
    found = cw.export(str(speaker), "safetensors", "in/out")
    assert found.folder == Path("in/out")
    assert sorted(path.name for path in (tmp_path / "in" / "out").iterdir()) == sorted(found.files)
    with pytest.raises(UserError, match=r"in/out is not empty; .* with output=\.\.\."):
        cw.export(str(speaker), "safetensors", "in/out")


def test_exported_weights_start_a_run_with_their_vocabulary(speaker: Path, tmp_path: Path) -> None:
    out = export_run(speaker, "safetensors", tmp_path / "out").folder / "model.safetensors"
    names = load_file(out).keys()
    assert "embedding.weight" in names
    assert "lstm.weight_ih_l0" in names
    (tmp_path / "other.txt").write_text("a mat\n" * 60)  # fewer characters than the run knows
    spec = parse(
        {
            "data": {"train": str(tmp_path / "other.txt")},
            "model": {"hidden": 10, "tie": True},
            "batch": {"lanes": 2, "steps": 8},
            "train": {"max_steps": 1, "lr": 1e-30},
        }
    )
    train(spec, run=tmp_path / "next", device="cpu", init=str(out))
    assert json.loads((tmp_path / "next" / "codec.json").read_text()) == json.loads((speaker / "codec.json").read_text())
    before, after = (load_file(run / "weights.safetensors") for run in (speaker, tmp_path / "next"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@needs_onnx
def test_onnx_continues_text_as_documented(speaker: Path, tmp_path: Path) -> None:
    export_run(speaker, "onnx", tmp_path / "out", stateful=True)
    found: dict[str, Any] = {}
    exec(SNIPPETS[1].replace("exports/NAME-onnx", str(tmp_path / "out")), found)
    from carrywave.prediction.predict import predict

    assert found["text"] == predict(speaker, prompt="the cat", tokens=20, temperature=0.0, device="cpu")[0]["text"]


@pytest.mark.slow
def test_torch_programs_run_as_documented(speaker: Path, tmp_path: Path) -> None:
    found = export_run(speaker, "torch", tmp_path / "out")
    assert found.difference is not None
    assert found.difference < 1e-5
    values: dict[str, Any] = {}
    exec(SNIPPETS[2].replace("exports/NAME-torch", str(tmp_path / "out")), values)
    with torch.no_grad():
        [expected] = Portable(open_run(speaker, "cpu").model)(torch.tensor([[3, 1, 4, 1, 5]]))
    torch.testing.assert_close(values["logits"].detach(), expected, rtol=1e-5, atol=1e-6)  # float32


@needs_onnx
def test_an_export_that_differs_is_refused_and_leaves_nothing(speaker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = onnx_file.runner

    def off(model: bytes, portable: Portable) -> Any:
        run = real(model, portable)
        return lambda given: [out * 1.01 for out in run(given)]

    monkeypatch.setattr(onnx_file, "runner", off)
    with pytest.raises(UserError, match=r"the ONNX model differs from the model by .* in logits, .*; nothing was written"):
        export_run(speaker, "onnx", tmp_path / "new" / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing(speaker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_export, "write_tensors", full)
    with pytest.raises(UserError, match="could not be written: No space left on device; free disk space, or choose another folder"):
        export_run(speaker, "safetensors", tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_in_it_is_left_alone(speaker: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(UserError, match="is not empty; remove it, or choose another folder with output="):
        export_run(speaker, "safetensors", tmp_path)
    with pytest.raises(UserError, match="is a file, and an export is a folder"):
        export_run(speaker, "safetensors", tmp_path / "mine")
    assert (tmp_path / "mine").read_text() == "precious"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "safetensors", "--stateful"], "carrywave: --stateful is for --to onnx and --to torch; remove it"),
        (["--to", "c", "-o", "s3://bucket/x"], "carrywave: s3://bucket/x is an address in a store, but only a path on this machine can be"),
        (["--to", "tflite"], "'tflite' is not one of 'safetensors', 'onnx', 'torch', 'c'"),
        (["--to", "safetensors", "--step"], "carrywave: --step is for --to onnx and --to torch; remove it"),
        (["--to", "onnx", "--step", "--stateful"], "carrywave: --step and --stateful are two forms of a model; remove one of them"),
    ],
)
def test_mistakes_are_one_line(words: list[str], said: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["export", str(tmp_path), *words])
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_command_says_what_it_wrote(speaker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["export", str(speaker), "--to", "safetensors"])
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "wrote exports/run-safetensors: model.safetensors, model.json\n"
    about = json.loads(Path("exports/run-safetensors/model.json").read_text())
    stored = load_file("exports/run-safetensors/model.safetensors")
    assert about["weights"] == {name: list(tensor.shape) for name, tensor in stored.items()}
    assert about["model"]["head"]["tied"]
    assert about["model"]["torch_module"] == "LSTM"


def test_not_a_number_is_a_difference(speaker: Path) -> None:
    portable = Portable(open_run(speaker, "cpu").model)
    with pytest.raises(UserError, match="differs from the model by nan"):
        comparison.largest_difference(portable, lambda given: [portable(*given)[0] * torch.nan], what="it")


@pytest.mark.parametrize(
    ("rounding", "allowed"),
    [(0.0, 1e-4), (1e-6, 1e-4), (5e-5, 4e-4), (0.5, 1e-2), (math.nan, 1e-4)],
    ids=["none", "usual", "large", "most", "nan"],
)
def test_a_model_that_magnifies_rounding_may_differ_by_as_much(rounding: float, allowed: float) -> None:
    right = torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64)
    assert comparison.with_rounding(comparison.TOLERANCE, right * (1.0 + rounding), right) == pytest.approx(allowed)
