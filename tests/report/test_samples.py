"""Samples are what the best weights predict: the same as `evaluate` and `predict` say. Small real runs."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest

import carrywave as cw
from carrywave.prediction.saved_run import open_run, own_data
from carrywave.report.sample_kinds import Confused, Continued, Distributed, Forecasted, Paired
from carrywave.report.samples import samples_of


def labelled(path: Path, *, numbers: bool = False) -> str:
    draw = random.Random(1)
    rows = []
    for at in range(60):
        steps = [[draw.gauss(at % 3, 1.0)] for _ in range(draw.randint(2, 6))]
        rows.append({"steps": steps, "label": sum(step[0] for step in steps) if numbers else "abc"[at % 3]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def train(task: str, data: dict[str, object], run: Path, **batch: int) -> Path:
    cw.fit({"hidden": 8, "layers": 1}, None, task=task, data=data, batch=batch, train={"epochs": 2, "lr": 0.02}, run=run, device="cpu")
    return run


@pytest.mark.slow
def test_a_confusion_matrix_is_that_of_the_evaluation(tmp_path: Path) -> None:
    run = train("classification", {"train": labelled(tmp_path / "rows.jsonl")}, tmp_path / "run", tokens=64)
    found = samples_of(run, "cpu")
    [confused] = found.shown
    assert isinstance(confused, Confused)
    assert confused.labels == ("a", "b", "c")
    assert confused.accuracy == pytest.approx(cw.evaluate(run, device="cpu")["accuracy"])
    assert found.note.startswith(f"{sum(map(sum, confused.counts))} targets of the validation data")
    test = Path(labelled(tmp_path / "test.jsonl"))
    test.write_text("\n".join(test.read_text().splitlines()[:17]))
    run = train("classification", {"train": str(tmp_path / "rows.jsonl"), "test": str(test)}, tmp_path / "tested", tokens=64)
    found = samples_of(run, "cpu")
    assert found.note.startswith("17 targets of the test data")
    [confused] = found.shown
    assert isinstance(confused, Confused)
    assert confused.accuracy == pytest.approx(cw.evaluate(run, device="cpu")["accuracy"])
    test.write_text("\n".join(test.read_text().splitlines()[:12]))
    note = samples_of(run, "cpu").note
    assert note.startswith("12 targets of the test data")
    assert note.endswith(f"{test} has changed since {run} was trained; these are the figures of what it holds now.")


@pytest.mark.slow
def test_numbers_are_paired_in_the_units_of_the_file(tmp_path: Path) -> None:
    file = labelled(tmp_path / "rows.jsonl", numbers=True)
    run = train("regression", {"train": file}, tmp_path / "run", tokens=64)
    [paired] = samples_of(run, "cpu").shown
    assert isinstance(paired, Paired)
    truths = {round(json.loads(line)["label"], 3) for line in Path(file).read_text().splitlines()}
    assert {round(truth, 3) for truth, _ in paired.points} <= truths
    errors = [abs(truth - guess) for truth, guess in paired.points]
    assert np.mean(errors) == pytest.approx(cw.evaluate(run, device="cpu")["mae"], rel=1e-4)  # float32


@pytest.mark.slow
@pytest.mark.parametrize("quantiles", [None, [0.1, 0.5, 0.9]])
@pytest.mark.parametrize("residual", ["none", "last", "season"])
def test_a_forecast_is_that_of_predict_from_the_same_origin(quantiles: list[float] | None, residual: str, tmp_path: Path) -> None:
    draw = random.Random(2)
    rows = [(100 + 30 * math.sin(at * math.pi / 6) + draw.gauss(0, 3), draw.gauss(5, 1)) for at in range(200)]
    lines = [f"{load:.3f},{other:.3f}" for load, other in rows]
    (tmp_path / "all.csv").write_text("\n".join(["load,other", *lines]) + "\n")
    (tmp_path / "known.csv").write_text("\n".join(["load,other", *lines[:-6]]) + "\n")
    data = {"train": str(tmp_path / "all.csv"), "horizon": 6, "season": 12, "residual": residual, "targets": ["load"], "context": 200}
    run = train("forecasting", data | {"quantiles": quantiles}, tmp_path / "run", lanes=2, steps=16)
    [found, spread] = samples_of(run, "cpu").shown
    assert isinstance(found, Forecasted)
    assert isinstance(spread, Distributed)
    evaluated = cw.evaluate(run, device="cpu")
    assert [name for name, _ in spread.by_step] == ["forecast", "seasonal naive", "last value", "ridge"]
    for (_, values), metric in zip(spread.by_step, ("mae", "naive_mae", "last_mae", "ridge_mae"), strict=True):
        assert sum(values) / 6 == pytest.approx(evaluated[metric], rel=1e-6)
    predicted = cw.predict(run, str(tmp_path / "known.csv"), device="cpu")
    names = ["load"] if quantiles is None else ["load-q0.1", "load-q0.5", "load-q0.9"]
    middle = names[len(names) // 2]
    # The carry is warmed up over the same rows, in windows: float32.
    assert [value for _, value in found.forecast] == pytest.approx([row[middle] for row in predicted], rel=1e-4)
    assert [value for _, value in found.truth[1:]] == pytest.approx([load for load, _ in rows[-6:]], rel=1e-3)
    if quantiles is not None:
        assert [(low, high) for _, low, high in found.band] == [
            pytest.approx((row[names[0]], row[names[2]]), rel=1e-4) for row in predicted
        ]


@pytest.mark.slow
def test_of_many_series_it_is_said_how_many_are_shown(tmp_path: Path) -> None:
    rows = [f"s{series},{at},{math.sin(at + series):.3f}" for series in range(5) for at in range(60)]
    (tmp_path / "all.csv").write_text("\n".join(["unique_id,ds,y", *rows]) + "\n")
    run = train("forecasting", {"train": str(tmp_path / "all.csv"), "horizon": 3}, tmp_path / "run", lanes=2, steps=16)
    found = samples_of(run, "cpu")
    *panels, spread = found.shown
    assert isinstance(spread, Distributed)
    assert len(panels) == 2
    assert {name for name, _ in spread.worst} == {f"s{series}" for series in range(5)}
    assert [value for _, value in spread.worst] == sorted((value for _, value in spread.worst), reverse=True)
    assert found.note.endswith("with the best weights: the first 2 of 5 series.")
    for place, panel in enumerate(panels):
        assert isinstance(panel, Forecasted)
        assert panel.title == f"y, series s{place}"
        assert list(panel.times) == [str(time) for time in range(60 - len(panel.history) - 3, 60)]


@pytest.mark.slow
def test_a_forecast_within_a_split_has_the_dates_of_its_rows(tmp_path: Path) -> None:
    days = [f"2024-{1 + at // 28:02d}-{1 + at % 28:02d}" for at in range(120)]
    rows = [f"{day} 00:00:00,{math.sin(at):.4f}" for at, day in enumerate(days)]
    (tmp_path / "all.csv").write_text("\n".join(["ds,y", *rows]) + "\n")
    data: dict[str, object] = {"train": str(tmp_path / "all.csv"), "horizon": 3, "split": [80, 20, 20], "frequency": "none"}
    run = train("forecasting", data, tmp_path / "run", lanes=2, steps=16)
    [panel, _] = samples_of(run, "cpu").shown
    assert isinstance(panel, Forecasted)
    assert [time[:10] for time in panel.times] == days[-len(panel.times) :]
    assert len(panel.times) == len(panel.history) + 3
    assert [value for _, value in panel.truth[1:]] == pytest.approx([math.sin(at) for at in (117, 118, 119)], abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("transform", ["none", "log", "diff"])
def test_independent_channels_are_shown_as_columns(transform: str, tmp_path: Path) -> None:
    rows = [(100 + 30 * math.sin(at / 3), 5 + math.cos(at / 2)) for at in range(150)]
    lines = [f"{load:.4f},{other:.4f}" for load, other in rows]
    (tmp_path / "all.csv").write_text("\n".join(["load,other", *lines]) + "\n")
    (tmp_path / "known.csv").write_text("\n".join(["load,other", *lines[:-4]]) + "\n")
    data = {"train": str(tmp_path / "all.csv"), "horizon": 4, "channels": "independent", "transform": transform, "context": 150}
    run = train("forecasting", data, tmp_path / "run", lanes=2, steps=16)
    *panels, spread = samples_of(run, "cpu").shown
    assert isinstance(spread, Distributed)
    assert {name for name, _ in spread.worst} == {"load", "other"}
    predicted = cw.predict(run, str(tmp_path / "known.csv"), device="cpu")
    assert len(panels) == 2
    for place, (panel, column) in enumerate(zip(panels, ("load", "other"), strict=True)):
        assert isinstance(panel, Forecasted)
        assert panel.title == column
        assert [value for _, value in panel.forecast] == pytest.approx([row[column] for row in predicted], rel=1e-4)
        assert [value for _, value in panel.truth] == pytest.approx([row[place] for row in rows[-5:]], rel=1e-4)


@pytest.mark.slow
def test_a_text_is_continued_beside_the_truth(tmp_path: Path) -> None:
    text = "the carry is passed along, and the wave goes on. " * 100
    (tmp_path / "text.txt").write_text(text)
    run = train("language", {"train": str(tmp_path / "text.txt"), "tokens": "char"}, tmp_path / "run", lanes=4, steps=16)
    shown = samples_of(run, "cpu").shown
    assert len(shown) == 2
    for each in shown:
        assert isinstance(each, Continued)
        assert each.prompt + each.truth in text
        assert len(each.written) == len(each.truth) == 200
    assert samples_of(run, "cpu").shown == shown  # keyed, not drawn by the clock


@pytest.mark.slow
def test_words_are_separated_where_the_model_goes_on(tmp_path: Path) -> None:
    text = "the carry is passed along\n" * 100
    (tmp_path / "text.txt").write_text(text)
    run = train("language", {"train": str(tmp_path / "text.txt"), "tokens": "word"}, tmp_path / "run", lanes=4, steps=16)
    for each in samples_of(run, "cpu").shown:
        assert isinstance(each, Continued)
        assert each.prompt + each.truth in text
        assert set((each.prompt + each.written).split()) <= {*text.split(), "<unk>"}


@pytest.mark.slow
def test_tags_are_counted_step_by_step_and_reasons_are_given(tmp_path: Path) -> None:
    draw = random.Random(3)
    rows = []
    for _ in range(20):
        steps = [[draw.gauss(0, 1)] for _ in range(draw.randint(2, 6))]
        rows.append({"steps": steps, "labels": ["up" if step[0] > 0 else "down" for step in steps]})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = train("tagging", {"train": str(tmp_path / "rows.jsonl")}, tmp_path / "run", tokens=64)
    [confused] = samples_of(run, "cpu").shown
    assert isinstance(confused, Confused)
    valid = own_data(open_run(run, "cpu")).valid
    assert valid is not None
    assert sum(map(sum, confused.counts)) == int(valid.lengths.sum())
    (tmp_path / "rows.jsonl").unlink()
    gone = samples_of(run, "cpu")
    assert gone.shown == ()
    assert gone.note.startswith("No samples: ")
    assert "rows.jsonl" in gone.note
    (run / "weights.safetensors").unlink()
    assert "has no weights.safetensors yet" in samples_of(run, "cpu").note
