"""From run folders to every format and back: what is written can be used as the documentation says, and refusals leave nothing behind."""

from __future__ import annotations

import json
import math
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import carrywave as cw
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


def learn(folder: Path, task: str, data: dict[str, Any], model: dict[str, Any], **sections: Any) -> Path:
    steps = {"max_steps": 6, "lr": 0.05, **sections.pop("train", {})}
    spec = parse({"task": task, "data": data, "model": {"hidden": 10, "layers": 2, **model}, "train": steps, **sections})
    train(spec, run=folder / "run", device="cpu")
    return folder / "run"


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speaker")
    (folder / "text.txt").write_text("the cat sat on the mat\n" * 40)
    return learn(folder, "language", {"train": str(folder / "text.txt")}, {"tie": True}, batch={"lanes": 4, "steps": 16})


def rows(folder: Path, label: Any) -> str:
    draw = np.random.default_rng(1)
    written = []
    for _ in range(30):
        steps = draw.normal(size=(int(draw.integers(1, 9)), 2)).round(3).tolist()
        written.append(json.dumps({"steps": steps, **label(steps)}) + "\n")
    (folder / "rows.jsonl").write_text("".join(written))
    return str(folder / "rows.jsonl")


def run_of(task: str, folder: Path) -> Path:
    """A run of any task, each with options of its own."""
    if task == "language":
        (folder / "text.txt").write_text("the cat sat on the mat\n" * 40)
        return learn(folder, task, {"train": str(folder / "text.txt"), "tokens": "word"}, {"layer_norm": True, "learned_carry": True})
    if task == "forecasting":
        values = "\n".join(f"{10 * np.sin(step / 5) + 50:.3f}" for step in range(200))
        (folder / "series.csv").write_text("y\n" + values + "\n")
        data = {"train": str(folder / "series.csv"), "horizon": 4, "quantiles": [0.1, 0.5, 0.9], "season": 5}
        return learn(folder, task, data, {"hidden": [6, 10]}, batch={"lanes": 2, "steps": 16})
    labels = {
        "classification": lambda steps: {"label": "up" if steps[-1][0] > 0 else "down"},
        "tagging": lambda steps: {"labels": ["up" if step[0] > 0 else "down" for step in steps]},
        "transcription": lambda steps: {"labels": ["up" if step[0] > 0 else "down" for step in steps[::2]]},
        "regression": lambda steps: {"label": 100 + sum(map(sum, steps))},
    }
    one_way = {"bidirectional": False, "front": "none"}
    model = {
        "classification": {**one_way, "projection": 4},
        "tagging": {"bidirectional": True},
        "regression": {**one_way, "pool": "mean"},
        "transcription": {"upsample": 2},
    }
    return learn(folder, task, {"train": rows(folder, labels[task])}, model[task], batch={"tokens": 64})


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


@pytest.mark.slow
@pytest.mark.parametrize("task", ["language", "classification", "tagging", "transcription", "forecasting", "regression"])
def test_every_task_to_safetensors_and_back(task: str, tmp_path: Path) -> None:
    run = run_of(task, tmp_path)
    out = export_run(run, "safetensors", tmp_path / "out").folder / "model.safetensors"
    spec = open_run(run, "cpu").spec
    again = spec.model_copy(update={"train": spec.train.model_copy(update={"max_steps": 1, "lr": 1e-30})})
    train(again, run=tmp_path / "next", device="cpu", init=str(out))
    before, after = (load_file(folder / "weights.safetensors") for folder in (run, tmp_path / "next"))
    assert all(torch.equal(before[name], after[name]) for name in before)


@needs_onnx
@pytest.mark.slow
@pytest.mark.parametrize("task", ["language", "classification", "tagging", "transcription", "forecasting", "regression"])
def test_every_task_to_onnx(task: str, tmp_path: Path) -> None:
    run = run_of(task, tmp_path)
    for stateful in (False, True) if task not in ("tagging", "transcription") else (False,):
        found = export_run(run, "onnx", tmp_path / f"out{stateful}", stateful=stateful)
        assert found.difference is not None
        assert found.difference < 1e-5
        about = json.loads((found.folder / "model.json").read_text())
        assert about["task"] == task


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


@pytest.mark.parametrize("words", [["--to", "onnx", "--step"], ["--to", "torch", "--step"], ["--to", "c"]])
def test_both_directions_have_no_single_step(words: list[str], tmp_path: Path) -> None:
    labels = rows(tmp_path, lambda steps: {"labels": ["up" if step[0] > 0 else "down" for step in steps]})
    run = learn(tmp_path, "tagging", {"train": labels}, {"bidirectional": True}, batch={"tokens": 64}, train={"max_steps": 1})
    result = CliRunner().invoke(app, ["export", str(run), *words, "-o", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert result.stderr.startswith("carrywave: bidirectional layers read whole sequences, so there is no carry to pass on; ")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


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


def test_layers_of_torch_start_a_model(speaker: Path, tmp_path: Path) -> None:
    lstm = torch.nn.LSTM(10, 10, 2)
    save_file({f"rnn.{name}": tensor for name, tensor in lstm.state_dict().items()}, tmp_path / "lstm.safetensors")
    saved = open_run(speaker, "cpu")
    asked = saved.spec.model.model_copy(update={"pretrained": str(tmp_path / "lstm.safetensors")})
    model = type(saved.task)(saved.spec.model_copy(update={"model": asked}), saved.task.codec, saved.task.facts).model()
    assert all(torch.equal(model.lstm.get_parameter(name), tensor) for name, tensor in lstm.state_dict().items())
