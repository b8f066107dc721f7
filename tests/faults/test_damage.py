"""Snapshots that were damaged, mixed up, or are of something else: two workers refuse them alike, in one line, and change nothing."""

from __future__ import annotations

import json
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
from carrywave.runs.checkpoint import manifest

CHANGED = r"^the data has changed since the snapshot was written \(.*text.txt\); restore the old data"
OTHER = "resume from another snapshot or start a new run"
FILES = ("carry", "carry", "extra", "manifest", "optimizer", "optimizer", "parameters", "parameters")  # as two workers write them


def last(run: Path) -> Path:
    return run / "snapshots" / (run / "snapshots" / "last").read_text().strip()


def truncate(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])


def flip(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def remove(path: Path, draw: random.Random) -> None:
    path.unlink()


def mix(run: Path) -> None:
    """Parameters of the snapshot before."""
    before = sorted(path for path in (run / "snapshots").iterdir() if path.is_dir())[-2]
    for path in before.glob("parameters*"):
        shutil.copy(path, last(run) / path.name)


def newer(run: Path) -> None:
    path = last(run) / "manifest.json"
    said = json.loads(path.read_text()) | {"format": 99}
    path.write_bytes(manifest.encode(said | {"sha256": manifest.digest(said)}))


def other_dtype(run: Path) -> None:
    old = _whole_snapshots.load(run / "snapshots")
    parameters = {name: tensor.double() for name, tensor in old.parameters.items()}
    _whole_snapshots.save(run / "snapshots", "step-other", replace(old, parameters=parameters), 9)


def other_model(run: Path) -> None:
    old = _whole_snapshots.load(run / "snapshots")
    parameters = {name: tensor for name, tensor in old.parameters.items() if "_l1" not in name}
    _whole_snapshots.save(run / "snapshots", "step-other", replace(old, parameters=parameters), 9)


def other_pointer(run: Path) -> None:
    (run / "snapshots" / "last").write_text("../../somewhere\n")


WHOLE: dict[str, tuple[Callable[[Path], None], str]] = {
    "mixed steps": (mix, f"is damaged: its SHA-256 does not match the manifest; {OTHER}"),
    "newer format": (newer, "has format 99, but this version reads format 2; use the version that wrote it"),
    "other dtype": (other_dtype, r"the snapshot has encoder.weight as .* float64, expected .* float32; use the spec"),
    "other model": (other_model, "the snapshot is from another model: it has no lstm.weight_ih_l1; use the spec it was made with"),
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
    sound = sorted(last(folder / "run").iterdir())
    assert tuple(re.split("[-.]", path.name)[0] for path in sound) == FILES
    longer = spec(folder, max_steps=14)
    jobs: list[Job] = []

    def case(name: str, given: Job = longer) -> Path:
        run = folder / name.replace(" ", "-")
        shutil.copytree(folder / "run", run)
        jobs.append({"run": str(run), "spec": given, "resume": True, "name": name})
        return run

    for how, harm in EACH.items():
        for number, path in enumerate(sound):
            harm(last(case(f"{how} {number}")) / path.name, draw)
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
        for number, kind in enumerate(FILES):
            message = refused(refusals[f"{how} {number}"])
            # Without a manifest it is no snapshot at all.
            assert f"/{kind}" in message or (how == "missing" and "last does not name a snapshot" in message), (how, kind)
    for name, (_, message) in {**WHOLE, **BY_SPEC, "changed data": (None, CHANGED)}.items():
        assert re.search(message, refused(refusals[name])), name
    # Else all the others would prove nothing.
    assert [each["ending"] for each in refusals["sound"]] == ["done", "done"]
