"""Snapshots in the background: what is written is what stood at `begin`, a failure is told, and a kill at any byte leaves a whole one."""

from __future__ import annotations

import errno
import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from _whole_snapshots import load
from carrywave.errors import Diverged, RunError
from carrywave.parallel.liveness import heartbeat
from carrywave.parallel.world import World
from carrywave.runs.checkpoint import writer as writers
from carrywave.runs.checkpoint.snapshot import write_part
from carrywave.runs.checkpoint.writer import Writer

KILLED = Path(__file__).with_name("_killed.py")


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    made = Writer(World.alone(torch.device("cpu")), tmp_path / "snapshots")
    made.meet()
    return made


def begin(writer: Writer, weights: torch.Tensor, step: int = 1, **more: Any) -> None:
    writer.begin(f"step-{step}", {"parameters": {"w": weights}}, {"step": step}, keep=2, **more)


def test_what_is_written_is_what_stood_there(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def slow(*args: Any) -> Any:
        assert go_on.wait(30)
        return write_part(*args)

    monkeypatch.setattr(writers, "write_part", slow)
    weights = torch.arange(6.0)
    begin(writer, weights)
    assert not (writer.folder / "last").exists()
    weights.add_(1)  # training goes on
    go_on.set()
    assert writer.settle() is None
    assert torch.equal(load(writer.folder).parameters["w"], torch.arange(6.0))
    assert sorted(path.name for path in writer.folder.iterdir()) == ["last", "step-1"]
    begin(writer, weights, 2)
    assert writer.settle() is None
    assert torch.equal(load(writer.folder).parameters["w"], torch.arange(1.0, 7.0))
    assert writer.settle() is None  # nothing is being written


def test_waiting_for_a_slow_disk_is_no_hang(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever watches for steps is told that none are to be expected, for as long as it takes."""
    seen: list[bool] = []
    go_on = threading.Event()

    def slow(*args: Any) -> Any:
        assert go_on.wait(30)
        seen.append(heartbeat.is_training())
        return write_part(*args)

    monkeypatch.setattr(writers, "write_part", slow)
    heartbeat.mark()
    begin(writer, torch.ones(3))
    assert heartbeat.is_training()  # it is written beside the training
    rest = heartbeat.rest
    monkeypatch.setattr(heartbeat, "rest", lambda: (rest(), go_on.set()))
    assert writer.settle() is None
    assert seen == [False]


def test_a_folder_that_was_removed_is_not_made_again(writer: Writer) -> None:
    gone = Writer(writer.world, writer.folder.parent / "gone" / "snapshots")
    begin(gone, torch.ones(3))
    failure = gone.settle()
    assert failure is not None
    assert "could not be written: No such file or directory" in str(failure)
    assert not gone.folder.parent.exists()


def test_memory_is_used_again(writer: Writer) -> None:
    weights = torch.ones(5)
    begin(writer, weights)
    writer.settle()
    rooms = {key: room.data_ptr() for key, room in writer._memory.items()}
    begin(writer, weights, 2)
    writer.settle()
    assert {key: room.data_ptr() for key, room in writer._memory.items()} == rooms
    begin(writer, torch.ones(3), 3)  # another shape
    writer.settle()
    assert load(writer.folder).parameters["w"].shape == (3,)


def test_a_full_disk_is_told_and_leaves_no_draft(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(writer, torch.zeros(3))
    assert writer.settle() is None

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        begin(writer, torch.ones(3), 2)
        failure = writer.settle()
    assert isinstance(failure, RunError)
    assert str(failure).startswith(
        f"snapshot {writer.folder / 'step-2'} could not be written: No space left on device; the previous snapshot"
    )
    assert sorted(path.name for path in writer.folder.iterdir()) == ["last", "step-1"]
    begin(writer, torch.ones(3), 2)
    assert writer.settle() is None
    assert torch.equal(load(writer.folder).parameters["w"], torch.ones(3))


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    writer = Writer(World.alone(torch.device("cpu")), tmp_path / "file" / "snapshots")
    writer.meet()
    begin(writer, torch.zeros(3))
    assert "could not be written: Not a directory; the previous snapshot is kept" in str(writer.settle())


def test_a_fault_of_our_own_is_told_too(writer: Writer) -> None:
    def broken() -> None:
        raise ValueError("two\nlines")

    begin(writer, torch.zeros(3), before=broken)
    failure = str(writer.settle())
    assert "step-1 could not be written: ValueError: two lines; " in failure
    assert list(writer.folder.iterdir()) == []


def test_weights_that_are_no_numbers_are_not_written(writer: Writer) -> None:
    begin(writer, torch.zeros(3))
    writer.settle()
    begin(writer, torch.tensor([math.nan]), 2)
    assert isinstance(writer.settle(), Diverged)
    assert sorted(path.name for path in writer.folder.iterdir()) == ["last", "step-1"]


def test_a_run_that_fails_waits_a_while_for_its_snapshot(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[threading.Event] = []

    def slow(*args: Any) -> Any:
        begun[0].wait(30)
        return write_part(*args)

    monkeypatch.setattr(writers, "write_part", slow)
    for ends, there in ((False, False), (True, True)):
        begun[:] = [threading.Event()]
        begin(writer, torch.zeros(3))
        if ends:
            begun[0].set()
        said = writer.close(0.05 if not ends else 30)
        assert said == (None if ends else "a snapshot was still incomplete 0.05 s after the run failed")
        assert (writer.folder / "last").exists() == there
        begun[0].set()
        writer.settle()
        if not there:
            (writer.folder / "last").unlink()


def test_a_part_that_failed_does_not_end_the_wait_for_the_others(tmp_path: Path) -> None:
    """The draft is removed after it: nobody may be writing into it then."""
    writer = Writer(World(0, 3, 0, 3, torch.device("cpu"), "gloo"), tmp_path)
    job = writers._Job(tmp_path / "step-1", tmp_path, {}, None, {}, 1, False, lambda: None)
    (tmp_path / "report-1.json").write_text('{"failure": ["RunError", "full; free some"]}')
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(writer._complete(job, {})))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    (tmp_path / "draft").write_text('{"files": {}}')
    (tmp_path / "draft").rename(tmp_path / "report-2.json")  # whole at once, as workers write it
    thread.join(30)
    assert results == [False]
    job.given_up.set()  # a report that will not come
    assert not writer._complete(job, {})


def test_what_was_left_is_swept_up(tmp_path: Path) -> None:
    (tmp_path / ".tmp-step-7-0123").mkdir()
    (tmp_path / ".tmp-step-7-0123" / "parameters-w.safetensors").write_bytes(b"half")
    Writer(World.alone(torch.device("cpu")), tmp_path).meet()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kills", [30, pytest.param(300, marks=pytest.mark.slow)])
def test_a_kill_at_any_byte_leaves_a_whole_snapshot(tmp_path: Path, kills: int) -> None:
    ended = subprocess.run([sys.executable, str(KILLED), str(tmp_path / "snapshots"), str(kills)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
