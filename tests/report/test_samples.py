"""Samples are what the best weights predict: the same as `evaluate` and `predict` say."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import carrywave as cw
from _zoo import Zoo, days
from carrywave.report.blocks import Block, Listing, Passage
from carrywave.report.chart import Chart
from carrywave.report.samples import samples_of


def only(kind: type[Any], blocks: list[Block]) -> list[Any]:
    return [block for block in blocks if isinstance(block, kind)]


def points(chart: Chart, name: str) -> list[float]:
    return [value for curve in chart.curves if curve.name == name for _, value in curve.points]


@pytest.mark.parametrize(("kind", "group"), [("labels", "label"), ("tags", "label"), ("spans", "type"), ("series", "series")])
def test_the_rows_by_something_are_those_of_the_evaluation(zoo: Zoo, kind: str, group: str) -> None:
    found = samples_of(zoo(kind), "cpu")
    wanted: dict[str, Any] = cw.evaluate(zoo(kind), device="cpu", by=group)
    assert found[0] == "Validation data, with the best weights:"
    listed = only(Listing, found)[-1]
    assert {row[0] for row in listed.rows} == {row[group] for row in wanted[f"by_{group}"]}
    if kind in ("labels", "tags"):
        assert only(Listing, found)[0].title.endswith(f"{wanted['accuracy']:.1%} are right")
    if kind == "series":  # the worst comes first
        errors = [float(row[listed.names.index("MAE")]) for row in listed.rows]
        assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("kind", ["numbers", "spoken"])
def test_predictions_stand_beside_the_truth(zoo: Zoo, kind: str) -> None:
    [pairs] = only(Listing, samples_of(zoo(kind), "cpu"))
    assert pairs.names == ("", "truth", "prediction")
    assert 4 < len(pairs.rows) <= 20
    if kind == "numbers":
        gaps = [abs(float(a.split(",")[0].replace(",", "")) - float(b.split(",")[0].replace(",", ""))) for _, a, b in pairs.rows]
        assert sum(gaps) / len(gaps) < 10  # in the units of the file


def test_a_forecast_is_that_of_predict_from_the_same_origin(zoo: Zoo, tmp_path: Path) -> None:
    charts = only(Chart, samples_of(zoo("series"), "cpu"))
    assert [chart.title for chart in charts] == ["y, series small", "y, series large"]
    table = pd.read_csv(days(tmp_path / "all.csv", 120))
    for chart, name in zip(charts, ("small", "large"), strict=True):
        known = table[table.unique_id == name][: 120 - 7]
        predicted = cw.predict(zoo("series"), known, device="cpu")
        # The carry is warmed up over the same rows, in windows: float32.
        assert points(chart, "median") == pytest.approx([row["y-q0.5"] for row in predicted], rel=1e-4)
        ends = [pytest.approx((row["y-q0.1"], row["y-q0.9"]), rel=1e-4) for row in predicted]
        assert [(low, high) for _, low, high in chart.areas[0].points] == ends
        assert points(chart, "truth")[-7:] == pytest.approx(table[table.unique_id == name].y[-7:].tolist(), rel=1e-3)


def test_a_text_is_continued_beside_the_truth(zoo: Zoo) -> None:
    text = zoo.data("text").read_text()
    shown = only(Passage, samples_of(zoo("text"), "cpu"))
    assert len(shown) == 2
    assert all(each.prompt + each.truth in text for each in shown)
    assert only(Passage, samples_of(zoo("text"), "cpu")) == shown  # keyed, not drawn by the clock


def test_why_there_are_no_samples(zoo: Zoo, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(zoo("labels"), run)
    spec = run / "spec.yaml"
    spec.write_text(spec.read_text().replace(str(zoo.data("labels")), str(tmp_path / "gone.jsonl")))
    [gone] = samples_of(run, "cpu")
    assert str(gone).startswith("No samples: ")
    assert "gone.jsonl" in str(gone)
    (run / "weights.safetensors").unlink()
    assert "has no weights.safetensors yet" in str(samples_of(run, "cpu"))
