"""Rows in, rows out: blocks of bounded size, carried fields, and what is written of them."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import carrywave as cw
from carrywave.data.codec import Codec
from carrywave.data.files.rows import json_rows
from carrywave.data.files.source import find
from carrywave.errors import DataError, UserError
from carrywave.prediction import prompts
from carrywave.prediction.blocks import KeptColumns, read_blocks
from carrywave.prediction.evaluate import evaluate_run
from carrywave.prediction.predict import predict_run
from carrywave.prediction.row_writer import RowWriter, flattened, writing
from carrywave.prediction.standard_input import Stream, kept_in_a_file

CODEC = Codec("classification", "steps", columns=("0",), mean=(0.0,), std=(1.0,), labels=("a", "b"))


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_blocks_hold_every_row_once_and_no_more_than_they_may(tmp_path: Path) -> None:
    lengths = [3, 1, 1, 9, 2, 2, 2, 2]
    rows = [{"steps": [float(number)] * length, "id": number, "other": "x" * 99} for number, length in enumerate(lengths)]
    source = json_rows(find(str(jsonl(tmp_path / "in.jsonl", rows)), field="data"))
    found = list(read_blocks(source, CODEC, KeptColumns.of(["id=key"], "classification"), most_rows=3, most_elements=5))
    assert [block.data.lengths.tolist() for block in found] == [[3, 1, 1], [9], [2, 2], [2, 2]]
    assert [row for block in found for row in block.carried] == [{"key": number} for number in range(8)]
    values = np.concatenate([block.data.inputs[:, 0] for block in found])
    assert values.tolist() == np.repeat(np.arange(8.0), lengths).tolist()


def test_a_carried_field_that_a_row_lacks_is_told(tmp_path: Path) -> None:
    source = json_rows(find(str(jsonl(tmp_path / "in.jsonl", [{"steps": [1.0], "id": 1}, {"steps": [2.0]}])), field="data"))
    with pytest.raises(DataError, match=r"in.jsonl:2 has no field id \(fields: steps\); name one that every row has"):
        list(read_blocks(source, CODEC, KeptColumns.of(["id"], "classification")))
    (tmp_path / "none.jsonl").write_text("\n")
    with pytest.raises(DataError, match="is empty"):
        list(read_blocks(json_rows(find(str(tmp_path / "none.jsonl"), field="data")), CODEC, KeptColumns()))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["label"], "label: predictions have a field label of their own; choose another name, as in label=given_label"),
        (["id", "row=id"], "names id twice"),
        (["=x"], "has an empty name"),
    ],
)
def test_carried_fields_that_cannot_be(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        KeptColumns.of(words, "classification")
    with pytest.raises(UserError, match="is for rows, but predictions for series have"):
        KeptColumns.of(words[:1], "forecasting")


def test_a_csv_has_a_column_for_each_class() -> None:
    row = {"id": "007", "label": "a", "probabilities": {"a": 0.75, "b c": 0.25}, "more": [1, 2]}
    text: list[str] = []
    RowWriter(text.append, ".csv").add([row, row])
    assert "".join(text) == 'id,label,probability_a,probability_b c,more\n007,a,0.75,0.25,"[1, 2]"\n007,a,0.75,0.25,"[1, 2]"\n'
    with pytest.raises(UserError, match="named probability_a"):
        flattened({"probability_a": 1, **row})


def test_parquet_has_the_columns_of_csv_and_lists_as_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carrywave.prediction.row_writer.GROUP_ROWS", 2)
    row = {"label": 7, "probabilities": {"7": 0.5, "8": 0.5}, "odd": None}
    rows = [{"id": f"00{place}", **row, "tags": ["x"] * place} for place in range(5)]
    rows[4]["id"] = "\ud800"  # which UTF-8 cannot hold
    with writing(tmp_path / "out.parquet") as writer:
        writer.add(rows[:3])
        writer.add(rows[3:])
    assert writer.rows == 5
    found = pq.read_table(tmp_path / "out.parquet")
    assert found.column_names == ["id", "label", "probability_7", "probability_8", "odd", "tags"]
    assert found["id"].to_pylist() == ["000", "001", "002", "003", "\\ud800"]
    assert found["tags"].to_pylist() == [["x"] * place for place in range(5)]
    assert pq.ParquetFile(tmp_path / "out.parquet").num_row_groups == 3


def test_lists_that_begin_empty_hold_text_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carrywave.prediction.row_writer.GROUP_ROWS", 1)
    rows: list[dict[str, Any]] = [{"label": [], "labels": [[], []]}, {"label": ["a"], "labels": [["a"], []]}]
    with writing(tmp_path / "out.parquet") as writer:
        writer.add(rows)
    assert pq.read_table(tmp_path / "out.parquet").to_pylist() == rows


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"id": 1}, {"id": "a"}], "the values of id up to row 2 are not of one kind; write JSON Lines"),
        ([{"id": 1}, {"id": 2}, {"id": "a"}], "the values of id up to row 3 are not int64, as in the rows before"),
        ([{"id": 1}, {"id": 2}, {"id": 3, "more": 1}], "row 3 has a column more, which earlier rows have not"),
    ],
)
def test_rows_that_parquet_cannot_hold_leave_no_file(
    rows: list[dict[str, Any]], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carrywave.prediction.row_writer.GROUP_ROWS", 2)
    with pytest.raises(UserError, match=message), writing(tmp_path / "out.parquet") as writer:
        writer.add(rows)
    assert not list(tmp_path.iterdir())


def test_predictions_in_parquet_are_those_in_json(run: Path, tmp_path: Path) -> None:
    given = jsonl(tmp_path / "in.jsonl", texts(9))
    predict_run(run, given, tmp_path / "out.parquet", keep=["id"], device="cpu")
    expected = [flattened(row) for row in cw.predict(run, given, keep=["id"], device="cpu")]
    assert pq.read_table(tmp_path / "out.parquet").to_pylist() == expected


def test_a_writer_whose_reader_is_gone_writes_no_more() -> None:
    calls: list[str] = []

    def write(text: str) -> None:
        calls.append(text)
        raise BrokenPipeError

    writer = RowWriter(write, "")
    for _ in range(2):
        writer.add([{"a": 1}])
    assert (writer.gone, calls) == (True, ['{"a": 1}\n'])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of texts."""
    folder = tmp_path_factory.mktemp("texts")
    rows = [{"text": word * (1 + number % 3), "label": word} for number in range(12) for word in ("ab", "cd", "ef")]
    path = jsonl(folder / "train.jsonl", rows)
    how: dict[str, Any] = {"batch": {"tokens": 32}, "train": {"epochs": 1, "lr": 0.05}, "device": "cpu", "run": folder / "run"}
    cw.fit({"hidden": 6, "layers": 1}, path, task="classification", data={"tokens": "char"}, **how)
    return folder / "run"


def texts(number: int) -> list[dict[str, Any]]:
    return [{"text": ["ab", "cdcd", "efef", "abababab"][place % 4], "id": f"{place:03}", "label": "ab"} for place in range(number)]


def test_small_blocks_predict_what_one_does(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = jsonl(tmp_path / "in.jsonl", texts(23))
    whole = cw.predict(run, given, keep=["id", "label=truth"], device="cpu")
    assert [row["id"] for row in whole] == [f"{place:03}" for place in range(23)]
    assert list(whole[0]) == ["id", "truth", "label", "probability", "probabilities"]
    monkeypatch.setattr(read_blocks, "__kwdefaults__", {"most_rows": 5, "most_elements": 11})
    parts = cw.predict(run, given, keep=["id", "label=truth"], device="cpu")
    for found, wanted in zip(parts, whole, strict=True):
        # float32, in batches of other sizes.
        assert found.pop("probabilities") == pytest.approx(wanted.pop("probabilities"), abs=2e-6)
        assert found.pop("probability") == pytest.approx(wanted.pop("probability"), abs=2e-6)
        assert found == wanted


def piped(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(data))))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "text", "parquet"])
def test_standard_input_is_read_as_a_file_is(
    kind: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import pandas as pd

    frame = pd.DataFrame(texts(9))
    file = tmp_path / f"in.{'txt' if kind == 'text' else kind}"
    match kind:
        case "jsonl":
            jsonl(file, texts(9))
        case "csv":
            frame.to_csv(file, index=False)
        case "text":
            file.write_text("\n".join(frame.text) + "\n")
        case "parquet":
            frame.to_parquet(file)
    how: dict[str, Any] = {"device": "cpu", "keep": () if kind == "text" else ("id",)}
    wanted = cw.predict(run, file, **how)
    piped(monkeypatch, file.read_bytes())
    # JSON and Parquet are known by their first bytes.
    asked = {"format": kind} if kind in ("csv", "text") else {}
    assert predict_run(run, "-", None, **how, **asked) == 9
    printed = capsys.readouterr()
    assert printed.err == ""
    assert [json.loads(line) for line in printed.out.splitlines()] == wanted
    assert kind == "text" or [row["id"] for row in wanted] == [f"{place:03}" for place in range(9)]


def test_standard_input_that_is_closed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(DataError, match="standard input is closed; open it, or pass a file instead of -"):
        predict_run(run, "-", device="cpu")


def test_nothing_is_left_of_a_file_with_a_bad_row(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_blocks, "__kwdefaults__", {"most_rows": 2, "most_elements": 99})
    given = jsonl(tmp_path / "in.jsonl", [*texts(7), {"text": 3}])
    (tmp_path / "out").mkdir()
    with pytest.raises(DataError, match=r"in.jsonl:8: text is"):
        predict_run(run, given, tmp_path / "out" / "rows.csv", device="cpu")
    assert list((tmp_path / "out").iterdir()) == []


def test_evaluation_tells_of_the_likeliest_and_of_the_confusion(run: Path, tmp_path: Path) -> None:
    given = jsonl(tmp_path / "in.jsonl", texts(8))
    rows = cw.predict(run, given, device="cpu")
    judged = evaluate_run(run, given, "cpu", top=(1, 2, 3), confusion=True)
    assert judged["top_1_accuracy"] == judged["accuracy"] == sum(row["label"] == "ab" for row in rows) / 8
    ranked = [sorted(row["probabilities"], key=row["probabilities"].get, reverse=True) for row in rows]
    assert judged["top_2_accuracy"] == sum("ab" in names[:2] for names in ranked) / 8
    assert judged["top_3_accuracy"] == 1.0
    counts = [sum(row["label"] == name for row in rows) for name in ("ab", "cd", "ef")]
    assert judged["confusion"] == {"labels": ["ab", "cd", "ef"], "counts": [counts, [0, 0, 0], [0, 0, 0]]}
    assert "confusion" not in evaluate_run(run, given, "cpu")
    with pytest.raises(UserError, match=r"top=... 4 is not between 1 and 3, the number of classes; change it"):
        evaluate_run(run, given, "cpu", top=[4])


def test_prompts_in_small_blocks_are_continued_as_in_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text("abcdefgh\n" * 40)
    how: dict[str, Any] = {"batch": {"lanes": 4, "steps": 20}, "train": {"epochs": 1}, "device": "cpu", "run": tmp_path / "run"}
    cw.fit({"hidden": 6, "layers": 1}, tmp_path / "text.txt", task="language", **how)
    given = jsonl(tmp_path / "in.jsonl", [{"text": "abcdefgh"[number % 5 :], "id": number} for number in range(11)])
    asked: dict[str, Any] = {"tokens": 12, "top_k": 4, "top_p": 0.9, "seed": 5, "keep": "id", "device": "cpu"}
    whole = cw.predict(tmp_path / "run", given, **asked)
    assert [row["id"] for row in whole] == list(range(11))
    assert len({row["continuation"] for row in whole}) > 5  # each prompt has its own draws
    monkeypatch.setattr(prompts, "MOST_PROMPTS", 4)
    monkeypatch.setattr(prompts, "MOST_STEPS", 20)
    assert cw.predict(tmp_path / "run", given, **asked) == whole
    greedy, restricted = (
        cw.predict(tmp_path / "run", prompt="ab", tokens=9, device="cpu", **each) for each in ({"temperature": 0.0}, {"top_k": 1})
    )
    assert greedy == restricted


def test_standard_input_that_is_kept_in_a_file_has_its_own_name() -> None:
    stream = Stream("standard input", None, "csv", stream=io.BytesIO(b"text\nab\n"))
    with kept_in_a_file(stream) as path:
        source = find(str(path), field="data")
        assert (source.name, source.format) == ("standard input", "csv")
        assert b"".join(source.blocks()) == b"text\nab\n"


def test_a_row_without_a_text_has_an_empty_answer_at_its_place(tmp_path: Path) -> None:
    """Tables of messages have empty cells; their predictions are put beside them row by row."""
    rows = [{"text": text, "label": label} for text, label in [("good film", "yes"), ("bad film", "no")] * 4]
    result = cw.fit({"hidden": 4, "layers": 1}, rows, task="classification", train={"epochs": 1}, run=tmp_path / "run", progress=False)
    told: list[str] = []
    (tmp_path / "in.csv").write_text("id,text\n7,good\n8,\n9,bad 😀\n")
    found = cw.predict(result.run, tmp_path / "in.csv", keep=["id"], note=told.append)
    assert [row["id"] for row in found] == ["7", "8", "9"]
    assert found[1] == {"id": "8", "label": None, "probability": None, "probabilities": {"no": None, "yes": None}}
    assert {found[0]["label"], found[2]["label"]} <= {"yes", "no"}
    assert told == [
        "the input: 1 row without a text or a label is left out",
        "the input: 1 of 3 tokens is unknown to the vocabulary, and read as <unk>",
    ]
    assert cw.predict(result.run, [{"text": ""}], note=told.append)[0]["label"] is None
