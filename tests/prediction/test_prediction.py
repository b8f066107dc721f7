"""Predictions of trained runs: in the file's order and units, whatever way the data was batched."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import carrywave as cw
from carrywave.errors import UserError
from carrywave.prediction import predict
from carrywave.prediction.evaluate import evaluate_run
from carrywave.prediction.saved_run import open_run
from carrywave.spec.load import parse
from carrywave.train.fit import train


def predict_run(run: Path, given: Any = None, output: Path | None = None, **how: Any) -> list[dict[str, Any]]:
    """The rows; those that are written to a file are the same."""
    if output is None:
        return cw.predict(run, given, **how)
    rows = cw.predict(run, given, note=lambda _: None, **how)
    assert predict.predict_run(run, given, output, **how) == len(rows)
    return rows


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def learn(tmp_path: Path, task: str, data: dict[str, Any], **sections: Any) -> Path:
    spec = parse({"task": task, "data": data, **{"model": {"hidden": 10, "layers": 1}, **sections}})
    train(spec, run=tmp_path / "run", device="cpu")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A character model that has learned a very regular text."""
    folder = tmp_path_factory.mktemp("speaker")
    (folder / "text.txt").write_text("abcdefgh\n" * 300)
    batch, steps = {"lanes": 4, "steps": 20}, {"epochs": 4, "lr": 0.03, "clip": 1.0}
    return learn(folder, "language", {"train": str(folder / "text.txt")}, batch=batch, train=steps)


def test_the_likeliest_continuation_is_what_was_learned(speaker: Path) -> None:
    row = predict_run(speaker, prompt="abc", tokens=15, temperature=0.0, device="cpu")[0]
    assert row == {"prompt": "abc", "continuation": "defgh\nabcdefgh\n", "text": "abcdefgh\nabcdefgh\n"}


def test_sampling_is_keyed_by_its_seed(speaker: Path) -> None:
    first, again, other = (
        predict_run(speaker, prompt="a", tokens=40, temperature=3.0, seed=seed, device="cpu")[0]["text"] for seed in (1, 1, 2)
    )
    assert first == again != other


def test_prompts_from_a_file_do_not_see_each_other(speaker: Path, tmp_path: Path) -> None:
    prompts = lines(tmp_path / "prompts.jsonl", [{"text": "abcdefgh\nab"}, {"text": "c"}, {"prompt": "fg"}])
    rows = predict_run(speaker, prompts, tmp_path / "out.jsonl", tokens=8, temperature=0.0, device="cpu")
    alone = [predict_run(speaker, prompt=row["prompt"], tokens=8, temperature=0.0, device="cpu")[0] for row in rows]
    assert rows == alone
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == rows


def test_a_list_of_prompts_is_data(speaker: Path) -> None:
    assert [row["prompt"] for row in cw.predict(speaker, ["abc", "fg"], tokens=3)] == ["abc", "fg"]
    with pytest.raises(UserError, match=r"prompt=\.\.\. is of type list, not one text; pass a list of prompts as data"):
        cw.predict(speaker, prompt=["abc", "fg"], tokens=3)  # type: ignore[arg-type]


def test_an_empty_prompt_starts_like_a_line(speaker: Path) -> None:
    # It has seen few starts without a carry, so what it says then need not be what it has learned, but it is the same.
    unprompted, after_a_line = (predict_run(speaker, prompt=prompt, tokens=9, temperature=0.0, device="cpu")[0] for prompt in (None, "\n"))
    assert unprompted["text"] == unprompted["continuation"] == after_a_line["continuation"]
    others = (predict_run(speaker, prompt=prompt, tokens=9, temperature=0.0, device="cpu")[0] for prompt in ("b", "e"))
    assert unprompted["text"] not in [other["continuation"] for other in others]


def shifted(draw: np.random.Generator, number: int) -> list[dict[str, Any]]:
    rows = []
    for _ in range(number):
        up = bool(draw.integers(2))
        steps = draw.normal(size=(int(draw.integers(1, 15)), 2)) + (2.0 if up else -2.0)
        rows.append({"steps": steps.round(3).tolist(), "label": "up" if up else "down"})
    return rows


def test_labels_come_in_the_order_of_the_file(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    data = lines(tmp_path / "train.jsonl", shifted(draw, 80))
    run = learn(tmp_path, "classification", {"train": str(data)}, batch={"tokens": 64}, train={"epochs": 6, "lr": 0.02})
    wanted = shifted(draw, 30)
    given = lines(tmp_path / "given.jsonl", [{"steps": row["steps"]} for row in wanted])
    rows = predict_run(run, given, tmp_path / "out.csv", device="cpu")
    assert [row["label"] for row in rows] == [row["label"] for row in wanted]
    assert all(sum(row["probabilities"].values()) == pytest.approx(1.0, abs=1e-5) for row in rows)
    with (tmp_path / "out.csv").open() as file:
        assert [row["label"] for row in csv.DictReader(file)] == [row["label"] for row in rows]
    # What is predicted agrees with how the run is judged on the same rows.
    assert evaluate_run(run, lines(tmp_path / "judged.jsonl", wanted), device="cpu")["accuracy"] == 1.0
    with pytest.raises(UserError, match="predict needs an INPUT file for a classification model"):
        predict_run(run, device="cpu")


@pytest.mark.parametrize("batch", [{"tokens": 40}, {"lanes": 3, "steps": 8}])
def test_tags_are_one_for_each_step(tmp_path: Path, batch: dict[str, int]) -> None:
    draw = np.random.default_rng(0)

    def sentence() -> dict[str, Any]:
        words = [["cat", "dog", "runs", "sees"][i] for i in draw.integers(4, size=int(draw.integers(1, 12)))]
        return {"tokens": words, "labels": ["noun" if word in ("cat", "dog") else "verb" for word in words]}

    data = lines(tmp_path / "train.jsonl", [sentence() for _ in range(60)])
    run = learn(tmp_path, "tagging", {"train": str(data)}, batch=batch, train={"epochs": 8, "lr": 0.03})
    wanted = [sentence() for _ in range(20)]
    rows = predict_run(run, lines(tmp_path / "given.jsonl", [{"tokens": row["tokens"]} for row in wanted]), device="cpu")
    assert [row["labels"] for row in rows] == [row["labels"] for row in wanted]


@pytest.mark.parametrize("both_ways", [False, True])
def test_sequences_that_begin_inside_a_row_are_predicted_as_if_they_were_alone(tmp_path: Path, both_ways: bool) -> None:
    draw = np.random.default_rng(3)
    rows = [{"steps": draw.normal(size=(9, 2)).tolist(), "resets": [step in (4, 7) for step in range(9)]} for _ in range(12)]
    tags = [["up" if total > 0 else "down" for total in np.cumsum(row["steps"], axis=0)[:, 0]] for row in rows]
    given = [row | {"labels": own} for row, own in zip(rows, tags, strict=True)]
    data, how = {"train": str(lines(tmp_path / "train.jsonl", given))}, {"epochs": 10, "lr": 0.05}
    run = learn(tmp_path, "tagging", data, model={"hidden": 10, "layers": 1, "bidirectional": both_ways}, batch={"tokens": 64}, train=how)
    parts = [{"steps": row["steps"][low:high]} for row in rows for low, high in ((0, 4), (4, 7), (7, 9))]
    alone = [label for row in predict_run(run, lines(tmp_path / "parts.jsonl", parts)) for label in row["labels"]]
    assert [label for row in predict_run(run, lines(tmp_path / "rows.jsonl", rows)) for label in row["labels"]] == alone
    joined = [label for row in predict_run(run, [{"steps": row["steps"]} for row in rows]) for label in row["labels"]]
    assert joined != alone  # it is not for nothing


def test_numbers_come_back_in_the_units_of_the_file(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)

    def row() -> dict[str, Any]:
        steps = draw.normal(size=(int(draw.integers(3, 6)), 1))
        return {"steps": steps.round(3).tolist(), "label": [1000.0 + 50.0 * float(steps.mean()), 3.0]}

    data = lines(tmp_path / "train.jsonl", [row() for _ in range(150)])
    run = learn(tmp_path, "regression", {"train": str(data)}, batch={"tokens": 64}, train={"epochs": 15, "lr": 0.02})
    wanted = [row() for _ in range(20)]
    rows = predict_run(run, lines(tmp_path / "given.jsonl", [{"steps": r["steps"]} for r in wanted]), device="cpu")
    error = [abs(got["label"][0] - want["label"][0]) for got, want in zip(rows, wanted, strict=True)]
    # The label moves by some 25 around 1000; what is learned is far closer than that.
    assert float(np.mean(error)) < 10.0
    assert all(got["label"][1] == pytest.approx(3.0, abs=0.5) for got in rows)
    # The metrics of each number speak of the same units; together they are standardised.
    judged = evaluate_run(run, lines(tmp_path / "judged.jsonl", wanted), device="cpu", by=["column"])
    codec = json.loads((run / "codec.json").read_text())
    scaled = []
    for place in range(2):
        own = float(np.mean([abs(got["label"][place] - want["label"][place]) for got, want in zip(rows, wanted, strict=True)]))
        assert judged[f"mae[{place}]"] == judged["by_column"][place]["mae"] == pytest.approx(own, rel=1e-3)  # type: ignore[index]
        scaled.append(own / codec["target_std"][place])
    assert judged["mae"] == pytest.approx(float(np.mean(scaled)), rel=1e-3)


@pytest.mark.parametrize("labels", [(3, 7), (False, True), ("3", "7")])
def test_labels_come_back_as_they_were_given(tmp_path: Path, labels: tuple[Any, Any]) -> None:
    rows = [{"steps": [[float(number % 2)]] * 3, "label": labels[number % 2]} for number in range(20)]
    data = lines(tmp_path / "train.jsonl", rows)
    run = learn(tmp_path, "classification", {"train": str(data)}, batch={"tokens": 16}, train={"epochs": 8, "lr": 0.05})
    found = predict_run(run, data, tmp_path / "out.jsonl", device="cpu")
    assert [row["label"] for row in found] == [row["label"] for row in rows]
    with pytest.raises(UserError, match=r"written as JSON Lines, CSV or Parquet, not as \.xlsx; use .* \.parquet"):
        predict_run(run, data, tmp_path / "out.xlsx", device="cpu")


def table(path: Path, hours: int) -> Path:
    rows = [f"2024-01-{1 + h // 24:02d} {h % 24:02d}:00:00,{10 + 5 * np.sin(h * np.pi / 12):.4f},{h % 24}" for h in range(hours)]
    path.write_text("date,load,clock\n" + "\n".join(rows) + "\n")
    return path


@pytest.mark.parametrize("quantiles", [None, [0.1, 0.5, 0.9]])
def test_forecasts_go_on_from_the_last_row(tmp_path: Path, quantiles: list[float] | None) -> None:
    data: dict[str, Any] = {"train": str(table(tmp_path / "a.csv", 24 * 20)), "horizon": 6, "season": 24}
    data |= {"targets": ["load"], "split": [0.7, 0.15, 0.15]} | ({"quantiles": quantiles} if quantiles else {})
    run = learn(tmp_path, "forecasting", data, batch={"lanes": 8, "steps": 24}, train={"epochs": 12, "lr": 0.01})
    rows = predict_run(run, table(tmp_path / "b.csv", 24 * 4), tmp_path / "out.csv", device="cpu")
    assert [row["date"] for row in rows[:2]] == ["2024-01-05 00:00:00", "2024-01-05 01:00:00"]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    truth = [10 + 5 * np.sin(h * np.pi / 12) for h in range(96, 102)]
    column = "load-q0.5" if quantiles else "load"
    # The season repeats exactly, so the naive part alone is right; the learned part must stay small.
    assert [row[column] for row in rows] == pytest.approx(truth, abs=0.8)
    if quantiles:
        assert all(row["load-q0.1"] <= row["load-q0.5"] <= row["load-q0.9"] for row in rows)
    with pytest.warns(UserWarning, match=r"the forecast has less than a season \(24 rows\) before the first step, so the last value"):
        cw.predict(run, table(tmp_path / "short.csv", 20), device="cpu")
    judged = evaluate_run(run, device="cpu")
    assert judged["naive_mae"] == pytest.approx(0.0, abs=1e-4)
    assert {"mae", "rmse", "naive_rmse"} <= judged.keys()
    assert "mase" not in judged  # relative to a change that there is not


def test_a_run_opens_with_its_own_weights(speaker: Path) -> None:
    first, second = open_run(speaker, "cpu"), open_run(speaker, "cpu")
    assert not first.model.training
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_series_of_different_scales_are_each_forecast_on_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def long(path: Path, days: int, names: list[str]) -> Path:
        levels = {"small": (3.0, 0.5), "large": (3000.0, 400.0), "new": (50.0, 5.0)}
        rows = ["unique_id,ds,y"]
        for name in names:
            level, swing = levels[name]
            rows += [
                f"{name},{np.datetime64('2024-01-01') + np.timedelta64(day, 'D')},{level + swing * np.sin(day * np.pi / 3.5):.4f}"
                for day in range(days)
            ]
        path.write_text("\n".join(rows) + "\n")
        return path

    data = {"train": str(long(tmp_path / "a.csv", 120, ["small", "large"])), "horizon": 7, "season": 7, "share": 0.2}
    run = learn(tmp_path, "forecasting", data, batch={"lanes": 4, "steps": 14}, train={"epochs": 10, "lr": 0.01})
    capsys.readouterr()
    given = long(tmp_path / "b.csv", 60, ["large", "new", "small"])
    rows = predict_run(run, given, tmp_path / "out.csv", device="cpu")
    unseen = "series new is not in the training data; the scale is computed from the rows given here, so pass enough of them"
    assert capsys.readouterr().err == f"carrywave: {given}: {unseen}\n"
    told: list[str] = []
    evaluate_run(run, given, device="cpu", note=told.append)
    assert f"{given}: {unseen}" in told
    for name, level, swing in (("small", 3.0, 0.5), ("large", 3000.0, 400.0), ("new", 50.0, 5.0)):
        found = [row["y"] for row in rows if row["unique_id"] == name]
        truth = [level + swing * np.sin(day * np.pi / 3.5) for day in range(60, 67)]
        # Each within a part of its own swing: one scale for all would leave the small one lost.
        assert found == pytest.approx(truth, abs=0.3 * swing), name
    assert [row["ds"] for row in rows[:2]] == ["2024-03-01", "2024-03-02"]


def test_series_named_by_whole_numbers_keep_them(tmp_path: Path) -> None:
    days = np.arange("2024-01-01", "2024-03-01", dtype="datetime64[D]")
    frame = pd.DataFrame({"store": np.repeat([7, 11], len(days)), "date": np.tile(days, 2), "y": np.arange(2.0 * len(days))})
    cw.fit(
        {"hidden": 4, "layers": 1},
        frame,
        task="forecasting",
        data={"series": "store", "horizon": 2, "share": 0.2},
        batch={"lanes": 2, "steps": 8},
        train={"epochs": 1},
        run=tmp_path / "run",
        device="cpu",
    )
    assert [row["store"] for row in cw.predict(tmp_path / "run", frame, device="cpu")] == [7, 7, 11, 11]


@pytest.mark.filterwarnings("ignore:.*not in the training data")
@pytest.mark.parametrize("several", [False, True])
def test_the_unit_of_a_series_does_not_change_its_forecast(tmp_path: Path, several: bool) -> None:
    waves = np.sin(np.arange(60) / 3) + np.random.default_rng(5).normal(size=60) / 9
    found = []
    for unit in (1.0, 2.0**-37, 2.0**-66):  # 1, about 1e-11 and 1e-20: powers of two round nothing
        series = waves * unit
        run = tmp_path / str(unit)
        how: dict[str, Any] = {"data": {"horizon": 2}, "train": {"max_steps": 2}, "device": "cpu", "run": run}
        metrics = cw.fit(
            {"hidden": 4, "layers": 1}, [series[:, None], -2 * series[:, None]] if several else series, task="forecasting", **how
        ).metrics
        valid = {name: value / unit if name.endswith("]") else value for name, value in metrics["valid"].items()}  # mae[0] is in units
        found.append(([row["0"] / unit for row in cw.predict(run, series, device="cpu")], valid))
    assert found[1] == found[0]
    assert found[2] == found[0]


def test_a_small_change_of_large_numbers_is_learned_and_comes_back(tmp_path: Path) -> None:
    draw = np.random.default_rng(5)
    steps = [draw.normal(size=(4, 1)) for _ in range(24)]
    small = [float(step.mean()) * 1e-4 for step in steps]
    runs = []
    for offset, unit in ((1e9, 1.0), (0.0, 1e-20)):
        run = tmp_path / str(offset)
        fitted = cw.fit(
            {"hidden": 4, "layers": 1},
            (steps, [offset + value * unit for value in small]),
            task="regression",
            train={"max_steps": 3},
            device="cpu",
            run=run,
        )
        guesses = np.array([row["label"] for row in cw.predict(run, steps, device="cpu")])
        runs.append((guesses - offset) / unit)
        assert 0.0 < fitted.metrics["valid"]["mae"] / unit < 1e-3
    # Float64 has steps of 1e-7 at 1e9, and targets are some 1e-4.
    np.testing.assert_allclose(runs[0], runs[1], atol=1e-6)
    assert runs[0].std() > 0


@pytest.mark.filterwarnings("ignore:.*not in the training data")
def test_forecasts_of_arrays_say_which_one_they_are_of(tmp_path: Path) -> None:
    waves = [np.sin(np.arange(40.0) / speed)[:, None] for speed in (2, 3)]
    run = tmp_path / "run"
    how: dict[str, Any] = {"data": {"horizon": 2, "share": 0}, "train": {"max_steps": 1}, "device": "cpu"}
    cw.fit({"hidden": 4, "layers": 1}, waves, task="forecasting", run=run, **how)
    rows = cw.predict(run, waves, device="cpu")
    assert [(row["series"], row["step"]) for row in rows] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert all(row.keys() == {"step", "0"} for row in cw.predict(run, waves[0], device="cpu"))


def test_named_columns_are_read_from_frames_pipes_and_plain_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = pd.DataFrame({"review": ["ab", "ba"] * 10, "stars": [5, 1] * 10})
    named = {"text": "review", "label": "stars"}
    how = {"task": "classification", "data": named, "train": {"epochs": 1}, "device": "cpu"}
    run = cw.fit({"hidden": 4, "layers": 1}, frame, run=tmp_path / "run", **how).run
    expected = cw.predict(run, frame[["review"]], device="cpu")
    assert cw.predict(run, ["ab", "ba"] * 10, device="cpu") == expected
    given = lines(tmp_path / "given.jsonl", [{"review": text} for text in frame.review])
    assert cw.predict(run, given, device="cpu") == expected
    (tmp_path / "array").write_text(json.dumps([{"review": text} for text in frame.review]))
    for piped, named_format in ((given, "jsonl"), (tmp_path / "array", "auto")):
        with piped.open() as stream:
            monkeypatch.setattr("sys.stdin", stream)
            assert cw.predict(run, "-", format=named_format, device="cpu") == expected
    with pytest.raises(UserError, match=r"data item 0 has no column 'review', which the training data has; use one of text"):
        cw.predict(run, pd.DataFrame({"text": ["ab"]}), device="cpu")
    pair = cw.fit({"hidden": 4, "layers": 1}, (list(frame.review), list(frame.stars)), run=tmp_path / "pair", **how).run
    assert cw.predict(pair, ["ab", "ba"] * 10, device="cpu") == expected


def test_the_order_of_dates_is_that_of_training_where_a_file_does_not_tell(tmp_path: Path) -> None:
    days = pd.date_range("2024-01-01", periods=80)
    frame = pd.DataFrame({"date": days.strftime("%d/%m/%Y"), "y": np.arange(80.0)})
    frame.to_csv(tmp_path / "train.csv", index=False)
    data = {"train": str(tmp_path / "train.csv"), "horizon": 2}
    run = learn(tmp_path, "forecasting", data, batch={"lanes": 1, "steps": 8}, train={"epochs": 1})
    frame[60:72].to_csv(tmp_path / "new.csv", index=False)  # 1 to 12 March
    found = predict_run(run, tmp_path / "new.csv", note=lambda _: None, device="cpu")
    assert [row["date"] for row in found] == ["2024-03-13", "2024-03-14"]


def test_a_field_is_carried_as_the_input_has_it(tmp_path: Path) -> None:
    rows = [{"review": "ab" * (1 + place % 3), "stars": place % 2, "text": f"note {place}"} for place in range(20)]
    named = {"train": str(lines(tmp_path / "train.jsonl", rows)), "text": "review", "label": "stars"}
    run = learn(tmp_path, "classification", named, train={"epochs": 1})
    given = lines(tmp_path / "new.jsonl", rows[:2])
    assert [row["text"] for row in predict_run(run, given, keep=["text"], device="cpu")] == ["note 0", "note 1"]
    only = lines(tmp_path / "only.jsonl", [{"review": "ab"}])
    with pytest.raises(UserError, match=r"has no field text \(fields: review\)"):
        predict_run(run, only, keep=["text"], device="cpu")
