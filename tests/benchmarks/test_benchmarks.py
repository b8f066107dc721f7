"""Every benchmark runs in its quick form and writes its rows; and the parts of the harness that judge."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import gpu_pipeline, pipeline, quality, step
from benchmarks.gpu_pipeline import QUICK, Split
from benchmarks.harness import command
from carrywave.errors import RunError

SLOW = [pytest.mark.slow, pytest.mark.timeout(1200)]
GPU = [pytest.mark.gpu, pytest.mark.timeout(600)]
BENCHMARKS = [
    ("calls", ["ours_ms", "torch_ms", "ratio"], ["--kinds", "lstm"], []),
    ("data", ["cpu_seconds", "ratio"], [], []),
    ("train", ["tokens_per_second", "ratio", "target"], [], SLOW),
    ("pipeline", ["step_ms", "over_ddp", "bubble"], ["--workers", "2"], SLOW),
    ("plan", ["plan", "measured_ms", "of_best"], ["--device", "cpu"], SLOW),
    ("quality", ["figure", "figures", "note"], ["--sets", "waves"], SLOW),
    ("faults", ["noticed_s", "again_s", "equal", "once"], [], SLOW),
    ("kernels", ["cudnn_graph_ms", "ours_graph_ms", "ours_error"], [], GPU),
    ("step", ["step_ms", "over_graph", "note"], [], GPU),
    ("crf", ["ours_graph_ms", "ratio", "error"], [], GPU),
    ("gpu_pipeline", ["ms", "ratio", "bubble", "note"], [], GPU),
]


@pytest.mark.parametrize(("name", "columns", "words"), [pytest.param(*row, marks=marks, id=row[0]) for *row, marks in BENCHMARKS])
def test_its_quick_form_writes_rows(name: str, columns: list[str], words: list[str], tmp_path: Path) -> None:
    command.main(f"benchmarks.{name}", ["--quick", "--json", str(tmp_path / "rows.json"), *words])
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert rows
    assert set(columns) <= set(rows[0])


def test_the_table_has_every_benchmark() -> None:
    folder = Path(command.__file__).parents[1]
    assert {name for name, *_ in BENCHMARKS} == {path.stem for path in folder.glob("[a-z]*.py")}


def test_options_are_the_parameters_of_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main("benchmarks.pipeline", ["--workers", "two"])
    assert ended.value.code == 2
    assert "argument --workers: invalid" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="nothing is picked; use m4, texts"):
        command.main("benchmarks.quality", ["--sets", "mnist"])


def test_empty_columns_are_not_shown() -> None:
    assert command.table([{"a": 1, "b": None}, {"a": 2.5, "b": ""}]) == "a\n1\n2.5"


def test_a_loop_that_computes_something_else_is_not_timed() -> None:
    pipeline.check_losses({"serial": [3.0, 2.0, 1.0], "DDP": [3.0, 2.02, 0.99]}, reference="serial")
    with pytest.raises(RunError, match=r"DDP has loss 1\.2 at step 2, but serial has 1\.0"):
        pipeline.check_losses({"serial": [3.0, 2.0, 1.0], "DDP": [3.0, 2.0, 1.2]}, reference="serial")
    assert step.check_falls([2.0] * 8 + [1.0] * 8) == ""
    assert "does not fall" in step.check_falls([1.0] * 16)
    assert step.check_falls([math.nan] * 8) == "its loss is not finite"
    assert gpu_pipeline.differs([3.0, 2.0], [3.0, 2.05]) == ""
    assert "its loss at step 1 is 2.5" in gpu_pipeline.differs([3.0, 2.5], [3.0, 2.0])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_workers_of_shares_compute_one_answer_on_cpus() -> None:
    [setting] = QUICK
    splits = [Split("wavefront", recorded=False), Split("wavefront", 2, chunks=4, recorded=False, transport="gloo")]
    splits += [Split("wavefront", 1, 2, recorded=False, transport="gloo"), Split(gpu_pipeline.DDP, 1, 2, recorded=False, transport="gloo")]
    job = {"device": "cpu", "precision": "fp32", "whole_step": False, "rounds": 2}
    rows = gpu_pipeline.rows_of(setting, splits, job, {})
    assert [(row["variant"], row["note"]) for row in rows] == [(each.name, "") for each in splits], asdict(setting)
    assert all(row["ms"] > 0 for row in rows)


def test_what_follows_from_figures() -> None:
    def row(data: str, column: str, figure: float | None, kind: str = "ucr", metric: str = "test accuracy") -> dict[str, object]:
        return {"data": data, "kind": kind, "metric": metric, "column": column, "figure": figure, "note": "no"}

    rows = [row("beef", "ours", 0.8), row("beef", "linear", 0.9), row("coffee", "ours", 1.0), row("coffee", "linear", 0.99)]
    rows += [row("waves", "ours", 0.2, "made", "test mae"), row("waves", "naive", 0.1, "made", "test mae"), row("CR", "svm", None, "texts")]
    assert quality.conclusions(rows) == [
        "CR: svm has no figure: no",
        "2 UCR sets, ours: mean 0.9000, mean rank 1.50, best or level on 1",
        "2 UCR sets, linear: mean 0.9450, mean rank 1.50, best or level on 1",
        "worst: beef ours 0.800, linear 0.900",
        "worst: coffee ours 1.000, linear 0.990",
        "below its linear part: beef 0.800 against 0.900",
        "waves: ours 0.2 is behind naive 0.1",
    ]
