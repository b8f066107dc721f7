"""The run's folder: made late, written atomically, cut back on resume."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from carrywave.errors import ResourceError, RunError, by_command
from carrywave.runs.checkpoint import atomic_files
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
        assert run.metrics_bytes() == 0
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
    run, late = Run.create(tmp_path / "x", "language"), Run.create(tmp_path / "x", "language")
    run.write_json("plan.json", {"of": "first"})
    for act in (lambda: Run.create(tmp_path / "x", "language"), lambda: late.write_json("plan.json", {"of": "second"})):
        with pytest.raises(RunError, match=rf"x is being trained by process {os.getpid()} on .*; use another run="):
            act()
    assert run.read_json("plan.json") == {"of": "first"}
    run.release()
    (tmp_path / "x" / "notes.txt").write_text("my own")
    with pytest.raises(RunError, match=r"x already exists and is not empty; use resume=True .* or use another run="):
        Run.create(tmp_path / "x", "language")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="file is a file"):
        Run.create(tmp_path / "file", "language")
    with by_command(), pytest.raises(RunError, match=r"use another --run$"):
        Run.create(tmp_path / "file", "language")


def test_what_ended_before_its_first_snapshot_gives_way(tmp_path: Path) -> None:
    with Run.create(tmp_path / "x", "language") as run:
        run.write_spec(Spec(task="language"))
        run.write_metrics(ROW)
    (tmp_path / "x" / ".plan.json.tmp").write_text("{")
    (tmp_path / "x" / "logs").mkdir()
    with Run.create(tmp_path / "x", "language") as again:
        again.write_json("plan.json", {})
    assert files(tmp_path / "x") == ["logs", "plan.json"]


def test_a_name_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"a\xff")
    for attempt in (lambda: Run.create(path, "language"), lambda: Run.open(path)):
        with pytest.raises(RunError, match="is not valid UTF-8; use another run="):
            attempt()


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
    run.write_metrics(ROW)
    run.write_timing({"step": 10})
    size = run.metrics_bytes()
    straight, timed = ((run.path / name).read_bytes() for name in ("metrics.jsonl", "timing.jsonl"))
    assert size == len(straight)
    run.write_metrics({**ROW, "step": 20})
    run.write_timing({"step": 20})
    with (run.path / "timing.jsonl").open("a") as file:
        file.write('{"step": 1')  # as a power cut leaves it
    run.cut_back(size, 10)
    assert (run.path / "metrics.jsonl").read_bytes() == straight
    assert (run.path / "timing.jsonl").read_bytes() == timed
    run.write_metrics({**ROW, "step": 20})
    with pytest.raises(RunError, match=r"metrics.jsonl is shorter than when the snapshot was made; restore the file"):
        run.cut_back(9999, 10)
    assert [json.loads(line)["step"] for line in (run.path / "metrics.jsonl").read_text().splitlines()] == [10, 20]
    run.release()


def test_weights_carry_spec_and_codec(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "x", "language")
    run.write_spec(Spec())
    run.write_json("codec.json", {"tokens": ["ä"]})
    run.write_weights({"w": torch.ones(2)}, 1)
    assert atomic_files.read_tensors(run.weights)["w"].tolist() == [1.0, 1.0]
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
    with pytest.raises(RunError, match=r"the folder of run .*run was removed during training; restart"):
        run.write_metrics(ROW)
    with Run.create(tmp_path / "run", "language") as other:
        other.write_spec(Spec())
        before = files(tmp_path / "run")
        with pytest.raises(RunError, match="was taken over by process"):
            run.write_history("end")
        run.__exit__(RunError, RunError("x"), None)
        assert files(tmp_path / "run") == before
