"""The page as a whole: self-contained, small, honest about what is missing, and its figures are those of the run's files."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from _folders import HISTORY, HOSTILE, START, metrics, timing, write

from carrywave.report import figures
from carrywave.report.blocks import Block, Listing, Passage
from carrywave.report.chart import Area, Chart, Curve
from carrywave.report.page import render
from carrywave.report.record import RunRecord, read_run
from carrywave.report.samples import _confusion

SAMPLES: list[Block] = [
    "Samples of everything.",
    Passage(f"before {HOSTILE}", "written", "truth"),
    Listing("confusion", ("", "a", HOSTILE), [["a", "7", "1"], [HOSTILE, "2", "10"]], shades=[[0.9, 0.1], [0.2, 0.8]]),
    Chart("load", [Curve("truth", [(-1.0, 1.0), (0.0, 2.0)]), Curve(HOSTILE, [(1.0, 2.5)])], [Area("band", [(1.0, 2.0, 3.5)])]),
]


@pytest.fixture
def record(tmp_path: Path) -> RunRecord:
    return read_run(write(tmp_path / "run"), "runs/words")


class Tags(HTMLParser):
    """The tags of a page, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.text += " "

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_page_holds_all_it_needs_and_no_script(tmp_path: Path) -> None:
    page = render(read_run(write(tmp_path / "run", train=HOSTILE.replace('"', "")), HOSTILE), SAMPLES)
    found = Tags(page)
    assert {tag for tag, _ in found.tags}.isdisjoint({"script", "iframe", "img", "object", "embed"})
    assert not re.search(r"https?:|url\(|@import|\son\w+=", page)
    assert found.text.count(HOSTILE) >= 5  # the name of the run, its file, a label, a text, a line: all of it text
    assert "default-src 'none'" in page


def test_the_figures_are_on_the_page(record: RunRecord) -> None:
    text = Tags(render(record, SAMPLES)).text
    for figure in (
        "best: 3 at step 60",
        "tokens per second 1,234 200 ms per optimizer step",
        "restarted 40",
        "2 replicas × 2 stages, cut before units 3, chunks of 16 steps",
        "plan",
        "time 20 s",
    ):
        assert figure in text
    tiles = {tile.name: (tile.value, tile.note) for tile in figures.tiles(record)}
    assert tiles["best validation loss"] == ("3", "at step 60, epoch 1")
    assert tiles["validation perplexity"][0] == "20"


def test_the_result_stands_beside_its_baselines(tmp_path: Path) -> None:
    valid = {"split": "valid", "epoch": 1, "step": 10, "loss": 0.3, "mae": 0.4, "mae[load]": 40.0, "naive_mae": 0.5, "ridge_mae": 0.45}
    record = read_run(write(tmp_path / "run", task="forecasting", metrics=[valid, {**valid, "split": "test", "mae": 0.6}]))
    assert figures.results(record, valid) == (
        ["", "this model", "seasonal naive", "ridge"],
        [
            ["loss (standardized)", "0.3", "", ""],
            ["MAE (standardized)", "0.4", "0.5", "0.45"],
            ["MAE of load (units of the file)", "40", "", ""],
        ],
    )
    text = Tags(render(record, [])).text
    assert "Test data, with the best weights" in text
    assert "test MAE 0.6 standardized; seasonal naive 0.5, ridge 0.45" in text
    plain = replace(record, spec={**record.spec, "data": {"standardize": False}})
    assert "standardized" not in render(plain, [])
    labels = replace(record, spec={**record.spec, "task": "tagging"}, metrics=[{**valid, "naive_loss": 1.0}])
    assert "label frequencies" in render(labels, [])


@pytest.mark.parametrize(
    ("train", "said", "unsaid"),
    [
        ({"best": "accuracy"}, ["0.7 at step 20", "best: 80.00% at step 20", "which has the best accuracy"], "best: 0.7"),
        ({"best": "accuracy", "weights": "last"}, ["last validation loss 0.9", "last: 0.9 at step 30"], "best:"),
        ({}, ["best: 0.5 at step 10"], "best: 60.00%"),
    ],
)
def test_only_the_step_whose_weights_were_kept_is_called_the_best(
    train: dict[str, str], said: list[str], unsaid: str, tmp_path: Path
) -> None:
    rows = [
        {"split": "valid", "epoch": step // 10, "step": step, "loss": loss, "accuracy": right}
        for step, loss, right in ((10, 0.5, 0.6), (20, 0.7, 0.8), (30, 0.9, 0.8))
    ]
    record = read_run(write(tmp_path / "run", task="classification", metrics=rows))
    text = Tags(render(replace(record, spec={**record.spec, "train": train}), [])).text
    assert all(each in text for each in said), text
    assert unsaid not in text


def test_a_run_without_anything_is_said_in_words(tmp_path: Path) -> None:
    none = dict.fromkeys(("plan", "facts", "metrics", "timing", "history"))
    text = Tags(render(read_run(write(tmp_path / "run", **none)), ["Samples were left out"])).text
    for words in ("Nothing was evaluated yet", "No losses", "Nothing was timed yet", "nothing was recorded yet", "Samples were left out"):
        assert words in text


def test_what_is_missing_or_damaged_is_left_out(tmp_path: Path) -> None:
    folder = write(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('[1]\n{"split": "valid", "step": 110, "loss": null}\n{"split": "val')  # a kill in the middle of a line
    (folder / "plan.json").write_text("{")
    found = read_run(folder)
    assert len(found.metrics) == len(metrics()) + 1
    assert found.best is not None
    assert found.plan == {}
    assert "1 of 16 values are infinite or not a number, and not drawn." in Tags(render(found, [])).text


def test_a_long_run_stays_under_a_megabyte(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", metrics=metrics(20_000), timing=timing(20_000))
    labels = _confusion([f"label {at}" for at in range(100)], np.ones((100, 100), np.int64))
    assert len(labels.rows) == 17
    page = render(read_run(folder), [labels])
    assert len(page.encode()) < 500_000


def test_the_confusion_of_many_labels_keeps_its_sums_and_its_accuracy() -> None:
    """Rare labels that are taken for each other share the last cell, and are still wrong."""
    counts = np.roll(np.eye(60, dtype=np.int64), 1, axis=1)  # each label is taken for the next
    counts[0, 0] = 15  # 15 of 75 are right
    found = _confusion([str(at) for at in range(60)], counts)
    assert found.title.endswith("20.0% are right")
    assert found.rows[-1][0] == "44 others"
    assert sum(int(cell or 0) for row in found.rows for cell in row[1:]) == counts.sum()


@pytest.mark.parametrize(
    ("ending", "said"), [("interrupted", "interrupted; it can be resumed"), ("done", "complete"), (None, "in training, or killed")]
)
def test_how_a_run_ended(ending: str | None, said: str, record: RunRecord) -> None:
    rows: list[dict[str, Any]] = HISTORY[:1] + ([{"event": "end", "time": START + 40, "ending": ending}] if ending else [])
    assert figures.state(replace(record, history=rows)).startswith(said)


def test_speed_and_restarts_are_those_of_the_whole_run(record: RunRecord) -> None:
    rows = [HISTORY[0], {"event": "back", "time": START + 9, "step": 20}]
    assert [row[1:] for row in figures.restarts(replace(record, history=rows))] == [["went back after a non-finite step", "20"]]
    slow, fast = ({**timing()[0], "seconds": seconds, "tokens_per_second": rate} for seconds, rate in ((6.0, 100.0), (2.0, 500.0)))
    assert figures.speed(replace(record, timing=[slow, fast])) == pytest.approx(200.0)


def test_the_row_before_an_evaluation_is_no_spike() -> None:
    # Epochs of 52 steps, logged every 50: a row over 2 steps, whose loss is far off, then one over 48, and so on.
    sizes, losses = [50, 2, 48, 4, 46], [1.0, 9.0, 1.0, 9.0, 1.0]
    rows = [{"step": sum(sizes[: at + 1]), "steps": size, "targets": 3 * size, "loss": losses[at]} for at, size in enumerate(sizes)]
    points = figures.train_points(rows, "loss", "targets")
    assert [step for step, _ in points] == [50, 100, 150]
    assert points[1][1] == pytest.approx((2 * 9.0 + 48) / 50)
    assert figures.train_points([], "loss", "targets") == []


@pytest.mark.parametrize(
    ("task", "data", "name"),
    [
        ("forecasting", {"distribution": "poisson"}, "loss (nats per value)"),
        ("classification", {"multi_label": True}, "loss (nats, summed over labels)"),
        ("transcription", {}, "loss (nats per label)"),
        ("language", {}, "loss (nats per target)"),
        ("forecasting", {"standardize": False}, "loss (units of the file)"),
    ],
)
def test_the_loss_has_its_unit(task: str, data: dict[str, Any], name: str, record: RunRecord) -> None:
    assert figures.loss_name(replace(record, spec={"task": task, "data": data})) == name


def test_no_torch_is_loaded_for_a_page_without_samples() -> None:
    code = "import sys, carrywave.report.page; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
