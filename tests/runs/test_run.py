"""The run's folder: made late, written atomically, cut back on resume."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
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
from carrywave.runs.checkpoint import atomic_files
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
    with Run.create(tmp_path / "x", "language") as run:
        run.write_json("facts.json", {"own_model": False})
        run.expect_snapshot(None)
        run.write_spec(Spec(task="language"))
        run.write_metrics({"split": "valid", "epoch": 1, "step": 1, "loss": 2.0})
        (run.snapshots / "step-00000001").mkdir()
    again = Run.open(tmp_path / "x")
    again.start_over()
    again.make()
    again.release()
    assert files(tmp_path / "x") == ["facts.json", "snapshots", "snapshots/.none-yet", "spec.yaml"]
    left = Run.open(tmp_path / "x")
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
    assert files(run.path) == [".owner.lock", "codec.json", "owner.json", "spec.yaml"]
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
    with Run.create(tmp_path / "x", "language") as run:
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
    run = Run.create(tmp_path / "x", "language")
    run.write_spec(Spec())
    run.write_metrics(ROW)
    run.write_timing({"step": 10})
    sizes = run.sizes()
    straight, timed = ((run.path / name).read_bytes() for name in ("metrics.jsonl", "timing.jsonl"))
    assert sizes == (len(straight), len(timed), hashlib.sha256(straight).hexdigest())
    run.write_metrics({**ROW, "step": 20})
    run.write_timing({"step": 20})
    run.close()
    again = Run.open(run.path)
    again.cut_back(*sizes, 10)
    assert (run.path / "metrics.jsonl").read_bytes() == straight
    assert (run.path / "timing.jsonl").read_bytes() == timed
    again.write_metrics({**ROW, "step": 20})
    again.close()
    assert [json.loads(line)["step"] for line in (run.path / "metrics.jsonl").read_text().splitlines()] == [10, 20]


def test_a_log_that_lost_lines_is_refused_and_lost_timings_are_not(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "x", "language")
    run.write_metrics(ROW)
    size, _, digest = run.sizes()
    run.cut_back(size, 1000, digest, 10)
    with pytest.raises(RunError, match=f"metrics.jsonl has {size} bytes, but had {size + 1} when the snapshot was made"):
        run.cut_back(size + 1, 0, digest, 10)
    assert (run.path / "metrics.jsonl").stat().st_size == size


def test_a_log_that_was_changed_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "x", "language")
    run.write_spec(Spec())
    run.write_metrics(ROW)
    sizes = run.sizes()
    run.close()
    log = run.path / "metrics.jsonl"
    kept = log.read_bytes()
    for changed in (b'{"by": "hand"}\n' + kept, kept.replace(b"train", b"tried") + kept):
        log.write_bytes(changed)
        with pytest.raises(RunError, match=rf"metrics.jsonl was changed: its first {len(kept)} bytes .*; restore the file, or start"):
            Run.open(run.path).cut_back(*sizes, 10)
        assert log.read_bytes() == changed


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

    run = Run.create(tmp_path / "x", "language")
    run.write_spec(Spec())
    run.write_metrics(ROW)
    run.close()
    run._logs["metrics.jsonl"] = Short(run.path / "metrics.jsonl")  # type: ignore[assignment]
    run.write_metrics(ROW)
    sizes = run.sizes()
    run.close()
    first, second = (run.path / "metrics.jsonl").read_text().splitlines()
    assert first == second
    Run.open(run.path).cut_back(*sizes, 10)


def test_a_folder_that_is_moved_is_one_error_and_no_traceback_of_another_thread(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = Run.create(tmp_path / "x", "language")
    run.write_metrics(ROW)
    (tmp_path / "x").rename(tmp_path / "y")

    def go_on() -> None:
        for step in range(100):
            run.write_metrics({**ROW, "step": step})
            run.sync()

    with pytest.raises(RunError, match=r"the folder of run .*x was removed during training; restart"):
        go_on()
    with suppress(RunError):
        run.close()
    assert capfd.readouterr().err == ""


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
    run = Run.create(tmp_path / "x", "language")
    monkeypatch.setattr(Path, "open", full)
    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(ResourceError, match=r"could not be written: No space left on device; free disk space"):
        getattr(run, act)(*values[act])
    monkeypatch.undo()
    assert files(tmp_path) == []
    run.make()
    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(ResourceError, match=r"could not be written: No space left on device; free disk space"):
        getattr(run, act)(*values[act])
    monkeypatch.undo()
    assert files(tmp_path / "x") == [".owner.lock", "owner.json"]
    getattr(run, act)(*values[act])
    run.close()


def test_a_folder_that_became_another_runs_gets_nothing_of_this_one(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", "language")
    run.write_spec(Spec())
    run.write_metrics(ROW)
    (tmp_path / "run").rename(tmp_path / "moved")
    other = Run.create(tmp_path / "run", "language")
    other.write_spec(Spec())
    before = files(tmp_path / "run")
    for write in (lambda: run.write_timing(ROW), lambda: run.write_history({"event": "end"})):
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
