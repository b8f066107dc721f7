"""When a run writes snapshots, that it goes on from one to the bit, and what it does where one cannot be written."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from _whole_snapshots import load
from carrywave.errors import ResourceError, RunError
from carrywave.runs.checkpoint.snapshot import last
from carrywave.runs.watcher import Silent
from carrywave.spec.load import parse
from carrywave.step.trainer import Trainer
from carrywave.train import loop as loops
from carrywave.train.fit import train

TEXT = "".join(f"line {i % 7} says {i * i % 11} and {'abcdefg'[i % 7] * (i % 5)}\n" for i in range(60))


class Listening(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def language(text: Path, **keys: Any) -> Any:
    """A run of two epochs of 18 steps."""
    return parse(
        {
            "data": {"train": str(text)},
            "model": {"hidden": 6, "layers": 2, "dropout": 0.2},
            "batch": {"lanes": 4, "steps": 16},
            "train": {"epochs": 2, "lr": 5e-3, "log_every": 3, "keep": 2, "snapshot_every": 8, **keys},
        }
    )


def steps_of(run: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("step-")) for path in (run / "snapshots").glob("step-*"))


def equal(ours: Path, theirs: Path) -> bool:
    """True if two runs have left the same: rows, best weights, last snapshot."""
    files = ("metrics.jsonl", "weights.safetensors", "snapshots/last", f"snapshots/{last(theirs / 'snapshots').name}")
    return all((ours / name).read_bytes() == (theirs / name).read_bytes() for name in files)


@pytest.fixture(scope="module")
def through(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("through")
    (folder / "train.txt").write_text(TEXT)
    train(language(folder / "train.txt"), run=folder / "run", device="cpu")
    return folder / "run"


@pytest.fixture
def text(through: Path) -> Path:
    return through.parent / "train.txt"


def test_every_so_many_steps_and_at_the_end_of_an_epoch(text: Path, tmp_path: Path) -> None:
    for name, keys, wanted in (
        ("all", {}, [8, 16, 18, 24, 32, 36]),
        ("none", {"snapshot_every": 0, "max_steps": 20}, [18, 20]),
        ("one", {"snapshot_every": 9, "max_steps": 9}, [9]),
    ):
        train(language(text, keep=99, **keys), run=tmp_path / name, device="cpu")
        assert steps_of(tmp_path / name) == wanted


@pytest.mark.parametrize("dies_at", [1, 9, 18, 27])
def test_a_run_that_died_ends_as_if_it_had_not(
    through: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: int
) -> None:
    update, left, watch = Trainer.update, [dies_at], Listening()

    def dying(self: Trainer, *batches: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise ZeroDivisionError("dead")
        return update(self, *batches)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", dying)
        with pytest.raises(ZeroDivisionError):
            train(language(text), run=tmp_path / "run", device="cpu")
    train(language(text), run=tmp_path / "run", resume=True, device="cpu", watch=watch)
    begins = "ended before its first snapshot: restarting it from the beginning" if dies_at <= 8 else "resuming from step "
    assert any(begins in line for line in watch.lines)
    assert equal(tmp_path / "run", through)


def test_a_run_without_a_snapshot_begins_anew_by_the_same_call(through: Path, text: Path, tmp_path: Path) -> None:
    """Whatever of it a killed process has left; what is not a run's own is left alone."""
    run = tmp_path / "run"
    (run / "snapshots").mkdir(parents=True)
    for name in ("metrics.jsonl", "facts.json", ".spec.yaml.tmp", "snapshots/.step-00000008.safetensors.tmp"):
        (run / name).write_text('{"init": "other"}')
    train(language(text), run=run, device="cpu")
    assert equal(run, through)
    for name in ("notes.txt", "weights.safetensors"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_text("mine")
        with pytest.raises(RunError, match="already exists and is not empty; use resume=True to continue it, or use another run"):
            train(language(text), run=folder, device="cpu")
        assert [path.name for path in folder.iterdir()] == [name]


def test_the_best_evaluation_is_that_of_the_weights_in_their_file(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a run that goes on from an older snapshot: what was found later is not forgotten, and metrics name its step."""
    real, run = loops.evaluate_part, tmp_path / "run"
    losses = iter([3.0, 2.0, 1.0, 2.6, 2.7, 2.5, 2.4, 2.3, 2.2, 2.1])
    monkeypatch.setattr(loops, "evaluate_part", lambda *args, **more: real(*args, **more) | {"loss": next(losses)})
    train(language(text, evaluate_every=7, keep=99), run=run, device="cpu")
    assert load(run / "snapshots").meta["progress"]["best_step"] == 21
    (run / "snapshots" / "last").write_text("step-00000016\n")
    train(language(text, max_steps=17, evaluate_every=7), run=run, resume=True, device="cpu")
    found = load(run / "snapshots").meta["progress"]
    assert (found["step"], found["best_step"], found["best"]["loss"]) == (17, 21, 1.0)
    (run / "weights.safetensors").unlink()
    watch = Listening()
    train(language(text, max_steps=20, evaluate_every=7), run=run, resume=True, device="cpu", watch=watch)
    assert "does not hold the best weights so far: the next evaluation counts as the best" in watch.lines[0]
    assert load(run / "snapshots").meta["progress"]["best_step"] == 20
    (run / "weights.safetensors").write_bytes(b"")
    with pytest.raises(RunError, match="does not hold the best weights so far; restore the file from a copy"):
        train(language(text, max_steps=20, evaluate_every=7), run=run, resume=True, device="cpu")


@pytest.mark.parametrize("where", [r"\.step-00000016", r"\.step-00000036", r"\.last\.tmp", r"metrics\.jsonl"])
def test_a_full_disk_ends_the_run_which_resumes(
    where: str, through: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("paths of open files cannot be told here")
    real, after = os.fsync, [1 if "step" in where else 3]

    def fsync(handle: int) -> None:
        if re.search(where, os.readlink(f"/proc/self/fd/{handle}")):
            after[0] -= 1
            if not after[0]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(ResourceError, match=r"could not be written: No space left on device; .*free disk space"):
            train(language(text), run=tmp_path / "run", device="cpu")
    assert not list((tmp_path / "run" / "snapshots").glob(".*"))
    train(language(text), run=tmp_path / "run", resume=True, device="cpu")
    assert equal(tmp_path / "run", through)


def test_starts_and_ends_are_recorded_beside_metrics(through: Path, text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def history() -> list[dict[str, Any]]:
        return [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]

    train(language(text, max_steps=12), run=run, device="cpu")
    train(language(text), run=run, resume=True, device="cpu")
    assert [(row["event"], row["step"]) for row in history()] == [("start", 0), ("end", 12), ("start", 12), ("end", 36)]
    assert history()[0].keys() >= {"time", "attempt", "workers", "device", "carrywave", "torch", "python", "machine"}
    train(language(text), run=run, resume=True, device="cpu")  # nothing is left to train, so nothing is written
    assert len(history()) == 4
    (run / "history.jsonl").write_text(json.dumps(history()[0]) + "\n")  # killed at its end
    train(language(text), run=run, resume=True, device="cpu")
    assert [row["event"] for row in history()] == ["start", "start", "end"]
