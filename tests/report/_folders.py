"""Folders of runs, written by hand as training writes them: quick, and with whatever content a test needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HOSTILE = "<script>document.title='gone'</script>"
SPEC = """\
task: {task}
data: {{train: "{train}", valid: null, test: null}}
model: {{hidden: 64, layers: 4, dropout: 0.5}}
batch: {{lanes: 8, steps: 64, tokens: null}}
train: {{optimizer: adam, lr: 0.002, precision: fp32, seed: 1, sync: step}}
plan: auto
"""
PLAN: dict[str, Any] = {
    "replicas": 2,
    "stages": 2,
    "cuts": [3],
    "chunk_steps": 16,
    "micro_batches": 1,
    "recompute": False,
    "share_head": False,
    "backends": ["manual"] * 4,
    "transport": "messages and sums over gloo",
    "workers": [{"rank": rank, "host": "node", "local_rank": rank, "replica": rank // 2, "stage": rank % 2} for rank in range(4)],
}
START = 1_700_000_000.0
HISTORY: list[dict[str, Any]] = [
    {"event": "start", "time": START, "step": 0, "attempt": 0, "workers": 4, "device": "cpu", "carrywave": "0.1.0", "torch": "2.13.0"},
    {"event": "start", "time": START + 70, "step": 40, "attempt": 1, "workers": 4, "device": "cpu", "reached": 60, "last_seen": START + 50},
    {"event": "end", "time": START + 120, "step": 100, "ending": "done"},
]


def metrics(steps: int = 100, every: int = 10) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for step in range(every, steps + 1, every):
        base = {"epoch": 1, "step": step}
        rows.append(
            {"split": "train", **base, "loss": 4 - step / 50, "lr": 0.002, "norm": 0.5, "waste": 0.25, "steps": every, "targets": 9}
        )
        if step % (2 * every) == 0:
            # Best at step 60.
            rows.append({"split": "valid", **base, "loss": 3 + abs(step - 60) / 100, "perplexity": 20 + abs(step - 60)})
    return rows


def timing(steps: int = 100, every: int = 10) -> list[dict[str, Any]]:
    row = {"split": "train", "epoch": 1, "seconds": 2.0, "tokens_per_second": 1234.0}
    return [{**row, "step": step, "time": START + step} for step in range(every, steps + 1, every)]


def write(folder: Path, *, task: str = "language", train: str = "words.txt", **files: Any) -> Path:
    """A run's folder; `files` replaces what is in it by name (plan, facts, metrics, timing, history), None leaves one out."""
    folder.mkdir(parents=True)
    (folder / "spec.yaml").write_text(SPEC.format(task=task, train=train))
    content: dict[str, Any] = {
        "plan": PLAN,
        "facts": {"vocabulary": 103, "features": 0, "labels": [], "sequences": 1, "steps": 418_613, "own_model": False},
        "metrics": metrics(),
        "timing": timing(),
        "history": HISTORY,
    }
    for name, value in (content | files).items():
        if value is None:
            continue
        if name in ("metrics", "timing", "history"):
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in value))
        else:
            (folder / f"{name}.json").write_text(json.dumps(value))
    return folder
