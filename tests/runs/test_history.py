"""What a run keeps of its own making: starts, ends, and how far a process before it got."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import carrywave as cw
from carrywave.errors import RunError
from carrywave.runs.history import TAIL_BYTES, Trace, last_trace, unended
from carrywave.runs.run import Run


def test_the_last_line_is_found(tmp_path: Path) -> None:
    log = tmp_path / "timing.jsonl"
    assert last_trace(log) is None
    log.write_text("")
    assert last_trace(log) is None
    rows = [json.dumps({"split": "train", "step": step, "time": 100.0 + step}) + "\n" for step in range(5000)]
    log.write_text("".join(rows))
    assert log.stat().st_size > TAIL_BYTES
    assert last_trace(log) == Trace(4999, 5099.0)
    log.write_text(json.dumps({"step": 7}) + "\n")  # of an older version
    assert last_trace(log) == Trace(7, None)
    log.write_text(json.dumps({"step": 7}) + '\n{"split": "tr')
    assert last_trace(log) is None


def test_a_run_and_its_resumption_are_recorded_and_metrics_stay_the_same(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the carry is passed along. " * 100)

    def train(run: str, steps: int, *, resume: bool = False) -> None:
        data = {"train": str(tmp_path / "text.txt"), "tokens": "char"}
        limits = {"max_steps": steps, "epochs": 9, "log_every": 4, "schedule": "constant"}
        batch = {"lanes": 4, "steps": 8}
        cw.fit({"hidden": 8}, None, data=data, batch=batch, train=limits, run=tmp_path / run, resume=resume, device="cpu")

    train("straight", 30)
    train("parts", 12)
    train("parts", 30, resume=True)
    rows = [json.loads(line) for line in (tmp_path / "parts" / "history.jsonl").read_text().splitlines()]
    assert [(row["event"], row["step"]) for row in rows] == [("start", 0), ("end", 12), ("start", 12), ("end", 30)]
    assert rows[0].keys() >= {"time", "attempt", "workers", "device", "carrywave", "torch", "python"}
    assert "reached" not in rows[0]
    assert rows[2]["reached"] == 12
    assert rows[1]["time"] <= rows[2]["time"]
    finished = (tmp_path / "parts" / "history.jsonl").read_bytes()
    train("parts", 30, resume=True)  # nothing is left to train, so nothing is written
    assert (tmp_path / "parts" / "history.jsonl").read_bytes() == finished
    straight, parts = (json.loads((tmp_path / run / "metrics.jsonl").read_text().splitlines()[-1]) for run in ("straight", "parts"))
    # The mean training loss is since the evaluation before, and the run in parts was evaluated where the first part ended.
    assert {**straight, "train_loss": 0} == {**parts, "train_loss": 0}
    assert "time" not in parts
    assert (tmp_path / "straight" / "weights.safetensors").read_bytes() != b""
    timing = [json.loads(line) for line in (tmp_path / "parts" / "timing.jsonl").read_text().splitlines()]
    assert all(row["time"] == pytest.approx(rows[0]["time"], abs=3600) for row in timing)


def test_a_killed_run_that_is_resumed_with_less_to_do_records_its_end(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the carry is passed along. " * 50)

    def train(epochs: int, *, resume: bool = False) -> None:
        data = {"train": str(tmp_path / "text.txt"), "tokens": "char"}
        how = {"batch": {"lanes": 4, "steps": 8}, "train": {"epochs": epochs}, "run": tmp_path / "run", "device": "cpu"}
        cw.fit({"hidden": 8}, None, data=data, resume=resume, **how)

    train(3)
    log = tmp_path / "run" / "history.jsonl"
    start, _ = log.read_text().splitlines(keepends=True)
    log.write_text(start + '{"event": "e')  # as a power cut leaves it
    train(2, resume=True)
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["event"] for row in rows] == ["start", "start", "end"]
    assert rows[1]["last_seen"] <= rows[1]["time"]
    assert rows[2]["ending"] == "done"


@pytest.mark.timeout(60)
def test_what_would_block_a_reader_is_not_read(tmp_path: Path) -> None:
    for name in ("history.jsonl", "timing.jsonl"):
        os.mkfifo(tmp_path / name)
    assert not unended(tmp_path)
    assert last_trace(tmp_path / "timing.jsonl") is None
    (tmp_path / "spec.yaml").touch()
    run = Run.open(tmp_path)
    with pytest.raises(RunError, match=r"history\.jsonl is not a regular file; restore the one that the run wrote"):
        run.write_history({"event": "start"})
