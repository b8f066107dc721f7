"""`carrywave launch`: what is written where, and what is refused; `--on ray` and `--continue` before anything is trained."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from carrywave.cli.main import app


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "CARRYWAVE_WORKER", "CARRYWAVE_SHARE_GPU"):
        monkeypatch.delenv(name, raising=False)
    Path("Words_1.yaml").write_text("task: language\n# ours\nmodel: {hidden: 3}\n")


def call(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.stdout, result.stderr


def test_the_script_goes_to_stdout_or_into_a_file() -> None:
    code, out, err = call("launch", "--to", "slurm", "Words_1.yaml", "train.lr=0.5", "--nodes", "3")
    assert (code, err) == (0, "")
    assert "#SBATCH --job-name=words-1\n" in out
    assert "carrywave train Words_1.yaml train.lr=0.5 --run runs/words-1 --continue --devices 1 &\n" in out
    assert call("launch", "--to", "slurm", "Words_1.yaml", "train.lr=0.5", "--nodes", "3", "-o", "job.sh") == (
        0,
        "",
        "carrywave: wrote job.sh; start it with: sbatch job.sh\n",
    )
    assert Path("job.sh").read_text() == out


def test_the_spec_goes_along_to_kubernetes() -> None:
    code, out, _ = call("launch", "--to", "kubernetes", "Words_1.yaml", "--image", "i", "--claim", "c", "--name", "n", "--time", "1h")
    assert code == 0
    config, *_, job = yaml.safe_load_all(out)
    assert config["data"] == {"spec.yaml": Path("Words_1.yaml").read_text()}
    assert (job["metadata"]["name"], job["spec"]["activeDeadlineSeconds"]) == ("n", 3600)


def test_a_task_for_skypilot_without_a_spec() -> None:
    code, out, _ = call("launch", "--to", "skypilot", "--device", "cpu", "--setup", "pip install it")
    assert code == 0
    task = yaml.safe_load(out)
    assert (task["name"], task["run"]) == ("language", "carrywave train --run runs/language --continue --devices 1 --device cpu")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--to", "slurm", "model.hiden=3"], "unknown key model.hiden; did you mean model.hidden?"),
        (["--to", "slurm", "--time", "soon"], "--time soon is not a time limit; write it like 90m, 12h, 2d or 1-12:00:00"),
        (["--to", "slurm", "plan.stages=2"], "plan.stages=2 does not fit --nodes 1 x --devices 1 = 1 workers"),
        (["--to", "slurm", "--claim", "c"], "--claim is for --to kubernetes; remove it"),
        (["--to", "kubernetes", "--setup", "x"], "--setup is for --to skypilot; remove it"),
        (["--to", "slurm", "-o", "none/job.sh"], "none/job.sh cannot be written: folder none not found"),
        (["--to", "kubernetes"], "--to kubernetes needs an image that has carrywave in it; pass --image IMAGE"),
    ],
)
def test_what_is_refused(words: list[str], message: str) -> None:
    code, out, err = call("launch", *words)
    assert (code, out) == (2, "")
    assert err.startswith(f"carrywave: {message}")
    assert err.count("\n") == 1
    assert os.listdir() == ["Words_1.yaml"]


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        (["--on", "ray"], {}, "--on ray needs the number of workers; say how many with --devices N"),
        (["--continue"], {}, "--continue needs a run folder; pass --run DIR"),
    ],
)
def test_what_training_refuses(words: list[str], variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code, _, err = call("train", *words, "--device", "cpu")
    assert code == 2
    assert err.startswith(f"carrywave: {message}")
    assert os.listdir() == ["Words_1.yaml"]
