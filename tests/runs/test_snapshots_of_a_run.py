"""When a run writes snapshots, that it goes on from one in mid-epoch to the bit, and what it does where one cannot be written."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest

from _whole_snapshots import load
from carrywave.errors import ResourceError, RunError
from carrywave.runs.checkpoint.snapshot import open_stored
from carrywave.runs.watcher import Silent
from carrywave.spec.load import parse
from carrywave.step.trainer import Trainer
from carrywave.train import loop as loops
from carrywave.train.fit import train

TEXT = "".join(f"line {i % 7} says {i * i % 11} and {'abcdefg'[i % 7] * (i % 5)}\n" for i in range(60))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "train.txt").write_text(TEXT)
    return tmp_path / "train.txt"


def language(text: Path, **keys: Any) -> Any:
    """A run of two epochs of 18 steps."""
    return parse(
        {
            "data": {"train": str(text)},
            "model": {"hidden": 6, "layers": 2, "dropout": 0.2},
            "batch": {"lanes": 4, "steps": 16},
            "train": {"epochs": 2, "lr": 5e-3, "log_every": 3, "keep": 99, "snapshot_every": 8, **keys},
        }
    )


def steps_of(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "snapshots").glob("step-*"))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def last(run: Path) -> Path:
    return run / "snapshots" / (run / "snapshots" / "last").read_text().strip()


class Listening(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def test_every_so_many_steps_and_at_the_end_of_an_epoch(text: Path, tmp_path: Path) -> None:
    train(language(text), run=tmp_path / "run", device="cpu")
    assert steps_of(tmp_path / "run") == [8, 16, 18, 24, 32, 36]
    for every in (0, None):
        train(language(text, snapshot_every=every, max_steps=20), run=tmp_path / f"none-{every}", device="cpu")
        assert steps_of(tmp_path / f"none-{every}") == [18, 20]
    train(language(text, snapshot_every=9, max_steps=9), run=tmp_path / "short", device="cpu")
    assert steps_of(tmp_path / "short") == [9]


@pytest.fixture(scope="module")
def through(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("through")
    (folder / "train.txt").write_text(TEXT)
    train(language(folder / "train.txt", keep=2), run=folder / "run", device="cpu")
    return folder / "run"


@pytest.mark.parametrize("dies_at", [1, 9, 18, 27])
def test_a_run_that_died_ends_as_if_it_had_not(through: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: int) -> None:
    spec = language(through.parent / "train.txt", keep=2)
    update, left = Trainer.update, [dies_at]

    def dying(self: Trainer, *batches: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise ZeroDivisionError("dead")
        return update(self, *batches)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", dying)
        with pytest.raises(ZeroDivisionError):
            train(spec, run=tmp_path / "run", device="cpu")
    if dies_at <= 8:
        assert not (tmp_path / "run" / "snapshots" / "last").exists()
        return
    train(spec, run=tmp_path / "run", resume=True, device="cpu")
    for name in ("metrics.jsonl", "weights.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (through / name).read_bytes(), name
    wanted = open_stored(through / "snapshots")
    found = open_stored(tmp_path / "run" / "snapshots")
    assert found.meta.keys() == wanted.meta.keys()
    assert {key for key in found.meta if found.meta[key] != wanted.meta[key]} <= {"timing_bytes"}  # the clock's
    ours, theirs = contents(last(tmp_path / "run")), contents(last(through))
    assert ours.keys() == theirs.keys()
    assert all(ours[name] == theirs[name] for name in ours if name != "manifest.json")


def test_best_names_the_snapshot_of_the_best_evaluation(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([3.0, 2.0, 2.5, 2.6, 2.7, 2.8])
    real = loops.evaluate_part
    monkeypatch.setattr(loops, "evaluate_part", lambda *args, **more: real(*args, **more) | {"loss": next(losses)})
    spec = language(text, evaluate_every=7, snapshot_every=8, keep=1)
    train(spec, run=tmp_path / "run", device="cpu")
    folder = tmp_path / "run" / "snapshots"
    assert (folder / "best").read_text() == "step-00000014\n"
    assert steps_of(tmp_path / "run") == [14, 36]
    kept = load(folder / "step-00000014")
    assert kept.meta["progress"]["best"]["loss"] == 2.0
    assert kept.meta["progress"]["best_step"] == 14


def test_best_that_a_crash_left_behind_is_mended(text: Path, tmp_path: Path) -> None:
    train(language(text, snapshot_every=0), run=tmp_path / "run", device="cpu")
    folder = tmp_path / "run" / "snapshots"
    assert (folder / "best").read_text() == "step-00000036\n"
    (folder / "best").write_text("step-00000018\n")
    train(language(text, snapshot_every=0), run=tmp_path / "run", resume=True, device="cpu")  # it is over, and nothing is trained
    assert (folder / "best").read_text() == "step-00000036\n"


class FullDisk:
    """A disk that has no room for some of the snapshots."""

    def __init__(self, patch: pytest.MonkeyPatch, where: str) -> None:
        real = os.fsync

        def fsync(handle: int) -> None:
            if re.search(where, os.readlink(f"/proc/self/fd/{handle}")):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(handle)

        patch.setattr(os, "fsync", fsync)


@pytest.fixture
def proc() -> None:
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("paths of open files cannot be told here")


@pytest.mark.usefixtures("proc")
def test_a_snapshot_that_cannot_be_written_ends_the_run_which_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, through: Path
) -> None:
    spec = language(through.parent / "train.txt", keep=2)
    with monkeypatch.context() as patch:
        FullDisk(patch, r"tmp-step-00000016")
        with pytest.raises(
            ResourceError, match="step-00000016 could not be written: No space left on device; the previous snapshot is kept"
        ):
            train(spec, run=tmp_path / "run", device="cpu")
    assert steps_of(tmp_path / "run") == [8]
    train(spec, run=tmp_path / "run", resume=True, device="cpu")
    for name in ("metrics.jsonl", "weights.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (through / name).read_bytes()


@pytest.mark.usefixtures("proc")
def test_the_last_one_that_cannot_be_written_is_an_error(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FullDisk(monkeypatch, r"tmp-step-00000036")
    with pytest.raises(RunError, match="step-00000036 could not be written: No space left on device; the previous snapshot is kept; free"):
        train(language(text), run=tmp_path / "run", device="cpu")
    assert last(tmp_path / "run").name == "step-00000032"
    assert not list((tmp_path / "run" / "snapshots").glob(".tmp*"))
