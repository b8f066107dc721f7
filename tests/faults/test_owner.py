"""A run's folder in the hands of several processes, and of none: through the command line, with real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

WORDS = ["data.train=text.txt", "model.hidden=4", "model.layers=1", "batch.lanes=4", "batch.steps=8"]
ENDLESS = [*WORDS, "train.epochs=1000000", "train.snapshot_every=20"]
SECONDS = 120.0  # for what takes a few: the machine may be busy


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    (folder / "text.txt").write_text("the cat sat on the mat\n" * 60)
    command = [sys.executable, "-m", "carrywave", "train", *words]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    err = process.communicate(timeout=SECONDS)[1]
    return process.returncode, err


def until_there(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + SECONDS
    while not path.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_one_process_trains_a_run_and_its_death_frees_it(tmp_path: Path) -> None:
    first = start(tmp_path, *ENDLESS, "--run", "run")
    until_there(tmp_path / "run" / "snapshots" / "last", first)
    who = f"run is being trained by process {first.pid} on {os.uname().nodename}; "
    second, third = start(tmp_path, "--resume", "--run", "run"), start(tmp_path, *WORDS, "--run", "run")
    assert ended(second) == (2, f"carrywave: {who}wait until it ends, stop it, or use another --run\n")
    assert ended(third) == (2, f"carrywave: {who}use another --run\n")
    assert first.poll() is None  # nothing happened to it
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert (tmp_path / "run" / "owner.json").exists()
    step = int((tmp_path / "run" / "snapshots" / "last").read_text().strip()[-8:])
    assert ended(start(tmp_path, "--resume", "--run", "run", f"train.max_steps={step + 3}")) == (0, "")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == step + 3
    assert not (tmp_path / "run" / "owner.json").exists()


@pytest.mark.slow
def test_two_starts_at_the_same_instant(tmp_path: Path) -> None:
    both = [start(tmp_path, *ENDLESS, "--run", "run") for _ in range(2)]
    deadline = time.monotonic() + SECONDS
    while all(process.poll() is None for process in both):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    [refused], [other] = ([each for each in both if (each.poll() is None) == runs] for runs in (False, True))
    code, err = ended(refused)
    assert code == 2
    assert err.startswith(f"carrywave: run is being trained by process {other.pid} on {os.uname().nodename}; ")
    assert err.count("\n") == 1
    until_there(tmp_path / "run" / "snapshots" / "last", other)
    other.send_signal(signal.SIGTERM)
    assert ended(other) == (75, "")


@pytest.mark.slow
def test_a_folder_that_is_removed_ends_the_run(tmp_path: Path) -> None:
    process = start(tmp_path, *ENDLESS, "--run", "run")
    until_there(tmp_path / "run" / "snapshots" / "last", process)
    (tmp_path / "run").rename(tmp_path / "moved")  # at once: a removal would race with what is written
    shutil.rmtree(tmp_path / "moved")
    code, err = ended(process)
    assert code == 2
    assert err == "carrywave: the folder of run run was removed during training; restart the run, and leave it in place\n"
    assert not (tmp_path / "run").exists()
