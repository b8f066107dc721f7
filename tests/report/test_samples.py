"""Samples are what the best weights predict: the same as `evaluate` and `predict` say. Small real runs."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import carrywave as cw
from carrywave.report.blocks import Block, Listing, Passage
from carrywave.report.chart import Chart
from carrywave.report.samples import samples_of


def labelled(path: Path, *, numbers: bool = False, tags: bool = False) -> str:
    draw = random.Random(1)
    rows: list[dict[str, Any]] = []
    for at in range(60):
        steps = [[draw.gauss(at % 3, 1.0)] for _ in range(draw.randint(2, 6))]
        if tags:
            rows.append({"steps": steps, "labels": ["up" if step[0] > 0 else "down" for step in steps]})
        else:
            rows.append({"steps": steps, "label": sum(step[0] for step in steps) if numbers else "abc"[at % 3]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def train(task: str, data: dict[str, object], run: Path, **batch: int) -> Path:
    cw.fit({"hidden": 8, "layers": 1}, None, task=task, data=data, batch=batch, train={"epochs": 2, "lr": 0.02}, run=run, device="cpu")
    return run


def only(kind: type[Any], blocks: list[Block]) -> list[Any]:
    return [block for block in blocks if isinstance(block, kind)]


def points(chart: Chart, name: str) -> list[float]:
    return [value for curve in chart.curves if curve.name == name for _, value in curve.points]


@pytest.mark.slow
@pytest.mark.parametrize("tags", [False, True])
def test_the_confusion_and_the_rows_by_label_are_those_of_the_evaluation(tags: bool, tmp_path: Path) -> None:
    test = Path(labelled(tmp_path / "test.jsonl", tags=tags))
    data: dict[str, object] = {"train": labelled(tmp_path / "rows.jsonl", tags=tags), "test": str(test)}
    run = train("tagging" if tags else "classification", data, tmp_path / "run", tokens=64)
    found = samples_of(run, "cpu")
    assert found[0] == "Test data, with the best weights:"
    confusion, labels = only(Listing, found)
    wanted = cw.evaluate(run, device="cpu", by=["label"])
    assert confusion.title.endswith(f"{wanted['accuracy']:.1%} are right")
    assert {row[0] for row in labels.rows} == {row["label"] for row in wanted["by_label"]}
    test.write_text("\n".join(test.read_text().splitlines()[:12]))
    assert samples_of(run, "cpu")[0] == f"{test} has changed since {run} was trained; these are the figures of what it holds now."
    test.unlink()
    [gone] = samples_of(run, "cpu")
    assert isinstance(gone, str)
    assert gone.startswith("No samples: ")
    assert "test.jsonl" in gone
    (run / "weights.safetensors").unlink()
    assert "has no weights.safetensors yet" in str(samples_of(run, "cpu"))


@pytest.mark.slow
def test_numbers_are_paired_in_the_units_of_the_file(tmp_path: Path) -> None:
    file = labelled(tmp_path / "rows.jsonl", numbers=True)
    run = train("regression", {"train": file}, tmp_path / "run", tokens=64)
    [paired] = only(Chart, samples_of(run, "cpu"))
    truths = {round(json.loads(line)["label"], 3) for line in Path(file).read_text().splitlines()}
    assert {round(truth, 3) for truth, _ in paired.dots} <= truths
    errors = [abs(truth - guess) for truth, guess in paired.dots]
    assert np.mean(errors) == pytest.approx(cw.evaluate(run, device="cpu")["mae"], rel=1e-4)  # float32


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantiles", "more"),
    [
        (None, {"channels": "joint", "targets": ["load"]}),
        ([0.1, 0.5, 0.9], {"targets": ["load"]}),
        (None, {"channels": "independent", "transform": "diff"}),
    ],
)
def test_a_forecast_is_that_of_predict_from_the_same_origin(quantiles: list[float] | None, more: dict[str, Any], tmp_path: Path) -> None:
    draw = random.Random(2)
    rows = [(100 + 30 * math.sin(at * math.pi / 6) + draw.gauss(0, 3), draw.gauss(5, 1)) for at in range(200)]
    lines = [f"{load:.3f},{other:.3f}" for load, other in rows]
    (tmp_path / "all.csv").write_text("\n".join(["load,other", *lines]) + "\n")
    (tmp_path / "known.csv").write_text("\n".join(["load,other", *lines[:-6]]) + "\n")
    data = {"train": str(tmp_path / "all.csv"), "horizon": 6, "season": 12, "quantiles": quantiles, **more}
    run = train("forecasting", data, tmp_path / "run", lanes=2, steps=16)
    charts = only(Chart, samples_of(run, "cpu"))
    predicted = cw.predict(run, str(tmp_path / "known.csv"), device="cpu")
    assert [chart.title for chart in charts] == (["load"] if "targets" in more else ["load", "other"])
    for place, chart in enumerate(charts):
        name = chart.title if quantiles is None else f"{chart.title}-q0.5"
        # The carry is warmed up over the same rows, in windows: float32.
        assert points(chart, "forecast" if quantiles is None else "median") == pytest.approx([row[name] for row in predicted], rel=1e-4)
        assert points(chart, "truth")[-6:] == pytest.approx([row[place] for row in rows[-6:]], rel=1e-3)
    if quantiles is not None:
        ends = [pytest.approx((row["load-q0.1"], row["load-q0.9"]), rel=1e-4) for row in predicted]
        assert [(low, high) for _, low, high in charts[0].areas[0].points] == ends


@pytest.mark.slow
def test_of_many_series_the_first_are_drawn_and_the_worst_are_listed(tmp_path: Path) -> None:
    rows = [
        f"s{series},2024-03-{1 + at // 24:02d} {at % 24:02d}:00:00,{math.sin(at + series):.3f}" for series in range(5) for at in range(60)
    ]
    (tmp_path / "all.csv").write_text("\n".join(["unique_id,ds,y", *rows]) + "\n")
    run = train("forecasting", {"train": str(tmp_path / "all.csv"), "horizon": 3}, tmp_path / "run", lanes=2, steps=16)
    found = samples_of(run, "cpu")
    charts, [listed] = only(Chart, found), only(Listing, found)
    assert [chart.title for chart in charts] == ["y, series s0", "y, series s1"]
    assert charts[0].x_name == "forecast made at 2024-03-03 08:00:00"
    assert charts[0].x_ticks[-1][1] == "2024-03-03 11:00:00"
    errors = [float(row[listed.names.index("MAE")]) for row in listed.rows]
    assert errors == sorted(errors, reverse=True)
    assert len(errors) == 5


@pytest.mark.slow
@pytest.mark.parametrize("tokens", ["char", "word"])
def test_a_text_is_continued_beside_the_truth(tokens: str, tmp_path: Path) -> None:
    text = "the carry is passed along, and the wave goes on. " * 100
    (tmp_path / "text.txt").write_text(text)
    run = train("language", {"train": str(tmp_path / "text.txt"), "tokens": tokens}, tmp_path / "run", lanes=4, steps=16)
    shown = only(Passage, samples_of(run, "cpu"))
    assert len(shown) == 2
    for each in shown:
        assert each.prompt + each.truth in text
        assert set((each.prompt + each.written).split()) <= {*text.split(), "<unk>"} or tokens == "char"
    assert only(Passage, samples_of(run, "cpu")) == shown  # keyed, not drawn by the clock
