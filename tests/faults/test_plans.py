"""A run that is resumed on other plans, and under a clock that jumps: the same answer, up to the order of summation or to the bit."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from _small import Job, carry_out, spec

from _whole_snapshots import load

BEGUN, STEPS = 17, 67  # a snapshot in mid-epoch, and 50 steps more
PLANS: dict[str, Job] = {
    "1x1": {},
    "2x1": {"replicas": 2},
    "1x2": {"stages": 2, "chunk_steps": 2},
    "4x1": {"replicas": 4},
    "2x2": {"replicas": 2, "stages": 2, "chunk_steps": 4},
}
WORKERS = {1: ["1x1"], 2: ["2x1", "1x2"], 4: ["4x1", "2x2"]}
LIMITS = {"fp64": 1e-10, "fp32": 1e-5}


def words(folder: Path, precision: str, plan: str, steps: int) -> Job:
    # A schedule would depend on the number of steps, which is another one at first.
    return spec(folder, plan=PLANS[plan], precision=precision, max_steps=steps, schedule="constant")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that two replicas began and every plan went on with, and one that one worker did alone."""
    folder = tmp_path_factory.mktemp("plans")
    begin: list[Job] = [{"run": str(folder / f"begun-{kind}"), "spec": words(folder, kind, "2x1", BEGUN)} for kind in LIMITS]
    carry_out(folder, begin, 2, "begin")
    alone: list[Job] = [{"run": str(folder / f"alone-{kind}"), "spec": words(folder, kind, "1x1", STEPS)} for kind in LIMITS]
    for workers, plans in WORKERS.items():
        jobs = alone if workers == 1 else []
        for plan in plans:
            for kind in LIMITS:
                run = folder / f"{plan}-{kind}"
                shutil.copytree(folder / f"begun-{kind}", run)
                jobs.append({"run": str(run), "spec": words(folder, kind, plan, STEPS), "resume": True})
        for told in carry_out(folder, jobs, workers, f"workers-{workers}"):
            assert [each.get("ending") for each in told] == ["done"] * len(jobs), told
    return folder


def largest(ours: Any, theirs: Any) -> float:
    """The largest difference, relative to the largest number of its tensor."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max().clamp(min=1e-30)) for name in theirs)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_resumed_on_another_plan(folder: Path) -> None:
    for plan in PLANS:
        for kind in LIMITS:
            compare(plan, kind, folder)


def compare(plan: str, kind: str, folder: Path) -> None:
    run, alone = folder / f"{plan}-{kind}", folder / f"alone-{kind}"
    ours, theirs = load(run / "snapshots"), load(alone / "snapshots")
    assert ours.meta["progress"]["step"] == theirs.meta["progress"]["step"] == STEPS
    parameters, carry = largest(ours.parameters, theirs.parameters), largest(ours.carry, theirs.carry)
    print(f"{plan} {kind}: parameters {parameters:.1e}, carry {carry:.1e}")
    assert max(parameters, carry) < LIMITS[kind]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_clock_that_jumps_changes_nothing(tmp_path: Path) -> None:
    """Years forward and back, on each worker differently; and files that are from the future, or of 1970."""
    begin: list[Job] = [
        {"run": str(tmp_path / run), "spec": spec(tmp_path, plan=PLANS["2x1"], max_steps=17), "clock": run == "jumps"}
        for run in ("calm", "jumps")
    ]
    carry_out(tmp_path, begin, 2, "begin")
    for number, path in enumerate(sorted((tmp_path / "jumps").rglob("*"))):
        seconds = 2**33 if number % 2 else 0
        os.utime(path, (seconds, seconds))
    again = [job | {"resume": True, "spec": spec(tmp_path, plan=PLANS["2x1"], max_steps=40)} for job in begin]
    for told in carry_out(tmp_path, again, 2, "again"):
        assert [each.get("ending") for each in told] == ["done", "done"], told
    calm, jumps = (tmp_path / job["run"] for job in begin)
    for name in ("weights.safetensors", "metrics.jsonl", "snapshots/last"):
        assert (calm / name).read_bytes() == (jumps / name).read_bytes()
    kept = [sorted(path.name for path in (run / "snapshots").iterdir()) for run in (calm, jumps)]
    assert kept[0] == kept[1]
    for path in (calm / "snapshots").glob("*.safetensors"):
        assert path.read_bytes() == (jumps / path.relative_to(calm)).read_bytes()
