"""`plan: auto` with real workers: all follow what rank 0 has chosen, the result is one worker's, and a run that goes on keeps its plan."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1] / "plan"))
from _machines import machine

from carrywave.plan.profile import Link

SIZES = ("model.hidden=6", "model.layers=3", "batch.lanes=4", "batch.steps=8")
WORDS = (*SIZES, "train.precision=fp64", "train.schedule=constant", "train.max_steps=40", "train.epochs=9")
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def profiles(tmp_path: Path) -> dict[str, str]:
    """A machine on which stages are best, one on which replicas are, and one on which nothing beats a single device."""
    (tmp_path / "text.txt").write_text("the carry is passed along, and work moves as a wave. " * 40)
    made = {
        "stages": machine("fp64", within=Link(1e-7, 1e5)),  # sums of gradients take very long, chunks are small
        "replicas": machine("fp64", within=Link(1e-7, 1e12), task_seconds=1.0),
        "alone": machine("fp64", within=Link(10.0, 1e5)),
    }
    for name, profile in made.items():
        profile.write(tmp_path / f"{name}.json")
    return {name: str(tmp_path / f"{name}.json") for name in made}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_that_goes_on_keeps_its_plan(profiles: dict[str, str], python: Run, tmp_path: Path) -> None:
    data = ("data.train=text.txt", "data.tokens=char", "--device", "cpu")

    def train(*words: str, by: str) -> str:
        ended = python("-m", "carrywave", "train", *WORDS, *data, *words, CARRYWAVE_PROFILE=profiles[by])
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def plan_of(run: str) -> dict[str, object]:
        found: dict[str, object] = json.loads((tmp_path / run / "plan.json").read_text())
        return found

    def planned(run: str) -> tuple[object, object]:
        return plan_of(run)["replicas"], plan_of(run)["stages"]

    train("--run", "one", by="stages")
    said = train("--run", "staged", "--devices", "2", "train.max_steps=30", by="stages")
    assert planned("staged") == (1, 2)
    assert "chosen: 2 stages" in said
    assert "one device would be faster" in train("--run", "both", "--devices", "2", by="alone")
    train("--run", "shared", "--devices", "2", by="replicas")
    assert planned("shared") == (2, 1)
    # The machine is another one now, and the run goes on as it was, to the bits of one that was not evaluated at step 30.
    before = plan_of("staged")
    train("--run", "staged", "--resume", "--devices", "2", by="replicas")
    assert plan_of("staged") == before
    train("--run", "whole", "--devices", "2", by="stages")
    staged, whole = (load_file(tmp_path / run / "weights.safetensors") for run in ("staged", "whole"))
    assert all(bool((staged[name] == whole[name]).all()) for name in whole)
    alone, *others = (load_file(tmp_path / run / "weights.safetensors") for run in ("one", "staged", "both", "shared"))
    for other in others:
        assert max(float((alone[name] - other[name]).abs().max()) for name in alone) < 1e-9
    assert "plan      2 stages" in train("--devices", "2", "--dry-run", by="stages")


@pytest.mark.timeout(300)
def test_without_a_profile_real_steps_decide(python: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CARRYWAVE_PROFILE")
    (tmp_path / "text.txt").write_text("the carry is passed along, and work moves as a wave. " * 40)
    words = ("data.train=text.txt", "data.tokens=char", "--device", "cpu", "train.max_steps=3")
    alone = python("-m", "carrywave", "train", *WORDS, *words, "--run", "alone")
    ended = python("-m", "carrywave", "train", *WORDS, *words, "--run", "two", "--devices", "2")
    assert (alone.returncode, ended.returncode) == (0, 0), ended.stderr
    assert "chosen" not in alone.stdout
    assert re.search(r"chosen: 2 (replicas|stages).*: [\d.e+]+ ms a step, measured, against 2 (replicas|stages)", ended.stdout)
    # What was tried has left no trace: the weights are those of one device.
    one, two = (load_file(tmp_path / run / "weights.safetensors") for run in ("alone", "two"))
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-9
