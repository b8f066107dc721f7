"""The bad inputs that every release must refuse, met by two workers: all of them say the same, in one line, and leave nothing behind.

Numbers are those of the table in docs/reliability.md. Damaged snapshots (19 to 25) stand in test_damage.py; what one process says to many
more inputs, in tests/cli.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from _small import TEXT, Job, carry_out, spec

NAN = float("nan")
FILES: dict[str, Any] = {
    "empty.txt": "",
    "few.txt": "the cat",
    "negative.jsonl": [{"tokens": [1, 2]}, {"tokens": [3, -1]}],
    "nan.jsonl": [{"steps": [[0.5, NAN]], "label": "a"}],
    "cut.txt.gz": gzip.compress(TEXT.encode())[:-20],
}
LABELS = {"task": "classification", "batch": {"tokens": 32}}
CASES: dict[str, tuple[Job, str]] = {
    "1 empty": ({"data.train": "empty.txt"}, "empty.txt is empty; use a file that contains text"),
    "2 few tokens": ({"data.train": "few.txt", "data.share": 0}, "batch.lanes=8 is more than the 6 steps in train; use"),
    "4 negative token": ({"data.train": "negative.jsonl"}, r"negative.jsonl:2: tokens is \[3, -1\]; write a list of words"),
    "5 nan": ({**LABELS, "data.train": "nan.jsonl"}, "nan.jsonl:1: step 0, column 1 of steps is nan, not a finite number .*; fill"),
    "7 truncated": ({"data.train": "cut.txt.gz"}, "cut.txt.gz cannot be read .*; check that the file is complete"),
    "11 unknown key": ({"model.hiden": 3}, r"unknown key model.hiden; did you mean model.hidden\?"),
    "12 text": ({"model.hidden": "many"}, 'model.hidden is "many", which is text; use a whole number >= 1'),
    "13 hidden": ({"model.hidden": 0}, "model.hidden is 0; use a whole number >= 1"),
    "14 nan lr": ({"train.lr": NAN}, "train.lr is nan, which is not finite; use a number > 0"),
    "14 negative lr": ({"train.lr": -1}, "train.lr is -1; use a number > 0"),
    "15 stages": ({"plan": {"stages": 5}}, "plan.stages=5, but the model has 4 units .*; use plan.stages <= 4"),
    "16 lanes": (
        {"plan": {"replicas": 2, "micro_batches": 5}},
        "batch.lanes=8 cannot be divided among plan.replicas=2 x plan.micro_batches=5; use batch.lanes >= 10",
    ),
    "17 workers": ({"plan": {"replicas": 3}}, "plan.replicas=3 x plan.stages=1 needs 3 workers, got 2; use devices=3"),
    "27 pickle": ({"init": "weights.pt"}, r"weights.pt is a pickle \(torch.save\), which can run code when it is loaded; convert"),
    "32 specs differ": ({"other": {"train.lr": 0.5}}, "rank 1 has train.lr 0.5, but rank 0 has 0.001; start every worker with the same"),
}


def changed(folder: Path, changes: Job) -> Job:
    """A spec with other values under full names, or other sections."""
    given = spec(folder)
    for name, value in changes.items():
        section, _, key = name.partition(".")
        if key and section == "data" and key != "share":
            value = str(folder / value)
        given[section] = {**given[section], key: value} if key else value
    return given


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Job]]:
    folder = tmp_path_factory.mktemp("bad")
    for name, content in FILES.items():
        data = "".join(json.dumps(row) + "\n" for row in content) if isinstance(content, list) else content
        (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    torch.save({"a": torch.zeros(2)}, folder / "weights.pt")
    jobs: list[Job] = []
    for name, (changes, _) in CASES.items():
        changes = dict(changes)
        own: Job = {"init": str(folder / changes.pop("init"))} if "init" in changes else {}
        if "other" in changes:
            own["other"] = changed(folder, changes.pop("other"))
        jobs.append({"run": str(folder / f"run-{name}"), "spec": changed(folder, changes), **own})
    answers = carry_out(folder, jobs, 2, "bad")
    left = [path.name for path in folder.glob("run-*")]
    assert left == []
    longest = max(job["seconds"] for each in answers for job in each)
    print(f"the longest took {longest:.2f} s")
    return {name: [each[number] for each in answers] for number, name in enumerate(CASES)}


def test_all_workers_refuse_it_alike(told: dict[str, list[Job]]) -> None:
    """One test: the cases share two processes, and tests may be dealt out to several."""
    for name, (_, message) in CASES.items():
        for each in told[name]:
            assert "error" in each, (name, each)
            assert "\n" not in each["error"]
            assert re.search(message, each["error"]), each["error"]
