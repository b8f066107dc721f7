"""The figures of a report are those of the run's files."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from _folders import HISTORY, START, metrics, timeline, timing, write

from carrywave.errors import RunError
from carrywave.report import figures
from carrywave.report.page import render
from carrywave.report.record import RunRecord, read_run, stamp


@pytest.fixture
def record(tmp_path: Path) -> RunRecord:
    return read_run(write(tmp_path / "run"), "runs/words")


def test_the_best_step_is_that_of_the_lowest_validation_loss(record: RunRecord) -> None:
    assert record.best is not None
    assert (record.best["step"], record.best["loss"]) == (60, 3.0)
    named = {tile.name: tile for tile in figures.tiles(record)}
    assert named["best validation loss"].value == "3"
    assert named["best validation loss"].note == "at step 60, epoch 1"
    assert named["perplexity"].value == "20"
    assert named["padding"].value == "25.0%"
    assert named["tokens per second"].value == "1,234"
    assert named["tokens per second"].note == "200 ms per optimizer step"


def test_a_restart_costs_the_time_away_and_the_steps_computed_twice(record: RunRecord) -> None:
    [one] = figures.restarts(record)
    assert (one.step, one.reached, one.repeated, one.away_seconds) == (40, 60, 20, 20.0)
    assert one.repeated_seconds == pytest.approx(20 * 0.2)  # 2 seconds for 10 steps
    assert one.what == "restarted by its launcher after it was killed or failed"
    assert one.cost == "20 s away, 20 steps computed again (about 4 s)"
    # From the start to the last sign of life, and from the restart to the end.
    assert figures.running_seconds(record) == 50 + 50


@pytest.mark.parametrize(
    ("ending", "said"), [("interrupted", "resumed by hand after it was interrupted"), ("done", "resumed by hand after it was complete")]
)
def test_a_stop_in_order_is_told_from_a_crash(record: RunRecord, ending: str, said: str) -> None:
    again = {"event": "start", "time": START + 100, "step": 30, "attempt": 0, "reached": 30, "last_seen": START + 30}
    rows = [HISTORY[0], {"event": "end", "time": START + 40, "step": 30, "ending": ending}, again]
    [one] = figures.restarts(replace(record, history=rows))
    assert one.what == said
    assert one.cost == "1 min 10 s away, no logged step lost"
    stopped = [*rows, {"event": "end", "ending": "callback"}]
    assert figures.state(replace(record, history=stopped)) == "stopped by a callback"
    assert figures.state(replace(record, history=rows)) == "killed or failed: it has recorded no end"
    assert figures.state(replace(record, history=rows[:2])).startswith("complete" if ending == "done" else f"{ending}; it can")


def test_going_back_after_a_non_finite_step_is_a_restart_too(record: RunRecord) -> None:
    rows = [HISTORY[0], {"event": "back", "time": START + 9, "step": 20, "reached": 25}]
    [one] = figures.restarts(replace(record, history=rows))
    assert (one.step, one.repeated, one.away_seconds) == (20, 5, None)
    assert one.what.startswith("went back")


def test_the_time_of_each_worker_adds_up(record: RunRecord) -> None:
    times = figures.workers(record)
    assert [worker.rank for worker in times] == [0, 1, 2, 3]
    assert sum(times[0].share(part) for part in figures.PARTS) == pytest.approx(1.0)
    assert times[3].where == "replica 1, stage 1"
    damaged = timeline()
    damaged["workers"][1]["wait"] = "long"
    assert [worker.rank for worker in figures.workers(replace(record, timeline=damaged))] == [0, 2, 3]


def test_a_folder_that_is_no_run_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="gone is not a run: folder not found; pass"):
        read_run(tmp_path / "gone", "gone")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match=r"is not a run: it has no spec\.yaml; pass"):
        read_run(tmp_path / "empty")


def test_what_is_missing_or_damaged_is_left_out(tmp_path: Path) -> None:
    none = dict.fromkeys(("plan", "facts", "metrics", "timing", "history", "timeline"))
    bare = read_run(write(tmp_path / "bare", **none))
    assert (bare.best, figures.tiles(bare), figures.restarts(bare), figures.workers(bare)) == (None, [], [], [])
    assert figures.speed(bare) is figures.waste(bare) is figures.running_seconds(bare) is None
    assert ("devices", "not recorded: the run has no history.jsonl") in list(figures.about(bare))
    folder = write(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('[1]\n{"split": "valid", "step": 110, "loss": null}\n{"split": "val')  # a kill in the middle of a line
    (folder / "plan.json").write_text("{")
    found = read_run(folder)
    assert len(found.metrics) == len(metrics()) + 1
    assert found.best is not None
    assert found.plan == {}


def test_the_stamp_changes_with_the_files(tmp_path: Path) -> None:
    folder = write(tmp_path / "run")
    before = stamp(folder)
    assert stamp(folder) == before
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("{}\n")
    assert stamp(folder) != before


def test_speed_is_over_the_whole_run_not_the_mean_of_its_rows(record: RunRecord) -> None:
    slow = {**timing()[0], "seconds": 6.0, "tokens_per_second": 100.0}
    fast = {**timing()[1], "seconds": 2.0, "tokens_per_second": 500.0}
    assert figures.speed(replace(record, timing=[slow, fast])) == pytest.approx(200.0)


def test_the_best_step_is_that_of_the_metric_that_picks_the_weights(record: RunRecord) -> None:
    rows = [
        {"split": "valid", "epoch": at, "step": 10 * at, "loss": 1.0 + at, "accuracy": right} for at, right in enumerate((0.5, 0.9, 0.9))
    ]
    chosen = replace(record, spec={**record.spec, "train": {"best": "accuracy"}}, metrics=rows)
    assert chosen.best is not None
    assert chosen.best["step"] == 10  # the first of equal ones, although its loss is not the lowest
    assert figures.tiles(chosen)[0].note == "at step 10, epoch 1, which has the best accuracy"


def test_where_the_last_weights_are_kept_none_are_called_the_best(record: RunRecord) -> None:
    rows = [{"split": "valid", "epoch": at, "step": 10 * at, "loss": 1.0 + at, "accuracy": 0.5} for at in range(3)]
    kept = replace(record, spec={**record.spec, "train": {"best": "accuracy", "weights": "last"}}, metrics=rows)
    loss, accuracy = figures.tiles(kept)[:2]
    assert (loss.name, loss.value, loss.note) == ("last validation loss", "3", "at step 20, epoch 2")
    assert accuracy.note == "validation, at the last step"
    page = render([kept], [None])
    assert "last: 3 at step 20" in page
    assert "best:" not in page
    assert "3 (last)" in render([kept, record], [None, None])


def test_the_loss_of_a_distribution_is_in_nats(record: RunRecord) -> None:
    spec = {**record.spec, "task": "forecasting", "data": {"distribution": "poisson"}}
    counted = replace(record, spec=spec)
    assert figures.loss_name(counted) == "loss (nats per value)"
    assert figures.unit(counted, "crps") == " (standardized)"
    assert figures.metric_text("within_80", 0.8125) == "81.25%"


def test_metrics_of_a_column_are_named_and_the_train_loss_is_no_metric(record: RunRecord) -> None:
    row = {"split": "valid", "epoch": 1, "step": 5, "loss": 1.0, "train_loss": 2.0, "mae": 0.5, "naive_mae": 0.6, "mae[sales]": 12.0}
    shown = replace(record, metrics=[row], spec={**record.spec, "task": "forecasting"})
    assert shown.metric_names == ["mae", "mae[sales]"]
    notes = {tile.name: (tile.value, tile.note) for tile in figures.tiles(shown)}
    assert notes["MAE"] == ("0.5", "standardized; naive forecast 0.6")
    assert notes["MAE of sales"] == ("12", "in the units of the file")
