"""The run's folder: made late, written atomically, cut back on resume."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from carrywave.errors import ResourceError, RunError, by_command
from carrywave.runs.checkpoint import atomic_files, own_weights
from carrywave.runs.checkpoint.snapshot import load_weights
from carrywave.runs.run import Run
from carrywave.spec.load import dump
from carrywave.spec.spec import Spec

ROW: dict[str, Any] = {"split": "train", "epoch": 1, "step": 10, "loss": 0.1 + 0.2}


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_nothing_is_made_before_the_first_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Run.create(None, "language") as run:
        assert run.path == Path("runs/language-1")
        assert run.sizes()[:2] == (0, 0)
    with Run.create(tmp_path / "mine", "language"):
        pass
    assert files(tmp_path) == []


def test_an_empty_folder_that_cannot_be_written_is_refused_for_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that became read-only is a fault of the machine, which may pass; missing permissions are not."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(RunError, match="Permission denied; use another run"):
        Run.create(tmp_path, "language")
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))
    with pytest.raises(ResourceError, match="Read-only file system; make the file system writable"):
        Run.create(tmp_path, "language")


@pytest.mark.parametrize("address", ["s3://bucket/run", "gs://bucket", "file:///run"])
def test_an_address_that_became_a_path_is_no_new_folder(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match="is an address in a store, but only a path on this machine can be used here"):
        Run.create(Path(address), "language")
    assert files(tmp_path) == []
    with Run.create(Path("s3"), "language"), Run.create(Path("s3:"), "language"), Run.create(tmp_path / "s3:" / "run", "language"):
        pass


def test_names_count_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Run.create(None, "language").write_json("plan.json", {})
    Run.create(None, "language").write_json("plan.json", {})
    Run.create(None, "tagging").write_json("plan.json", {})
    assert sorted(os.listdir("runs")) == ["language-1", "language-2", "tagging-1"]
    assert Run.create(None, "language").path == Path("runs/language-3")


def test_an_occupied_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    run = Run.create(tmp_path / "empty", "language")
    run.write_json("plan.json", {})
    with pytest.raises(RunError, match=rf"empty is being trained by process {os.getpid()} on .*; use another run="):
        Run.create(tmp_path / "empty", "language")
    run.release()
    with pytest.raises(RunError, match=r"empty already exists and is not empty; use resume=True .* or use another run="):
        Run.create(tmp_path / "empty", "language")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="file is a file"):
        Run.create(tmp_path / "file", "language")


def _kill_at_start(path: Path, *names: str) -> None:
    """What a process leaves that was killed after it wrote these files."""
    program = f"""
import os, signal
from pathlib import Path
from carrywave.runs.run import Run
run = Run.create(Path({str(path)!r}), "language")
for name in {names!r}:
    run.expect_snapshot(None) if name == "snapshots" else run.write_json(name, {{}})
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL


def test_a_process_that_was_killed_before_its_run_began_leaves_the_folder_free(tmp_path: Path) -> None:
    path = tmp_path / "x"
    _kill_at_start(path, "plan.json", "codec.json", "facts.json", "snapshots")
    (path / "snapshots" / "..none-yet.tmp").write_bytes(b"{")
    (path / ".spec.yaml.tmp").write_bytes(b"task:")
    run = Run.create(path, "language")
    run.write_json("plan.json", {"of": "another"})
    assert not (path / "codec.json").exists()
    assert not (path / "snapshots").exists()
    run.release()


@pytest.mark.parametrize(
    "own",
    [
        "notes.txt",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("metrics.jsonl", "weights.safetensors", "snapshots/step-00000008")),
    ],
)
def test_a_folder_with_anything_else_in_it_is_not_free(tmp_path: Path, own: str) -> None:
    _kill_at_start(tmp_path / "x", "plan.json", "snapshots")
    (tmp_path / "x" / own).write_text("mine")
    with pytest.raises(RunError, match="x already exists and is not empty"):
        Run.create(tmp_path / "x", "language")
    assert (tmp_path / "x" / own).read_text() == "mine"


def test_a_run_that_is_killed_while_it_is_started_over_can_be_started_over_again(tmp_path: Path) -> None:
    with Run.create(tmp_path / "x", "language", events=False) as run:
        run.write_json("facts.json", {"own_model": False})
        run.expect_snapshot(None)
        run.write_spec(Spec(task="language"))
        run.write_metrics({"split": "valid", "epoch": 1, "step": 1, "loss": 2.0})
        (run.snapshots / "step-00000001").mkdir()
    again = Run.open(tmp_path / "x", events=False)
    again.start_over()
    again.make()
    again.release()
    assert files(tmp_path / "x") == ["facts.json", "snapshots", "snapshots/.none-yet", "spec.yaml"]
    left = Run.open(tmp_path / "x", events=False)
    assert left.began_with == {"init": None}
    assert left.read_object("facts.json") == {"own_model": False}


def test_a_name_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"a\xff")
    for attempt in (lambda: Run.create(path, "language"), lambda: Run.open(path)):
        with pytest.raises(RunError, match="is not valid UTF-8; use another run="):
            attempt()


def test_a_folder_that_was_taken_since_is_refused(tmp_path: Path) -> None:
    first, second = Run.create(tmp_path / "x", "language"), Run.create(tmp_path / "x", "language")
    first.write_json("plan.json", {"of": "first"})
    with pytest.raises(RunError, match="x is being trained by process"):
        second.write_json("plan.json", {"of": "second"})
    assert first.read_json("plan.json") == {"of": "first"}


def test_spec_plan_and_codec(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "x", "language")
    run.write_spec(Spec())
    run.write_json("codec.json", {"tokens": ["ä", "\n"]})
    assert (run.path / "spec.yaml").read_text("utf-8") == dump(Spec())
    assert Run.open(run.path).read_json("codec.json") == {"tokens": ["ä", "\n"]}
    assert files(run.path) == ["codec.json", "owner.json", "spec.yaml"]
    run.release()
    assert files(run.path) == ["codec.json", "spec.yaml"]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not a run: folder not found"):
        Run.open(tmp_path / "nowhere")
    with pytest.raises(RunError, match=r"it has no spec\.yaml"):
        Run.open(tmp_path)
    (tmp_path / "spec.yaml").write_text("")
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(RunError, match=r"plan\.json is damaged"):
        Run.open(tmp_path).read_json("plan.json")
    with pytest.raises(RunError, match=r"codec\.json cannot be read"):
        Run.open(tmp_path).read_json("codec.json")


def test_rows_in_a_fixed_order_with_exact_numbers(tmp_path: Path) -> None:
    with Run.create(tmp_path / "x", "language", events=False) as run:
        run.write_metrics({"perplexity": math.inf, "lr": 1e-3, **ROW})
        run.write_metrics(dict(reversed({"lr": 1e-3, "perplexity": math.nan, **ROW}.items())))
        run.write_timing({"step": 10, "seconds": 0.5})
        # Read while it is open: every line is on its way to the disk at once.
        text = (run.path / "metrics.jsonl").read_text()
    line = '{"split": "train", "epoch": 1, "step": 10, "loss": 0.30000000000000004, "lr": 0.001, "perplexity": null}\n'
    assert text == line * 2
    timed = json.loads((run.path / "timing.jsonl").read_text())
    assert timed.pop("time") > 0
    assert timed == {"step": 10, "seconds": 0.5}
    assert files(run.path) == ["metrics.jsonl", "timing.jsonl"]


def test_cut_back_to_a_snapshot(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "x", "language", events=False)
    run.write_spec(Spec())
    run.write_metrics(ROW)
    run.write_timing({"step": 10})
    sizes = run.sizes()
    straight, timed = ((run.path / name).read_bytes() for name in ("metrics.jsonl", "timing.jsonl"))
    assert sizes == (len(straight), len(timed), hashlib.sha256(straight).hexdigest())
    run.write_metrics({**ROW, "step": 20})
    run.write_timing({"step": 20})
    run.close()
    again = Run.open(run.path, events=False)
    again.cut_back(*sizes)
    assert (run.path / "metrics.jsonl").read_bytes() == straight
    assert (run.path / "timing.jsonl").read_bytes() == timed
    again.write_metrics({**ROW, "step": 20})
    again.close()
    assert [json.loads(line)["step"] for line in (run.path / "metrics.jsonl").read_text().splitlines()] == [10, 20]


def test_a_log_that_lost_lines_is_refused_and_lost_timings_are_not(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "x", "language", events=False)
    run.write_metrics(ROW)
    size, _, _ = run.sizes()
    run.cut_back(size, 1000)
    with pytest.raises(RunError, match=f"metrics.jsonl has {size} bytes, but had {size + 1} when the snapshot was made"):
        run.cut_back(size + 1, 0)
    assert (run.path / "metrics.jsonl").stat().st_size == size


def test_a_log_that_was_changed_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "x", "language", events=False)
    run.write_spec(Spec())
    run.write_metrics(ROW)
    sizes = run.sizes()
    run.close()
    log = run.path / "metrics.jsonl"
    kept = log.read_bytes()
    for changed in (b'{"by": "hand"}\n' + kept, kept.replace(b"train", b"tried") + kept):
        log.write_bytes(changed)
        with pytest.raises(RunError, match=rf"metrics.jsonl was changed: its first {len(kept)} bytes .*; restore the file, or start"):
            Run.open(run.path, events=False).cut_back(*sizes)
        assert log.read_bytes() == changed
    Run.open(run.path, events=False).cut_back(*sizes[:2])  # of a snapshot from before there was a checksum


def test_a_row_is_written_whole_by_a_system_that_takes_it_in_pieces(tmp_path: Path) -> None:
    class Short:
        def __init__(self, path: Path) -> None:
            self.file = path.open("ab", buffering=0)

        def write(self, data: bytes) -> int:
            return self.file.write(data[:7])

        def fileno(self) -> int:
            return self.file.fileno()

        def close(self) -> None:
            self.file.close()

    run = Run.create(tmp_path / "x", "language", events=False)
    run.write_spec(Spec())
    run.write_metrics(ROW)
    run.close()
    run.backlog._logs["metrics.jsonl"] = Short(run.path / "metrics.jsonl")  # type: ignore[assignment]
    run.write_metrics(ROW)
    sizes = run.sizes()
    run.close()
    first, second = (run.path / "metrics.jsonl").read_text().splitlines()
    assert first == second
    Run.open(run.path, events=False).cut_back(*sizes)


def test_a_folder_that_is_moved_is_one_error_and_no_traceback_of_another_thread(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = Run.create(tmp_path / "x", "language")
    run.write_metrics(ROW)
    (tmp_path / "x").rename(tmp_path / "y")

    def go_on() -> None:
        for step in range(100):
            run.write_metrics({**ROW, "step": step})
            run.sizes()

    with pytest.raises(RunError, match=r"the folder of run .*x was removed during training; restart"):
        go_on()
    with suppress(RunError):
        run.close()
    assert capfd.readouterr().err == ""


def test_events_are_written_and_purged(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader  # type: ignore[import-untyped]

    run = Run.create(tmp_path / "x", "language")
    run.write_metrics({**ROW, "lr": 0.5})
    run.cut_back(*run.sizes(), step=10)
    run.write_metrics({**ROW, "step": 11})
    run.close()
    first, second = sorted((run.path / "tb").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    events = [event for path in (first, second) for event in EventFileLoader(str(path)).Load()]
    tags = [(value.tag, event.step) for event in events for value in event.summary.value]
    assert tags == [("train/loss", 10), ("train/lr", 10), ("train/loss", 11)]
    assert [event.step for event in events if event.HasField("session_log")] == [11]


def test_weights_carry_spec_and_codec(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "x", "language")
    run.write_spec(Spec())
    run.write_json("codec.json", {"tokens": ["ä"]})
    run.write_weights({"w": torch.ones(2)}, 1)
    assert load_weights(run.weights, {"w": ((2,), torch.float32)})["w"].tolist() == [1.0, 1.0]
    told = atomic_files.read_metadata(run.weights)
    assert told["spec"] == dump(Spec())
    assert json.loads(told["codec"]) == {"tokens": ["ä"]}


@pytest.mark.parametrize("act", ["write_spec", "write_metrics", "write_timing", "write_weights"])
def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    values: dict[str, Any] = {
        "write_spec": (Spec(),),
        "write_metrics": (ROW,),
        "write_timing": (ROW,),
        "write_weights": ({"w": torch.ones(1)}, 1),
    }
    run = Run.create(tmp_path / "x", "language", events=False)
    monkeypatch.setattr(Path, "open", full)
    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(ResourceError, match=r"could not be written: No space left on device; free disk space"):
        getattr(run, act)(*values[act])
    monkeypatch.undo()
    assert files(tmp_path) == []
    run.make()
    said: list[str] = []
    run.backlog.say = said.append
    monkeypatch.setattr(Path, "open", full)
    monkeypatch.setattr(Path, "mkdir", full)
    if act == "write_spec":
        with pytest.raises(ResourceError, match="No space left on device"):
            run.write_spec(Spec())
        assert files(tmp_path / "x") == ["owner.json"]
        return
    for _ in range(2):
        getattr(run, act)(*values[act])
    assert files(tmp_path / "x") == ["owner.json"]
    [line] = said
    assert re.search("could not be written: No space left on device; the run continues, and keeps it in memory; free disk space$", line)
    monkeypatch.undo()
    getattr(run, act)(*values[act])
    assert said[1:] == [f"{tmp_path / 'x'}: all that was kept in memory is written"]
    [made] = [name for name in files(tmp_path / "x") if name != "owner.json"]
    rows = 3 if act != "write_weights" else None
    assert rows is None or len((tmp_path / "x" / made).read_text().splitlines()) == rows
    run.close()


class Full:
    """A log on a disk that takes so many more bytes."""

    def __init__(self, path: Path, room: int) -> None:
        self.file, self.room = path.open("ab", buffering=0), room

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = self.file.write(data[: self.room])
        self.room -= taken
        return taken

    def fileno(self) -> int:
        return self.file.fileno()

    def close(self) -> None:
        self.file.close()


def test_rows_that_found_no_room_are_written_later_in_order(tmp_path: Path) -> None:
    calm, run = (Run.create(tmp_path / name, "language", events=False) for name in ("calm", "run"))
    for each in (calm, run):
        each.write_spec(Spec())
        each.write_metrics(ROW)
    run.close()
    run.backlog._logs["metrics.jsonl"] = full = Full(run.path / "metrics.jsonl", 20)  # type: ignore[assignment]
    for step in range(3):
        run.write_metrics(ROW | {"step": step})
        calm.write_metrics(ROW | {"step": step})
    first = (run.path / "metrics.jsonl").read_text()
    assert (first.count("\n"), first[-1]) == (1, "\n")  # no row is torn
    assert run.sizes()[0::2] == calm.sizes()[0::2]  # what a snapshot notes counts them
    with pytest.raises(ResourceError, match=r"metrics\.jsonl could not be written: No space left on device; free disk space"):
        run.sync()  # and none is published without them
    full.room = 1 << 20
    run.sync()
    assert (run.path / "metrics.jsonl").read_bytes() == (calm.path / "metrics.jsonl").read_bytes()
    run.cut_back(*run.sizes())
    calm.close()


def test_weights_that_found_no_room_are_those_of_their_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = Run.create(tmp_path / "run", "language", events=False)
    run.write_spec(Spec())
    weight = torch.ones(2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        run.write_weights({"w": weight}, 1)
        with pytest.raises(ResourceError, match=r"weights\.safetensors could not be written"):
            run.sync()
    weight.add_(1)  # training goes on
    run.sync()
    assert load_weights(run.weights, {"w": ((2,), torch.float32)})["w"].tolist() == [1.0, 1.0]


def test_weights_are_known_by_a_first_row_that_still_waits_for_room(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", "language", events=False)
    run.write_spec(Spec())
    run.backlog._logs["metrics.jsonl"] = full = Full(run.path / "metrics.jsonl", 0)  # type: ignore[assignment]
    run.write_metrics(ROW)
    run.write_metrics(ROW | {"step": 2})
    run.write_weights({"w": torch.zeros(2)}, 2)
    own_weights.check(run.weights)  # nothing can be said: there are no metrics yet
    full.room = 1 << 20
    run.sync()
    run.close()
    own_weights.check(run.weights)
    (run.path / "metrics.jsonl").write_bytes((run.path / "metrics.jsonl").read_bytes().replace(b"\n", b"\r\n"))
    own_weights.check(run.weights)  # an editor's line ends
    (run.path / "metrics.jsonl").write_text('{"split": "train"}\n')
    with pytest.raises(RunError, match="is from another run, or the first row"):
        own_weights.check(run.weights)


def test_when_no_more_can_be_kept_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carrywave.runs.backlog.MOST_BYTES", 1 << 20)
    run = Run.create(tmp_path / "run", "language", events=False)
    run.write_spec(Spec())
    run.backlog._logs["timing.jsonl"] = Full(run.path / "timing.jsonl", 0)  # type: ignore[assignment]
    fact = "timing.jsonl could not be written: No space left on device; 1 MiB of rows wait in memory, and no more are kept"
    for _ in range(15):
        run.write_timing({"step": 1, "word": "x" * (1 << 16)})
    with pytest.raises(ResourceError, match=f"{fact}; free disk space, then resume"):
        run.write_timing({"step": 1, "word": "x" * (1 << 16)})
    run.close()


def test_a_folder_that_became_another_runs_gets_nothing_of_this_one(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", "language", events=False)
    run.write_spec(Spec())
    run.write_metrics(ROW)
    (tmp_path / "run").rename(tmp_path / "moved")
    other = Run.create(tmp_path / "run", "language", events=False)
    other.write_spec(Spec())
    before = files(tmp_path / "run")
    for write in (lambda: run.write_timing(ROW), lambda: run.write_timeline({"step": 1}), lambda: run.write_history({"event": "end"})):
        with pytest.raises(RunError, match="was taken over by process"):
            write()
    assert run.__exit__(RunError, RunError("x"), None) is None
    assert files(tmp_path / "run") == before
    other.close()
    other.release()


def test_remedies_are_said_in_the_words_of_whoever_asked(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(RunError, match=r"use another run=\.\.\.$"):
        Run.create(tmp_path / "taken", "language")
    with by_command(), pytest.raises(RunError, match=r"use another --run$"):
        Run.create(tmp_path / "taken", "language")
