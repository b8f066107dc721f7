"""`carrywave report` from the outside: the file it writes, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "report"))
from _folders import write
from typer.testing import CliRunner

from carrywave.cli.main import app

runner = CliRunner()


def said(*words: str, code: int = 0) -> str:
    found = runner.invoke(app, ["report", *words])
    assert found.exit_code == code, found.output
    return found.stderr


def test_the_page_is_written_into_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = write(tmp_path / "runs" / "one")
    monkeypatch.chdir(tmp_path)
    assert said(str(one), "--no-samples") == f"carrywave: wrote {one / 'report.html'}\n"
    assert "best: 3 at step 60" in (one / "report.html").read_text()
    said(str(one), "-o", "elsewhere.html", "--no-samples")
    assert "Samples were left out" in (tmp_path / "elsewhere.html").read_text()


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    run = str(write(tmp_path / "run"))
    for words, message in (
        ([str(tmp_path / "gone")], "gone is not a run: folder not found; pass a run folder"),
        ([str(tmp_path)], "is not a run: it has no spec.yaml; pass a run folder"),
        ([run, "-o", str(tmp_path)], "is a folder; pass a file name"),
    ):
        text = said(*words, code=2)
        assert message in text
        assert text.count("\n") == 1
    assert not (tmp_path / "run" / "report.html").exists()


@pytest.mark.slow
def test_a_run_without_weights_is_reported_with_the_reason(tmp_path: Path) -> None:
    run = write(tmp_path / "run")
    said(str(run), "--device", "cpu")
    assert "No samples: " in (run / "report.html").read_text()


@pytest.mark.slow
def test_a_killed_run_tells_what_the_restart_cost(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = ["train.max_steps=120", "train.epochs=9", "train.log_every=5", "train.snapshot_every=20", "model.hidden=16"]
    settings += ["model.layers=2", "plan.stages=2", "plan.chunk_steps=16"]
    command = [sys.executable, "-m", "carrywave", "train", *settings, "--run", str(run), "--devices", "2", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        ends = time.monotonic() + 300
        while _step(run) < 50 and time.monotonic() < ends and process.poll() is None:
            time.sleep(0.05)
        os.kill(json.loads((run / "owner.json").read_bytes())["pid"], signal.SIGKILL)
        assert process.wait(300) == 0, process.stderr.read() if process.stderr else ""
    starts = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    assert [row["event"] for row in starts] == ["start", "start", "end"]
    again = starts[1]
    assert again["attempt"] == 1
    assert again["step"] % 20 == 0
    assert again["reached"] >= 50
    assert again["last_seen"] < again["time"]
    said(str(run), "--no-samples")
    page = (run / "report.html").read_text()
    assert ">restarted</td>" in page
    assert f">{again['reached'] - again['step']}</td>" in page


def _step(run: Path) -> int:
    try:
        return int(json.loads((run / "timing.jsonl").read_text().splitlines()[-1])["step"])
    except (OSError, ValueError, IndexError):
        return 0
