"""Snapshots that were damaged, mixed up, or are of something else: two workers refuse them alike, in one line, and change nothing."""

from __future__ import annotations

import random
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from _small import Job, carry_out, spec

import _whole_snapshots
from carrywave.runs.checkpoint import snapshot

CHANGED = r"^the data has changed since the snapshot was written \(.*text.txt\); restore the old data"
TIMES = 3  # at different places


def last(run: Path) -> Path:
    return snapshot.last(run / "snapshots")


def truncate(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])


def flip(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def remove(path: Path, draw: random.Random) -> None:
    path.unlink()


def other_dtype(run: Path) -> None:
    old = _whole_snapshots.load(run / "snapshots")
    parameters = {name: tensor.double() for name, tensor in old.parameters.items()}
    _whole_snapshots.save(run / "snapshots", 99, replace(old, parameters=parameters))


def other_model(run: Path) -> None:
    old = _whole_snapshots.load(run / "snapshots")
    parameters = {name: tensor for name, tensor in old.parameters.items() if "_l1" not in name}
    _whole_snapshots.save(run / "snapshots", 99, replace(old, parameters=parameters))


def other_pointer(run: Path) -> None:
    (run / "snapshots" / "last").write_text("../../somewhere\n")


WHOLE: dict[str, tuple[Callable[[Path], None], str]] = {
    "other dtype": (other_dtype, r"torch.float64 for encoder.weight, but the model has .* torch.float32; "),
    "other model": (other_model, "has nothing for lstm.weight_ih_l1, but the model has"),
    "pointer": (other_pointer, "last does not name a snapshot in its folder; replace its content"),
}
BY_SPEC: dict[str, tuple[dict[str, Any], str]] = {
    "spec of another model": ({"model": {"layers": 3}}, "the run was started with model.layers=2, not 3; keep the old value"),
    "spec of another dtype": ({"precision": "fp64"}, "the run was started with train.precision=fp32, not fp64; keep the old value"),
}
EACH: dict[str, Callable[[Path, random.Random], None]] = {"truncated": truncate, "bit": flip, "missing": remove}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Job]]:
    """What both workers told of each case, with whether the run was left as it was."""
    folder = tmp_path_factory.mktemp("damage")
    draw = random.Random(8)
    words = spec(folder)
    [told, _] = carry_out(folder, [{"run": str(folder / "run"), "spec": words}], 2, "first")
    assert told[0]["ending"] == "done"
    longer = spec(folder, max_steps=14)
    jobs: list[Job] = []

    def case(name: str, given: Job = longer) -> Path:
        run = folder / name.replace(" ", "-")
        shutil.copytree(folder / "run", run)
        jobs.append({"run": str(run), "spec": given, "resume": True, "name": name})
        return run

    for how, harm in EACH.items():
        for number in range(TIMES):
            harm(last(case(f"{how} {number}")), draw)
    for name, (spoil, _) in WHOLE.items():
        spoil(case(name))
    for name, (changes, _) in BY_SPEC.items():
        case(name, spec(folder, max_steps=14, **changes))
    case("sound")
    case("changed data")
    jobs[-1]["instead"] = str(folder / "text.txt")
    before = {job["name"]: contents(Path(job["run"])) for job in jobs}
    told = carry_out(folder, jobs, 2, "damaged")
    print(f"the longest refusal took {max(one['seconds'] for each in told for one in each if 'error' in one):.2f} s")
    kept = {job["name"]: contents(Path(job["run"])) == before[job["name"]] for job in jobs}
    return {job["name"]: [each[number] | {"kept": kept[job["name"]]} for each in told] for number, job in enumerate(jobs)}


def refused(told: list[Job]) -> str:
    """The one line of all workers."""
    for each in told:
        assert "error" in each, each
        assert re.search(r"\S; \S", each["error"]), each
        assert "\n" not in each["error"]
        assert each["kept"]
    assert len({each["error"] for each in told}) == 1, told
    return str(told[0]["error"])


def test_what_is_refused_and_what_is_not(refusals: dict[str, list[Job]]) -> None:
    """One test: the cases share two processes, and tests may be dealt out to several."""
    for how in EACH:
        for number in range(TIMES):
            message = refused(refusals[f"{how} {number}"])
            assert "step-00000012.safetensors" in message or (how == "missing" and "last does not name a snapshot" in message), how
    for name, (_, message) in {**WHOLE, **BY_SPEC, "changed data": (None, CHANGED)}.items():
        assert re.search(message, refused(refusals[name])), name
    # Else all the others would prove nothing.
    assert [each["ending"] for each in refusals["sound"]] == ["done", "done"]
