"""Predictions of trained runs: in the file's order and units, whatever way the data was given, batched or written."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

import carrywave as cw
from _zoo import Row, Zoo, days, write
from carrywave.errors import DataError, UserError
from carrywave.prediction import blocks, generation
from carrywave.prediction.predict import predict_run
from carrywave.prediction.row_writer import RowWriter, flattened, writing


def without(rows: list[Row], *names: str) -> list[Row]:
    return [{name: value for name, value in row.items() if name not in names} for row in rows]


def labels_are_right(rows: list[Row], truth: list[Row]) -> None:
    assert [row["label"] for row in rows] == [row["label"] for row in truth]
    assert all(sum(row["probabilities"].values()) == pytest.approx(1.0, abs=1e-5) for row in rows)


def tags_are_right(rows: list[Row], truth: list[Row]) -> None:
    assert [row["labels"] for row in rows] == [row["labels"] for row in truth]


def spans_fit(rows: list[Row], truth: list[Row]) -> None:
    assert [len(row["labels"]) for row in rows] == [len(row["labels"]) for row in truth]
    assert all(after == "I-x" for row in rows for before, after in zip(row["labels"], row["labels"][1:], strict=False) if before == "B-x")


def numbers_are_near(rows: list[Row], truth: list[Row]) -> None:
    # The label moves by some 25 around 1000; what is learned is far closer than that.
    assert np.mean([abs(got["label"][0] - want["label"][0]) for got, want in zip(rows, truth, strict=True)]) < 10.0
    assert all(got["label"][1] == pytest.approx(3.0, abs=0.5) for got in rows)


def labels_reach_the_threshold(rows: list[Row], truth: list[Row]) -> None:
    for row in rows:
        assert row["label"] == [name for name, share in row["probabilities"].items() if share >= 0.5]
    assert np.mean([row["label"] == want["label"] for row, want in zip(rows, truth, strict=True)]) > 0.6


def transcripts_are_probable(rows: list[Row], truth: list[Row]) -> None:
    assert all(set(row["labels"]) <= set("xyz") and 0 <= row["probability"] <= 1 for row in rows)


KINDS: dict[str, Callable[[list[Row], list[Row]], None]] = {
    "labels": labels_are_right,
    "tags": tags_are_right,
    "streamed tags": tags_are_right,
    "spans": spans_fit,
    "numbers": numbers_are_near,
    "several": labels_reach_the_threshold,
    "spoken": transcripts_are_probable,
}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_come_in_the_order_of_the_file(zoo: Zoo, tmp_path: Path, kind: str) -> None:
    truth = zoo.rows(kind)
    given = write(tmp_path / "given.jsonl", without(truth, "label", "labels"))
    rows = cw.predict(zoo(kind), given, device="cpu")
    KINDS[kind](rows, truth)
    assert cw.predict(zoo(kind), without(truth, "label", "labels"), device="cpu") == rows  # from Python as from a file
    assert predict_run(zoo(kind), given, tmp_path / "out.jsonl", device="cpu") == len(truth)
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == rows


def test_a_beam_finds_what_is_at_least_as_probable(zoo: Zoo) -> None:
    rows = without(zoo.rows("spoken"), "labels")
    best, searched = (cw.predict(zoo("spoken"), rows, beam=beam, device="cpu") for beam in (None, 8))
    assert all(wide["probability"] >= narrow["probability"] - 1e-6 for narrow, wide in zip(best, searched, strict=True))


@pytest.mark.parametrize("labels", [(3, 7), (False, True), ("3", "7")])
def test_labels_come_back_as_they_were_given(tmp_path: Path, labels: tuple[Any, Any]) -> None:
    rows = [{"steps": [[float(number % 2)]] * 3, "label": labels[number % 2]} for number in range(20)]
    how: dict[str, Any] = {"batch": {"tokens": 16}, "train": {"epochs": 8, "lr": 0.05}, "device": "cpu", "run": tmp_path / "run"}
    run = cw.fit({"hidden": 10, "layers": 1}, rows, task="classification", **how).run
    assert [row["label"] for row in cw.predict(run, rows, device="cpu")] == [row["label"] for row in rows]


def test_nothing_to_predict_for_is_nothing(zoo: Zoo) -> None:
    assert cw.predict(zoo("labels"), []) == cw.predict(zoo("text"), []) == cw.predict(zoo("labels"), np.zeros((0, 3, 2))) == []


def test_a_row_without_a_text_has_an_empty_answer_at_its_place(zoo: Zoo, tmp_path: Path) -> None:
    """Tables of messages have empty cells; their predictions are put beside them row by row."""
    told: list[str] = []
    (tmp_path / "in.csv").write_text("id,text\n07,ab\n8,\n9,ab😀\n")
    found = cw.predict(zoo("texts"), tmp_path / "in.csv", keep=["id"], note=told.append)
    assert [row["id"] for row in found] == ["07", "8", "9"]
    assert found[1] == {"id": "8", "label": None, "probability": None, "probabilities": {"a": None, "c": None, "e": None}}
    assert ["1 row without a text" in told[0], "1 of 5 tokens" in told[1]] == [True, True]
    assert cw.predict(zoo("texts"), [{"text": ""}], note=told.append)[0]["label"] is None


# Language.


def test_the_likeliest_continuation_is_what_was_learned(zoo: Zoo, tmp_path: Path) -> None:
    how: dict[str, Any] = {"tokens": 15, "temperature": 0.0, "device": "cpu"}
    [row] = cw.predict(zoo("text"), prompt="abc", **how)
    assert row == {"prompt": "abc", "continuation": "defgh\nabcdefgh\n", "text": "abcdefgh\nabcdefgh\n"}
    assert cw.predict(zoo("text"), prompt="abc", tokens=15, top_k=1) == [row]
    # Prompts do not see each other, and come from files, lists and frames.
    prompts = ["abcdefgh\nab", "c", "fg"]
    alone = [cw.predict(zoo("text"), prompt=prompt, **how)[0] for prompt in prompts]
    file = write(tmp_path / "in.jsonl", [{"text": prompts[0]}, {"text": prompts[1]}, {"prompt": prompts[2]}])
    for given in (file, prompts, pd.DataFrame({"text": prompts})):
        assert cw.predict(zoo("text"), given, **how) == alone
    # An empty prompt starts like a line.
    unprompted, after_a_line = (cw.predict(zoo("text"), prompt=prompt, **how)[0] for prompt in (None, "\n"))
    assert unprompted["text"] == unprompted["continuation"] == after_a_line["continuation"]


def test_draws_are_keyed_by_seed_and_prompt_whatever_the_blocks(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = write(tmp_path / "in.jsonl", [{"text": "abcdefgh"[number % 5 :], "id": number} for number in range(11)])
    asked: dict[str, Any] = {"tokens": 12, "temperature": 3.0, "top_k": 6, "top_p": 0.9, "keep": "id", "device": "cpu"}
    whole, other = (cw.predict(zoo("text"), given, seed=seed, **asked) for seed in (5, 6))
    assert whole != other
    assert [row["id"] for row in whole] == list(range(11))
    assert len({row["continuation"] for row in whole}) > 5  # each prompt has its own draws
    monkeypatch.setattr(generation, "MOST_PROMPTS", 4)
    monkeypatch.setattr(generation, "MOST_STEPS", 20)
    assert cw.predict(zoo("text"), given, seed=5, **asked) == whole


# Tables and series.


def test_forecasts_go_on_from_the_last_row_of_each_series(zoo: Zoo, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = days(tmp_path / "b.csv", 60, ("large", "new", "small"))
    assert predict_run(zoo("series"), given, tmp_path / "out.csv", device="cpu") == 21
    assert "series new is not in the training data; the scale is computed from the rows given here" in capsys.readouterr().err
    with (tmp_path / "out.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["ds"] for row in rows[:2]] == ["2024-03-01", "2024-03-02"]
    assert [row["step"] for row in rows[:7]] == list("1234567")
    assert all(float(row["y-q0.1"]) <= float(row["y-q0.5"]) <= float(row["y-q0.9"]) for row in rows)
    for name, level, swing in (("small", 3.0, 0.5), ("large", 3000.0, 400.0), ("new", 50.0, 5.0)):
        found = [float(row["y-q0.5"]) for row in rows if row["unique_id"] == name]
        truth = [level + swing * np.sin(day * np.pi / 3.5) for day in range(60, 67)]
        # Each within a part of its own swing: one scale for all would leave the small one lost.
        assert found == pytest.approx(truth, abs=0.3 * swing), name
    with pytest.warns(UserWarning, match=r"less than a season \(7 rows\) before the first step"):
        cw.predict(zoo("series"), days(tmp_path / "short.csv", 5), device="cpu")


def test_every_step_has_its_numbers(zoo: Zoo) -> None:
    given = zoo.rows("each step", 2)
    rows = cw.predict(zoo("each step"), without(given, "labels"), device="cpu")
    assert [row["step"] for row in rows] == [*range(1, 10)] * 2


def forecast(data: Any, run: Path, **options: Any) -> Path:
    how: dict[str, Any] = {"batch": {"lanes": 2, "steps": 8}, "train": {"max_steps": 2}, "device": "cpu", "run": run}
    return Path(cw.fit({"hidden": 4, "layers": 1}, data, task="forecasting", data={"horizon": 2, **options}, **how).run)


def test_series_keep_their_names_and_arrays_their_places(tmp_path: Path) -> None:
    dates = np.arange("2024-01-01", "2024-03-01", dtype="datetime64[D]")
    frame = pd.DataFrame({"store": np.repeat([7, 11], len(dates)), "date": np.tile(dates, 2), "y": np.arange(2.0 * len(dates))})
    run = forecast(frame, tmp_path / "stores", series="store", share=0.2)
    whole, fractions = (cw.predict(run, frame.astype({"store": kind}), device="cpu") for kind in (int, float))
    assert [row["store"] for row in whole] == [7, 7, 11, 11]
    assert [row["y"] for row in fractions] == [row["y"] for row in whole]
    waves = [np.sin(np.arange(40.0) / speed)[:, None] for speed in (2, 3)]
    run = forecast(waves, tmp_path / "waves", share=0)
    quiet: dict[str, Any] = {"device": "cpu", "note": lambda _: None}
    assert [(row["series"], row["step"]) for row in cw.predict(run, waves, **quiet)] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert all(row.keys() == {"step", "0"} for row in cw.predict(run, waves[0], **quiet))


def test_several_series_are_not_forecast_by_a_run_of_one(tmp_path: Path) -> None:
    dates = pd.date_range("2024-01-01", periods=40)
    run = forecast(pd.DataFrame({"ds": dates, "y": np.arange(40.0)}), tmp_path / "run")
    both = pd.concat([pd.DataFrame({"unique_id": name, "ds": dates, "y": np.arange(40.0)}) for name in "ab"])
    with pytest.raises(DataError, match="no column tells the series apart"):
        cw.predict(run, both, device="cpu")


@pytest.mark.parametrize("several", [False, True])
def test_the_unit_of_a_series_does_not_change_its_forecast(tmp_path: Path, several: bool) -> None:
    waves, found = np.sin(np.arange(60) / 3) + np.random.default_rng(5).normal(size=60) / 9, []
    for unit in (1.0, 2.0**-37, 2.0**-66):  # 1, about 1e-11 and 1e-20: powers of two round nothing
        series = waves * unit
        run = forecast([series[:, None], -2 * series[:, None]] if several else series, tmp_path / str(unit))
        found.append([row["0"] / unit for row in cw.predict(run, series, device="cpu", note=lambda _: None)])
    assert found[0] == found[1] == found[2]


def test_a_small_change_of_large_numbers_is_learned_and_comes_back(tmp_path: Path) -> None:
    draw, runs = np.random.default_rng(5), []
    steps = [draw.normal(size=(4, 1)) for _ in range(24)]
    small = [float(step.mean()) * 1e-4 for step in steps]
    for offset, unit in ((1e9, 1.0), (0.0, 1e-20)):
        how: dict[str, Any] = {"task": "regression", "train": {"max_steps": 3}, "device": "cpu", "run": tmp_path / str(offset)}
        cw.fit({"hidden": 4, "layers": 1}, (steps, [offset + value * unit for value in small]), **how)
        runs.append((np.array([row["label"] for row in cw.predict(how["run"], steps, device="cpu")]) - offset) / unit)
    # Float64 has steps of 1e-7 at 1e9, and targets are some 1e-4.
    np.testing.assert_allclose(runs[0], runs[1], atol=1e-6)
    assert runs[0].std() > 0


def test_named_columns_are_read_from_frames_and_plain_texts(tmp_path: Path) -> None:
    frame = pd.DataFrame({"review": ["ab", "ba"] * 10, "stars": [5, 1] * 10, "text": [f"note {place}" for place in range(20)]})
    how: dict[str, Any] = {"task": "classification", "train": {"epochs": 1}, "device": "cpu", "run": tmp_path / "run"}
    run = cw.fit({"hidden": 4, "layers": 1}, frame, data={"text": "review", "label": "stars"}, **how).run
    expected = cw.predict(run, frame[["review"]], device="cpu")
    assert cw.predict(run, ["ab", "ba"] * 10, device="cpu") == expected
    given = write(tmp_path / "given.jsonl", frame.to_dict("records"))
    # A field is carried as the input has it.
    assert cw.predict(run, given, keep="text=said", device="cpu")[3] == {"said": "note 3", **expected[3]}
    with pytest.raises(DataError, match=r"data item 0 has no column 'review', which the training data has"):
        cw.predict(run, pd.DataFrame({"text": ["ab"]}), device="cpu")


def test_the_order_of_dates_is_that_of_training_where_a_file_does_not_tell(tmp_path: Path) -> None:
    dates = pd.date_range("2024-01-01", periods=80).strftime("%d/%m/%Y")
    frame = pd.DataFrame({"date": dates, "y": np.arange(80.0)})
    run = forecast(frame, tmp_path / "run")
    frame[60:72].to_csv(tmp_path / "new.csv", index=False)  # 1 to 12 March
    found = cw.predict(run, tmp_path / "new.csv", note=lambda _: None, device="cpu")
    assert [row["date"] for row in found] == ["2024-03-13", "2024-03-14"]


# Blocks, columns that are carried, standard input, and what is written.


def test_small_blocks_predict_what_one_does(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    given, made = zoo.rows("texts", 23), list[int]()
    how: dict[str, Any] = {"keep": ["id", "label=truth"], "device": "cpu"}
    whole = cw.predict(zoo("texts"), given, **how)
    assert [row["id"] for row in whole] == [f"{place:03}" for place in range(23)]
    assert list(whole[0]) == ["id", "truth", "label", "probability", "probabilities"]

    def cut(rows: Any, size: Any) -> Any:
        for block in blocks_cut(rows, size, 5, 11):
            assert len(block) <= 5
            assert max(size(row) for _, row in block) * len(block) <= 11
            made.append(len(block))
            yield block

    blocks_cut = blocks.cut
    monkeypatch.setattr(blocks, "cut", cut)
    parts = cw.predict(zoo("texts"), given, **how)
    assert sum(made) == 23
    assert len(made) > 5
    for found, wanted in zip(parts, whole, strict=True):
        # float32, in batches of other sizes.
        assert found.pop("probabilities") == pytest.approx(wanted.pop("probabilities"), abs=2e-6)
        assert found.pop("probability") == pytest.approx(wanted.pop("probability"), abs=2e-6)
        assert found == wanted


@pytest.mark.parametrize(
    ("kind", "words", "message"),
    [
        ("labels", ["label"], "label: predictions have a field label of their own; choose another name, as in label=given_label"),
        ("labels", ["=x"], "has an empty name"),
        ("labels", ["nothing"], r"has no field nothing \(fields: steps, label, id\); name one that every row has"),
        ("series", ["ds"], "is for rows, but predictions for series have"),
    ],
)
def test_columns_that_cannot_be_carried(zoo: Zoo, kind: str, words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        cw.predict(zoo(kind), zoo.data(kind), keep=words, device="cpu")


@pytest.mark.parametrize("kind", ["jsonl", "csv", "txt", "parquet"])
def test_standard_input_is_read_as_a_file_is(
    kind: str, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = without(zoo.rows("texts", 9), "label")
    frame, file = pd.DataFrame(rows), tmp_path / f"in.{kind}"
    match kind:
        case "jsonl":
            write(file, rows)
        case "csv":
            frame.to_csv(file, index=False)
        case "txt":
            file.write_text("\n".join(frame.text) + "\n")
        case "parquet":
            frame.to_parquet(file)
    how: dict[str, Any] = {"device": "cpu", "keep": () if kind == "txt" else ("id",)}
    wanted = cw.predict(zoo("texts"), file, **how)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(file.read_bytes()))))  # type: ignore[arg-type]
    # JSON and Parquet are known by their first bytes.
    asked = {"csv": {"format": "csv"}, "txt": {"format": "text"}}.get(kind, {})
    assert predict_run(zoo("texts"), "-", None, **how, **asked) == 9
    printed = capsys.readouterr()
    assert printed.err == ""
    assert [json.loads(line) for line in printed.out.splitlines()] == wanted


def test_predictions_in_csv_and_parquet_are_those_in_json(zoo: Zoo, tmp_path: Path) -> None:
    given, how = zoo.rows("texts", 9), {"keep": ["id"], "device": "cpu"}
    for name in ("out.parquet", "out.csv"):
        predict_run(zoo("texts"), write(tmp_path / "in.jsonl", given), tmp_path / name, **how)  # type: ignore[arg-type]
    rows = cw.predict(zoo("texts"), given, **how)  # type: ignore[arg-type]
    assert pq.read_table(tmp_path / "out.parquet").to_pylist() == [flattened(row) for row in rows]
    with (tmp_path / "out.csv").open() as file:
        assert [row["id"] for row in csv.DictReader(file)] == [row["id"] for row in rows]
    text: list[str] = []
    row = {"id": "007", "label": "a", "probabilities": {"a": 0.75, "b c": 0.25}, "more": [1, 2]}
    RowWriter(text.append, ".csv").add([row])
    assert "".join(text) == 'id,label,probability_a,probability_b c,more\n007,a,0.75,0.25,"[1, 2]"\n'
    with pytest.raises(UserError, match="a column is not of one kind"), writing(tmp_path / "odd.parquet") as writer:
        writer.add([{"id": 1}, {"id": "a"}])
    with pytest.raises(UserError, match=r"not as \.xlsx; use .* \.parquet"):
        predict_run(zoo("texts"), tmp_path / "in.jsonl", tmp_path / "out.xlsx")
    assert not (tmp_path / "odd.parquet").exists()


def test_nothing_is_left_of_a_file_with_a_bad_row(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks_cut = blocks.cut
    monkeypatch.setattr(blocks, "cut", lambda rows, size: blocks_cut(rows, size, 2))
    given = write(tmp_path / "in.jsonl", [*zoo.rows("texts", 7), {"text": 3}])
    (tmp_path / "out").mkdir()
    with pytest.raises(DataError, match=r"in.jsonl:8: text is"):
        predict_run(zoo("texts"), given, tmp_path / "out" / "rows.csv", device="cpu")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_writer_whose_reader_is_gone_writes_no_more() -> None:
    calls: list[str] = []

    def write_once(text: str) -> None:
        calls.append(text)
        raise BrokenPipeError

    writer = RowWriter(write_once)
    for _ in range(2):
        writer.add([{"a": 1}])
    assert (writer.gone, calls) == (True, ['{"a": 1}\n'])


@pytest.mark.parametrize("both_ways", [False, True])
def test_sequences_that_begin_inside_a_row_are_predicted_as_if_they_were_alone(tmp_path: Path, both_ways: bool) -> None:
    draw = np.random.default_rng(3)
    rows = [{"steps": draw.normal(size=(9, 2)).tolist(), "resets": [step in (4, 7) for step in range(9)]} for _ in range(12)]
    tags = [["up" if total > 0 else "down" for total in np.cumsum(row["steps"], axis=0)[:, 0]] for row in rows]
    given = [row | {"labels": own} for row, own in zip(rows, tags, strict=True)]
    how: dict[str, Any] = {"task": "tagging", "batch": {"tokens": 64}, "train": {"epochs": 10, "lr": 0.05}, "run": tmp_path / "run"}
    run = cw.fit({"hidden": 10, "layers": 1, "bidirectional": both_ways}, given, device="cpu", **how).run
    parts = [{"steps": row["steps"][low:high]} for row in rows for low, high in ((0, 4), (4, 7), (7, 9))]
    alone, inside, joined = (
        [label for row in cw.predict(run, some, device="cpu") for label in row["labels"]] for some in (parts, rows, without(rows, "resets"))
    )
    assert inside == alone
    assert joined != alone  # it is not for nothing
