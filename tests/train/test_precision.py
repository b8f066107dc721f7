"""`train.precision: auto`: the run holds what it was, goes on with it anywhere, and all workers have the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import carrywave
from carrywave.cli.main import app
from carrywave.errors import RunError
from carrywave.launch.launcher import start
from carrywave.spec.load import parse
from carrywave.spec.spec import Spec
from carrywave.step import precision
from carrywave.train.fit import train


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the carry is passed along, and work moves as a wave. " * 8)
    return path


def spec(text: Path, **train: Any) -> Spec:
    data, model, batch = {"train": str(text)}, {"hidden": 6, "layers": 1}, {"lanes": 4, "steps": 8}
    return parse({"data": data, "model": model, "batch": batch, "train": {"max_steps": 2, **train}})


def held(run: Path) -> str:
    found: str = yaml.safe_load((run / "spec.yaml").read_text())["train"]["precision"]
    return found


def test_a_run_holds_what_auto_was_and_goes_on_with_it_elsewhere(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as gpu:
        gpu.setattr(precision, "made_for_bf16", lambda device: True)
        train(spec(text), run=run, device="cpu")
    assert held(run) == "bf16"
    # Here auto would be fp32, but the run was started in bf16.
    result = train(spec(text, max_steps=4), run=run, resume=True, device="cpu")
    assert result.task.spec.train.precision == held(run) == "bf16"
    with pytest.raises(RunError, match=r"the run was started with train\.precision=bf16, not fp32; keep the old value"):
        train(spec(text, max_steps=4, precision="fp32"), run=run, resume=True, device="cpu")


def test_on_a_cpu_it_is_fp32_and_the_dry_run_says_so(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", f"data.train={text}", "--dry-run", "--device", "cpu"]
    out = CliRunner().invoke(app, words).stdout
    assert yaml.safe_load(out)["train"]["precision"] == "fp32"
    assert ", fp32" in next(line for line in out.splitlines() if line.startswith("# plan "))
    monkeypatch.setattr(precision, "made_for_bf16", lambda device: True)
    assert yaml.safe_load(CliRunner().invoke(app, words).stdout)["train"]["precision"] == "bf16"
    assert yaml.safe_load(CliRunner().invoke(app, [*words, "train.precision=tf32"]).stdout)["train"]["precision"] == "tf32"


MIXED = """
import json
import os
import sys

from carrywave.runs.watcher import Silent
from carrywave.spec.load import parse
from carrywave.step import precision
from carrywave.train.fit import train

rank = int(os.environ["RANK"])
precision.made_for_bf16 = lambda device: rank != int(sys.argv[3])

class Told(Silent):
    def __init__(self):
        self.lines = []
    def say(self, line):
        self.lines.append(line)

watch = Told()
result = train(parse(json.loads(sys.argv[1])), run=sys.argv[2], device="cpu", watch=watch)
with open(f"{sys.argv[2]}.{rank}", "w") as file:
    json.dump({"precision": result.task.spec.train.precision, "said": watch.lines}, file)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("unfit", "precision_of_all"), [(1, "fp32"), (0, "fp32"), (7, "bf16")])
def test_workers_of_different_devices_have_one_precision(
    unfit: int, precision_of_all: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(carrywave.__file__).parents[1]))
    (tmp_path / "mixed.py").write_text(MIXED)
    asked = json.dumps(spec(text).model_dump(mode="json", exclude_unset=True))
    run = tmp_path / "run"
    ended = start([sys.executable, str(tmp_path / "mixed.py"), asked, str(run), str(unfit)], 2)
    assert ended.code == 0, ended
    told = [json.loads((tmp_path / f"run.{rank}").read_text()) for rank in range(2)]
    assert [each["precision"] for each in told] == [precision_of_all] * 2
    assert held(run) == precision_of_all
    why = f"train.precision is fp32 on all workers, because rank {unfit} (cpu) is not made for bf16"
    assert (why in told[0]["said"]) == (unfit < 2)
