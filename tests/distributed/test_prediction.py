"""Predictions by the command itself, in real processes: large files in bounded memory, pipes, signals, and any number of workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from carrywave.prediction.blocks import MOST_ROWS
from carrywave.spec.load import parse
from carrywave.train.fit import train

pytestmark = pytest.mark.slow
FEATURES = 8


def rows(number: int, seed: int = 1) -> Iterator[dict[str, Any]]:
    draw = np.random.default_rng(seed)
    for place in range(number):
        steps = draw.normal(size=(int(draw.integers(1, 24)), FEATURES)).round(4)
        yield {"id": f"{place:07}", "steps": steps.tolist(), "label": "up" if steps.sum() > 0 else "down"}


def jsonl(path: Path, number: int, seed: int = 1) -> Path:
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows(number, seed))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prediction")
    spec = {
        "task": "classification",
        "data": {"train": str(jsonl(folder / "train.jsonl", 60))},
        "model": {"hidden": 8, "layers": 2},
        "batch": {"tokens": 2048},
        "train": {"max_steps": 4},
    }
    train(parse(spec), run=folder / "run", device="cpu")
    return folder


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "carrywave", *words, "--device", "cpu"]


def predict(folder: Path, *words: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("predict", *words),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        **({"stdin": subprocess.DEVNULL} if given is None else {"input": given}),  # type: ignore[arg-type]
    )


def same(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    assert [row["id"] for row in found] == [row["id"] for row in wanted]
    for row, expected in zip(found, wanted, strict=True):
        assert row["label"] == expected["label"] or abs(expected["probability"] - 0.5) < 1e-5
        # float32, and sums over lanes of other numbers; printed with 6 decimals.
        assert row["probability"] == pytest.approx(expected["probability"], abs=2e-6)


@pytest.mark.parametrize("number", [MOST_ROWS + 5, 2, 1])
def test_each_row_once_and_in_order_on_any_number_of_workers(folder: Path, tmp_path: Path, number: int) -> None:
    given = jsonl(tmp_path / "in.jsonl", number, seed=2)
    found = {}
    for workers in ("1", "3"):
        out = tmp_path / f"{workers}.jsonl"
        done = predict(folder, "run", str(given), "-o", str(out), "--keep", "id", "--devices", workers)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        found[workers] = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["id"] for row in found["1"]] == [f"{place:07}" for place in range(number)]
    same(found["3"], found["1"])
    piped = predict(folder, "run", "-", "--keep", "id", "--devices", "2", given=given.read_text())
    assert (piped.returncode, piped.stderr) == (0, "")
    same([json.loads(line) for line in piped.stdout.splitlines()], found["1"])


# The peak of this process alone: what getrusage tells begins with the memory of the process that started it.
MEASURED = """
import re, sys
from pathlib import Path
from carrywave.prediction.predict import predict_run

print(predict_run(sys.argv[1], sys.argv[2], Path(sys.argv[3]), keep=["id"], device="cpu"), file=sys.stderr)
print(1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]), file=sys.stderr)
"""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs /proc")
def test_memory_does_not_grow_with_the_file(folder: Path, tmp_path: Path) -> None:
    peaks = []
    for number in (2 * MOST_ROWS, 20 * MOST_ROWS):
        given = jsonl(tmp_path / f"{number}.jsonl", number)
        words = [sys.executable, "-c", MEASURED, str(folder / "run"), str(given), str(tmp_path / "out.jsonl")]
        done = subprocess.run(words, stderr=subprocess.PIPE, text=True, timeout=900, check=True)
        count, peak = (int(line) for line in done.stderr.splitlines())
        assert count == number
        peaks.append(peak)
        size = given.stat().st_size
    print(f"file {size:,} bytes, peaks {peaks[0]:,} and {peaks[1]:,} bytes")
    # The allocator settles after some seven blocks, within 25 MB. As Python's numbers, the file's rows would take several times its size.
    assert size > 60 << 20
    assert peaks[1] - peaks[0] < size // 2


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_reader_that_has_seen_enough_ends_it_without_a_word(folder: Path, tmp_path: Path, workers: str) -> None:
    given = jsonl(tmp_path / "in.jsonl", 4 * MOST_ROWS)
    with subprocess.Popen(
        command("predict", "run", str(given), "--devices", workers), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert json.loads(running.stdout.readline())["label"] in ("up", "down")
        running.stdout.close()
        assert running.stderr.read() == b""
        assert running.wait(timeout=300) == 1


def written(pid: int, folder: Path) -> bool:
    """True once the process, or one that it has started, has written to a file of this folder that has no name yet."""
    family = [pid, *(int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    for member in family:
        for handle in Path(f"/proc/{member}/fd").glob("*"):
            try:
                if os.readlink(handle).startswith(str(folder)) and handle.stat().st_size:
                    return True
            except OSError:
                continue
    return False


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
@pytest.mark.parametrize("workers", ["1", "2"])
def test_nothing_is_left_of_a_command_that_was_stopped(folder: Path, tmp_path: Path, number: int, code: int, workers: str) -> None:
    place = tmp_path / "out"
    place.mkdir()
    (place / "kept.jsonl").write_text("old\n")
    given = jsonl(tmp_path / "in.jsonl", 40 * MOST_ROWS)
    words = command("predict", "run", str(given), "-o", str(place / "kept.jsonl"), "--devices", workers)
    pipes: dict[str, Any] = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    listening = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it, and so do their children
    with subprocess.Popen(words, cwd=folder, preexec_fn=listening, **pipes) as running:
        # A block is predicted, and many are to come.
        while not written(running.pid, place):
            assert running.poll() is None, running.stderr and running.stderr.read()
            time.sleep(0.05)
        running.send_signal(number)
        assert running.wait(timeout=120) == code
        assert running.stderr is not None
        assert b"Traceback" not in running.stderr.read()
    for _ in range(100):  # workers notice within a moment that the process that started them is gone
        if [each.name for each in place.iterdir()] == ["kept.jsonl"]:
            break
        time.sleep(0.1)
    assert [each.name for each in place.iterdir()] == ["kept.jsonl"]
    assert (place / "kept.jsonl").read_text() == "old\n"


def test_a_backtest_on_two_workers_is_that_of_one(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    lines = ["unique_id,ds,y", *(f"{name},{day},{value:.4f}" for name in "abc" for day, value in enumerate(draw.normal(size=40).cumsum()))]
    (tmp_path / "all.csv").write_text("\n".join(lines) + "\n")
    spec = {"task": "forecasting", "data": {"train": "all.csv", "horizon": 3}, "model": {"hidden": 4, "layers": 1}}
    spec |= {"batch": {"lanes": 3, "steps": 7}, "train": {"max_steps": 4, "precision": "fp64"}}
    (tmp_path / "spec.yaml").write_text(json.dumps(spec))
    found = []
    for workers in ("1", "2"):
        words = command(
            "backtest", "spec.yaml", "--retrain", "--origins", "2", "--run", workers, "--devices", workers, "--json", f"{workers}.json"
        )
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        found.append(json.loads((tmp_path / f"{workers}.json").read_text()))
        assert len((tmp_path / workers / "backtest.csv").read_text().splitlines()) == 1 + 3 * 2 * 3
    for one, two in zip(*found, strict=True):
        assert one.keys() == two.keys()
        # Trained in float64; outputs are float32.
        assert all(two[key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value) for key, value in one.items())
