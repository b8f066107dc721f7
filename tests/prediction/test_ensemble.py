"""Several runs as one: their averages in the units of the data, metrics of the average, and which runs are refused together."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import carrywave as cw
from carrywave.cli.main import app
from carrywave.errors import DataError, RunError, UserError
from carrywave.prediction.saved_run import open_run
from carrywave.spec.load import parse
from carrywave.train.fit import train

TINY: dict[str, Any] = {"model": {"hidden": 5, "layers": 1}}


def learn(folder: Path, name: str, task: str, data: dict[str, Any], seed: int = 1, **sections: Any) -> Path:
    more = {"epochs": 1, "precision": "fp64", "seed": seed, **sections.pop("train", {})}
    train(parse({"task": task, "data": data, **TINY, **sections, "train": more}), run=folder / name, device="cpu")
    return folder / name


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ensemble")


@pytest.fixture(scope="module")
def sequences(folder: Path) -> list[dict[str, Any]]:
    draw = np.random.default_rng(1)
    return [
        {"steps": (draw.normal(size=(4 + number % 3, 2)) * 5 + 30).tolist(), "label": "abc"[number % 3], "other": float(number)}
        for number in range(24)
    ]


@pytest.fixture(scope="module")
def labels(folder: Path, sequences: list[dict[str, Any]]) -> list[Path]:
    """Two classifiers that hold out different rows, so that they scale what they read differently."""
    data = {"train": write(folder / "labels.jsonl", sequences), "share": 0.4}
    first = learn(folder, "label-1", "classification", data, train={"class_weights": {"a": 2.0}})
    return [first, learn(folder, "label-2", "classification", data, seed=2, batch={"tokens": 50}, model={"hidden": 7, "layers": 2})]


def test_probabilities_of_labels_are_averaged(labels: list[Path], sequences: list[dict[str, Any]]) -> None:
    assert open_run(labels[0], "cpu").task.codec.mean != open_run(labels[1], "cpu").task.codec.mean
    one, two, both = (cw.predict(runs, sequences, device="cpu", keep="other") for runs in (labels[0], labels[1], labels))
    assert [row["other"] for row in both] == [row["other"] for row in sequences]
    for first, second, mean in zip(one, two, both, strict=True):
        for label, share in mean["probabilities"].items():
            expected = (first["probabilities"][label] + second["probabilities"][label]) / 2
            assert share == pytest.approx(expected, abs=2e-6)  # rows have 6 digits
        assert mean["label"] == max(mean["probabilities"], key=mean["probabilities"].get)


def test_metrics_of_labels_are_those_of_the_average(labels: list[Path], sequences: list[dict[str, Any]]) -> None:
    found = cw.evaluate(labels, sequences, "cpu", confusion=True, by=["label"])
    rows = cw.predict(labels, sequences, device="cpu")
    hits = [row["label"] == truth["label"] for row, truth in zip(rows, sequences, strict=True)]
    assert found["accuracy"] == pytest.approx(np.mean(hits))
    weights = [2.0 if truth["label"] == "a" else 1.0 for truth in sequences]
    logs = [-math.log(row["probabilities"][truth["label"]]) for row, truth in zip(rows, sequences, strict=True)]
    assert found["loss"] == pytest.approx(np.dot(weights, logs) / sum(weights), rel=1e-5)  # rows have 6 digits
    assert sum(map(sum, found["confusion"]["counts"])) == len(sequences)  # type: ignore[index]
    assert len(found["by_label"]) == 3  # type: ignore[arg-type]


def test_a_run_with_itself_is_that_run(labels: list[Path], sequences: list[dict[str, Any]]) -> None:
    alone, twice = (cw.evaluate(runs, sequences, "cpu") for runs in (labels[0], [labels[0], labels[0]]))
    assert twice == {name: value if isinstance(value, str) else pytest.approx(value, rel=1e-12) for name, value in alone.items()}


def test_runs_that_held_out_other_rows_are_not_evaluated_on_them(labels: list[Path]) -> None:
    with pytest.raises(DataError, match="have other rows as valid"):
        cw.evaluate(labels, device="cpu")


@pytest.mark.slow
def test_tags_are_the_likeliest_on_average(folder: Path) -> None:
    draw = np.random.default_rng(2)
    rows = [{"steps": draw.normal(size=(5, 2)).tolist(), "labels": [str(n % 2) for n in range(5)]} for _ in range(12)]
    data = {"train": write(folder / "tags.jsonl", rows), "valid": write(folder / "valid-tags.jsonl", rows[:4])}
    runs = [learn(folder, f"tags-{seed}", "tagging", data, seed) for seed in (1, 2)]
    found, made = cw.evaluate(runs, device="cpu"), cw.predict(runs, rows[:4], device="cpu")
    hits = [a == b for row, truth in zip(made, rows, strict=False) for a, b in zip(row["labels"], truth["labels"], strict=True)]
    assert found["split"] == "valid"
    assert found["accuracy"] == pytest.approx(np.mean(hits))


def test_numbers_are_averaged_in_the_units_of_the_data(folder: Path) -> None:
    draw = np.random.default_rng(3)
    rows = [{"steps": draw.normal(size=(5, 1)).tolist(), "label": [float(draw.normal() * 9 + 50), float(n)]} for n in range(20)]
    data = {"train": write(folder / "numbers.jsonl", rows), "share": 0.4}
    runs = [learn(folder, f"numbers-{seed}", "regression", data, seed) for seed in (1, 2)]
    one, two, both = (np.array([row["label"] for row in cw.predict(some, rows, device="cpu")]) for some in (runs[0], runs[1], runs))
    np.testing.assert_allclose(both, (one + two) / 2, rtol=1e-6)  # outputs travel as float32
    found = cw.evaluate(runs, rows, "cpu", by=["column"])
    truth = np.array([row["label"] for row in rows])
    maes = [row["mae"] for row in found["by_column"]]  # type: ignore[index, union-attr]
    np.testing.assert_allclose(maes, np.abs(both - truth).mean(0), rtol=1e-5)
    codec = open_run(runs[0], "cpu").task.codec
    assert found["loss"] == pytest.approx((((both - truth) / np.array(codec.target_std)) ** 2).mean(), rel=1e-5)


def test_numbers_of_steps_are_averaged_whatever_series_were_held_out(folder: Path) -> None:
    draw = np.random.default_rng(4)
    rows = [{"steps": (x := draw.normal(size=(9, 2))).tolist(), "labels": (x.sum(1) * number).tolist()} for number in range(12)]
    data = {"train": write(folder / "steps.jsonl", rows), "each_step": True, "share": 0.4}
    runs = [learn(folder, f"steps-{seed}", "regression", data, seed, batch={"lanes": 2, "steps": 4}) for seed in (1, 2)]
    given = [{"steps": row["steps"]} for row in rows[:3]]
    one, two, both = ([row["label"] for row in cw.predict(each, given, device="cpu")] for each in (runs[0], runs[1], runs))
    assert both == pytest.approx(np.mean([one, two], axis=0), rel=1e-9)


@pytest.fixture(scope="module")
def series(folder: Path) -> Path:
    draw = np.random.default_rng(4)
    lines = ["unique_id,ds,y"]
    for name, level in (("a", 10.0), ("b", 500.0)):
        values = level * (1 + 0.1 * np.sin(np.arange(20) / 3) + 0.02 * draw.normal(size=20))
        lines += [f"{name},2026-01-01 {hour // 60:02d}:{hour % 60:02d}:00,{value}" for hour, value in enumerate(values)]
    (folder / "series.csv").write_text("\n".join(lines) + "\n")
    return folder / "series.csv"


@pytest.mark.slow
@pytest.mark.parametrize("quantiles", [None, [0.1, 0.5, 0.9]])
def test_forecasts_are_averaged_in_the_units_of_the_data(folder: Path, series: Path, quantiles: list[float] | None) -> None:
    """One run that starts from the last value, one from the last season: they add different things."""
    data = {"train": str(series), "split": [10, 5, 5], "horizon": 3, "quantiles": quantiles}
    kind = "points" if quantiles is None else "quantiles"
    first = learn(folder, f"{kind}-1", "forecasting", data, model={"hidden": 4, "layers": 1, "linear": 3})
    second = learn(folder, f"{kind}-2", "forecasting", {**data, "split": [8, 7, 5]}, 2, model={"hidden": 4, "layers": 1})
    runs = [first, second]
    one, two, both = (cw.predict(some, str(series), device="cpu") for some in (first, second, runs))
    columns = [name for name in both[0] if name.startswith("y")]
    assert len(columns) == len(quantiles or [1])
    for row, other, mean in zip(one, two, both, strict=True):
        assert [mean[name] for name in ("unique_id", "ds", "step")] == [row[name] for name in ("unique_id", "ds", "step")]
        for name in columns:
            assert mean[name] == pytest.approx((row[name] + other[name]) / 2, rel=1e-12)
        assert [mean[name] for name in columns] == sorted(mean[name] for name in columns)
    with pytest.raises(DataError, match="or read them otherwise, so they cannot be evaluated as one"):
        cw.evaluate(runs, str(series), "cpu", by=["series"])
    runs = [first, learn(folder, f"{kind}-3", "forecasting", data, 2, model={"hidden": 4, "layers": 1, "linear": 3})]
    found = cw.evaluate(runs, str(series), "cpu", by=["series"])
    errors = _mean_errors(runs, series)
    by_series = {row["series"]: row["mae"] for row in found["by_series"]}  # type: ignore[index, union-attr]
    assert by_series == {name: pytest.approx(error, rel=1e-5) for name, error in errors.items()}


def _mean_errors(runs: list[Path], series: Path) -> dict[str, float]:
    """The mean absolute error of each series, from predictions after each of its rows by themselves."""
    import pandas as pd

    whole = pd.read_csv(series)
    truth = {name: part["y"].to_numpy() for name, part in whole.groupby("unique_id")}
    gaps: dict[str, list[float]] = {name: [] for name in truth}
    for origin in range(1, 18):
        made = cw.predict(runs, whole.groupby("unique_id").head(origin), device="cpu", note=lambda _: None)
        for row in made:
            value = row.get("y", row.get("y-q0.5"))
            gaps[row["unique_id"]].append(abs(value - truth[row["unique_id"]][origin + row["step"] - 1]))
    return {name: float(np.mean(each)) for name, each in gaps.items()}


@pytest.fixture(scope="module")
def speakers(folder: Path) -> list[Path]:
    (folder / "text.txt").write_text("abcdefgh\nhgfedcba\n" * 60)
    batch = {"lanes": 3, "steps": 7, "eval_lanes": 1}
    first = learn(folder, "speaker-1", "language", {"train": str(folder / "text.txt")}, batch=batch)
    model = {"hidden": 16, "layers": 1, "softmax": "adaptive"}
    second = learn(folder, "speaker-2", "language", {"train": str(folder / "text.txt")}, 2, batch={"lanes": 2, "steps": 5}, model=model)
    return [first, second]


@pytest.mark.slow
def test_the_perplexity_is_that_of_the_mean_probability_of_each_token(folder: Path, speakers: list[Path]) -> None:
    (folder / "other.txt").write_text("abcdefgh\nhgfedcba\nabab\n")
    saved = [open_run(run, "cpu") for run in speakers]
    ids = torch.from_numpy(np.asarray(saved[0].task.codec.encode("abcdefgh\nhgfedcba\nabab\n"), dtype=np.int64))
    shares = [torch.softmax(member.model.head(member.model(ids[:-1, None])[0])[:, 0], dim=-1) for member in saved]  # type: ignore[operator]
    right = ((shares[0] + shares[1]) / 2).gather(1, ids[1:, None])[:, 0]
    found = cw.evaluate(speakers, str(folder / "other.txt"), "cpu")
    assert found["loss"] == pytest.approx(-right.log().mean().item(), rel=1e-12)
    assert found["perplexity"] == pytest.approx(math.exp(float(found["loss"])))  # type: ignore[arg-type]


def test_a_prompt_is_continued_by_all_together(speakers: list[Path]) -> None:
    [row] = cw.predict(speakers, prompt="abc", tokens=6, temperature=0.0, device="cpu")
    saved = [open_run(run, "cpu") for run in speakers]
    text = "abc"
    for _ in range(6):
        ids = torch.from_numpy(np.asarray(saved[0].task.codec.encode(text), dtype=np.int64))[:, None]
        shares = [torch.softmax(member.model.head(member.model(ids)[0])[-1, 0], dim=-1) for member in saved]  # type: ignore[operator]
        text += saved[0].task.codec.decode([int((shares[0] + shares[1]).argmax())])
    assert row["text"] == text


def test_runs_that_do_not_predict_the_same_thing_are_refused(
    folder: Path, series: Path, labels: list[Path], speakers: list[Path], sequences: list[dict[str, Any]]
) -> None:
    with pytest.raises(RunError, match="do not predict the same thing: their tasks differ"):
        cw.predict([labels[0], speakers[0]], sequences, device="cpu")
    fewer = [row for row in sequences if row["label"] != "c"]
    other = learn(folder, "two-labels", "classification", {"train": write(folder / "fewer.jsonl", fewer)})
    with pytest.raises(RunError, match="their labels differ"):
        cw.evaluate([labels[0], other], sequences, "cpu")
    near, far = (learn(folder, f"to-{steps}", "forecasting", {"train": str(series), "horizon": steps}) for steps in (2, 3))
    with pytest.raises(RunError, match="their horizons differ"):
        cw.predict([near, far], str(series), device="cpu")
    with pytest.raises(UserError, match="a list of several"):
        cw.predict([], sequences)
    with pytest.raises(UserError, match="pass one run with model"):
        cw.predict(labels, sequences, model=torch.nn.Linear(1, 1))


@pytest.mark.slow
def test_the_commands_take_runs_and_then_the_data(folder: Path, labels: list[Path], sequences: list[dict[str, Any]]) -> None:
    data = write(folder / "new.jsonl", sequences)
    runs, out, figures = [str(run) for run in labels], folder / "out.jsonl", folder / "figures.json"
    invoke = CliRunner().invoke
    shown = invoke(app, ["predict", *runs, data, "-o", str(out), "--device", "cpu"])
    assert shown.exit_code == 0, shown.output
    assert [json.loads(line) for line in out.read_text().splitlines()] == cw.predict(labels, data, device="cpu")
    for named in ([data], ["--data", data]):
        shown = invoke(app, ["evaluate", *runs, *named, "--device", "cpu", "--json", str(figures)])
        assert shown.exit_code == 0, shown.output
        assert json.loads(figures.read_text())[0]["loss"] == cw.evaluate(labels, data, "cpu")["loss"]
    refused = invoke(app, ["evaluate", *runs, data, "--data", data])
    assert refused.exit_code == 2
