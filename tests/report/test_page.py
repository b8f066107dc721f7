"""The page as a whole: self-contained, small, and honest about what is missing. What it looks like, see test_browser.py."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from _folders import HOSTILE, PLAN, metrics, timeline, timing, write

from carrywave.report.page import render
from carrywave.report.pictures import bubble, plan_picture, step_picture
from carrywave.report.record import read_run
from carrywave.report.sample_kinds import Confused, Continued, Forecasted, Paired, Samples

SAMPLES = Samples(
    "Samples of everything.",
    [
        Continued(f"before {HOSTILE}", "written", "truth"),
        Confused(["a", HOSTILE], [[7, 1], [2, 10]]),
        Forecasted("load", [(-1.0, 1.0), (0.0, 2.0)], [(0.0, 2.0), (1.0, 3.0)], [(1.0, 2.5)], [(1.0, 2.0, 3.5)], "quantiles 0.1 to 0.9"),
        Paired("truth and prediction", [(1.0, 1.1), (2.0, 1.9)]),
    ],
)


class Tags(HTMLParser):
    """The tags of a page, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.text += " "

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_page_holds_all_it_needs_and_no_script(tmp_path: Path) -> None:
    page = render([read_run(write(tmp_path / "run", train=HOSTILE.replace('"', "")), HOSTILE)], [SAMPLES])
    found = Tags(page)
    assert {tag for tag, _ in found.tags}.isdisjoint({"script", "iframe", "img", "object", "embed"})
    assert not re.search(r"https?:|url\(|@import|\son\w+=", page)
    assert all(
        not value or value.startswith(("#", "data:,")) for _, attrs in found.tags for name in ("href", "src") if (value := attrs.get(name))
    )
    assert found.text.count(HOSTILE) >= 4  # the name of the run, its file, a label, a text: all of it text
    assert "default-src 'none'" in page


def test_the_figures_are_on_the_page(tmp_path: Path) -> None:
    text = " ".join(Tags(render([read_run(write(tmp_path / "run"))], [SAMPLES])).text.split())
    for figure in (
        "best: 3 at step 60",
        "1,234",
        "25.0%",
        "20 s away, 20 steps computed again",
        "A step took 200 ms on average over the whole run. The 20 steps before the one drawn here took 580 ms on average; early steps",
        "predicted 500 ms (-60%)",
        "85.0% are right",
    ):
        assert figure in text
    assert "F0 F1 F2 F3" in text  # the schedule
    assert "Rank 0 (replica 0, stage 0) computed longest." in text


def test_the_loss_is_not_called_best_where_another_metric_picked_the_weights(tmp_path: Path) -> None:
    rows = [
        {"split": "valid", "epoch": step // 10, "step": step, "loss": loss, "accuracy": right, "macro_f1": right}
        for step, loss, right in ((10, 0.5, 0.6), (20, 0.7, 0.8))
    ]
    record = read_run(write(tmp_path / "run", task="classification", metrics=rows))
    record = replace(record, spec={**record.spec, "train": {"best": "accuracy"}})
    text = " ".join(Tags(render([record], [None])).text.split())
    assert "0.7 at step 20, best by accuracy" in text
    assert "best: 80.00% at step 20" in text
    assert "best: 0.7" not in text
    assert " 80.00% at step 20 " in text  # of macro F1
    assert "0.7 (by accuracy)" in Tags(render([record, record], [None, None])).text


def test_forecasts_stand_above_their_dates(tmp_path: Path) -> None:
    history = [(float(step), 1.0) for step in range(-3, 1)]
    ahead = [(float(step), 2.0) for step in (1, 2)]
    times = [f"2024-01-01 {hour:02d}:00:00" for hour in range(6)]
    sample = Forecasted("y", history, [history[-1], *ahead], ahead, [], times=times)
    record = read_run(write(tmp_path / "run", task="forecasting"))
    text = Tags(render([record], [Samples("", [sample])])).text
    assert "forecast made at 2024-01-01 03:00:00" in text
    assert "2024-01-01 03:00\n" in text  # below the plot, without seconds
    assert "steps ahead" not in text
    assert "steps ahead" in Tags(render([record], [Samples("", [replace(sample, times=())])])).text


def test_a_run_without_anything_is_said_in_words(tmp_path: Path) -> None:
    none = dict.fromkeys(("plan", "facts", "metrics", "timing", "history", "timeline"))
    text = Tags(render([read_run(write(tmp_path / "run", **none))], [None])).text
    for words in (
        "Nothing was logged yet",
        "No losses",
        "The plan is not recorded",
        "No step was timed",
        "Not recorded: the run has no history",
        "Samples were left out",
    ):
        assert words in text


def test_several_runs_are_compared(tmp_path: Path) -> None:
    records = [read_run(write(tmp_path / "a"), "one"), read_run(write(tmp_path / "b", train="other.txt", metrics=metrics(60)), "two")]
    page = render(records, [None, None])
    text = " ".join(Tags(page).text.split())
    assert "Side by side" in text
    assert "data.train words.txt other.txt" in text
    assert page.count('<article id="run-') == 2
    assert "Their specs are the same." in render([records[0], records[0]], [None, None])


def test_a_long_run_stays_under_a_megabyte(tmp_path: Path) -> None:
    many = timeline(24)
    for worker in many["workers"]:
        worker["spans"] = [["F" if at % 2 else "B", at / 1e4, (at + 0.7) / 1e4, at % 64, 0] for at in range(1000)]
    labels = Confused([f"label {at}" for at in range(100)], [[1] * 100] * 100)
    folder = write(tmp_path / "run", metrics=metrics(20_000), timing=timing(20_000), timeline=many)
    assert len(render([read_run(folder)], [Samples("", [labels])]).encode()) < 1_000_000


def test_the_confusion_of_many_labels_keeps_its_sums() -> None:
    counts = [[at + guess for guess in range(100)] for at in range(100)]
    folded = Confused([str(at) for at in range(100)], counts).folded(10)
    assert len(folded.labels) == 10
    assert sum(map(sum, folded.counts)) == sum(map(sum, counts))
    assert folded.labels[-1] == "91 others"


def test_the_accuracy_of_many_labels_is_not_that_of_the_folded_matrix(tmp_path: Path) -> None:
    """Rare labels that are taken for each other share the last cell, and are still wrong."""
    counts = [[int(guess == (at + 1) % 60) for guess in range(60)] for at in range(60)]  # each label is taken for the next
    counts[0][0] = 15  # 15 of 75 are right
    page = render([read_run(write(tmp_path / "run"))], [Samples("", [Confused([str(at) for at in range(60)], counts)])])
    assert "Confusion matrix: 20.0% are right" in page
    assert page.count('class="mixed') == 1


def test_what_is_not_finite_is_said_to_be_left_out(tmp_path: Path) -> None:
    rows = metrics()
    for row in rows[-2:]:
        row |= {"loss": None}
    for row in rows:
        row |= {"perplexity": None} if row["split"] == "valid" else {}
    text = " ".join(Tags(render([read_run(write(tmp_path / "run", metrics=rows))], [None])).text.split())
    assert "2 of 15 values are infinite or not a number, and not drawn." in text
    assert "perplexity 5 of 5 values are infinite or not a number, and not drawn." in text


def test_errors_have_their_unit(tmp_path: Path) -> None:
    rows = [{"split": "valid", "epoch": 1, "step": 10, "loss": 0.3, "mae": 0.4, "mae[load]": 40.0, "naive_mae": 0.5}]
    record = read_run(write(tmp_path / "run", task="forecasting", metrics=rows))
    page = render([record], [None])
    for title in ("loss (standardized)", "MAE (standardized)", "MAE of load (units of the file)"):
        assert f"<figcaption>{title}</figcaption>" in page
    plain = render([replace(record, spec={**record.spec, "data": {"standardize": False}})], [None])
    assert "standardized" not in plain
    assert "units of the file; naive forecast 0.5" in plain
    assert "loss (nats per target)" in render([replace(record, spec={**record.spec, "task": "tagging"})], [None])


def test_before_its_first_task_a_worker_is_not_drawn_as_waiting(tmp_path: Path) -> None:
    late = timeline(1)
    late["workers"][0]["spans"] = [["wait", 0.05, 0.1, 0, 0], ["F", 0.1, 0.3, 0, 0]]
    drawn = step_picture(read_run(write(tmp_path / "run", timeline=late | {"predicted": None})))
    assert "the rest (sums, update), 0 s to 50 ms" in drawn


def test_the_plan_and_the_step_are_drawn(tmp_path: Path) -> None:
    record = read_run(write(tmp_path / "run"))
    drawn = plan_picture(record)
    assert drawn.count('class="box"') == 4
    assert "encoder, layers 1-2" in drawn
    assert "4 chunks of 16" in drawn
    assert plan_picture(replace(record, plan={})) == ""
    assert "396 more replicas" in plan_picture(replace(record, plan=PLAN | {"replicas": 400}))
    steps = step_picture(record)
    assert steps.count('class="F"') == 2 + 4 + 1  # predicted, measured, legend
    assert steps.count('class="track"') == 2 + 4 + 1
    assert bubble(record) == pytest.approx(1 - 0.3 / 0.6)  # all four workers compute 0.3 of 0.6 seconds


def test_no_torch_is_loaded_for_a_page_without_samples() -> None:
    code = "import sys, carrywave.report.page, carrywave.report.live; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
