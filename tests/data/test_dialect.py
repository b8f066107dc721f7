"""CSV files as they are written elsewhere: separators, decimal commas and encodings, and the names of columns of text and labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest

from carrywave.data.prepare import Prepared, prepare
from carrywave.data.python_inputs import from_python
from carrywave.errors import DataError, SpecError
from carrywave.spec.load import parse
from carrywave.spec.spec import Spec

GERMAN = "Datum;Straße;Wert\n2024-01-01;Köln;1,5\n2024-01-02;Köln;-22,25\n2024-01-03;Köln;3\n"


def spec(folder: Path, file: str, task: str = "forecasting", **data: Any) -> Spec:
    values = {
        **({"horizon": 1} if task == "forecasting" else {}),
        "cache": str(folder / "cache"),
        "train": str(folder / file),
        "standardize": False,
        "share": 0,
        **data,
    }
    return parse({"task": task, "data": values})


def read(folder: Path, content: str | bytes, file: str = "t.csv", task: str = "forecasting", **data: Any) -> Prepared:
    (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    return prepare(spec(folder, file, task, **data))


def values(found: Prepared) -> list[list[float]]:
    rows: list[list[float]] = np.asarray(found.train.inputs).tolist()
    return rows


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32", "latin-1", "cp1252"])
def test_separators_decimal_commas_and_encodings_as_pandas_reads_them(tmp_path: Path, encoding: str) -> None:
    asked = {} if encoding.startswith("utf") else {"encoding": encoding}
    found = read(tmp_path, GERMAN.encode(encoding), **asked)
    frame = pd.read_csv(tmp_path / "t.csv", sep=";", decimal=",", encoding=encoding)
    assert values(found) == frame[["Wert"]].to_numpy().tolist()
    said = " ".join(found.notes)
    assert "columns are separated by `;`" in said
    assert "decimals have a comma (Wert)" in said
    assert ("reading text in utf-" in said) == (encoding in ("utf-16", "utf-32"))
    assert "Straße (text)" in said


@pytest.mark.parametrize("asked", ["auto", ","])
def test_na_is_an_empty_cell_whatever_the_decimals_are(tmp_path: Path, asked: str) -> None:
    text = "Datum;Wert\n2024-01-01;1,5\n2024-01-02;NA\n2024-01-03;NaN\n2024-01-04;n/a\n2024-01-05;3,25\n"
    found = read(tmp_path, text, decimal=asked, missing="forward")
    assert values(found) == [[1.5], [1.5], [1.5], [1.5], [3.25]]
    assert "3 empty cells are filled" in " ".join(found.notes)
    with pytest.raises(DataError, match="row 2, column Wert is empty or NaN"):
        read(tmp_path, text, decimal=asked)


@pytest.mark.parametrize("digits", [0, 6, 9])
def test_times_with_an_offset_are_local(tmp_path: Path, digits: int) -> None:
    fraction = f".{'0' * digits}" if digits else ""
    rows = "".join(f"2024-01-01 {hour:02d}:00:00{fraction}+02:00,{hour}\n" for hour in range(20))
    found = read(tmp_path, f"date,y\n{rows}", calendar=["hour"])
    np.testing.assert_allclose(np.asarray(found.train.inputs)[:, 1], np.sin(2 * np.pi * np.arange(20) / 24), atol=1e-6)  # float32
    with pytest.raises(DataError, match="row 21, column date is empty; fill in the time of every row"):
        read(tmp_path, f"date,y\n{rows},20\n")


def test_asked_for_is_not_told(tmp_path: Path) -> None:
    found = read(tmp_path, GERMAN, separator=";", decimal=",")
    assert values(found) == [[1.5], [-22.25], [3.0]]
    assert len(found.notes) == 1


@pytest.mark.parametrize(("mark", "asked"), [("\t", None), ("\t", "tab"), ("|", None), ("^", "^")])
def test_other_separators(tmp_path: Path, mark: str, asked: str | None) -> None:
    text = "date,a,b\n2024-01-01,1.5,2\n2024-01-02,2.5,3\n".replace(",", mark)
    assert values(read(tmp_path, text, separator=asked, channels="joint")) == [[1.5, 2], [2.5, 3]]


def test_separators_within_quotes_do_not_count(tmp_path: Path) -> None:
    text = 'date,"a;b;c;d",note\n2024-01-01,1,"x;y;z;u"\n2024-01-02,2,"x\n;y"\n'
    assert read(tmp_path, text).codec.columns == ("a;b;c;d",)


@pytest.mark.parametrize(
    ("text", "data", "message"),
    [
        ("date;a\n2024-01-01;1,234\n2024-01-02;5,678\n", {}, "column a contains '1,234', whose comma may stand before decimals"),
        ("date;a;b\n2024-01-01;1,5;1.234\n", {}, "column a has commas before its decimals, but column b has points; write both alike"),
        ("date;a\n2024-01-01;1,5\n2024-01-02;1.500\n2024-01-03;2,5\n", {}, "row 2, column a is '1.500', but other rows have a comma"),
        ("date;a\n2024-01-01;1.500\n", {"decimal": ","}, r"row 1, column a is '1\.500', but data\.decimal=,; write all numbers alike"),
        ("date;a\n2024-01-01;1\n", {"separator": "|"}, r"data\.separator is `\|`, but the first line has none, and has `;`"),
        ("date;a\n2024-01-01;1\n".encode("utf-16")[:-1], {}, r"is not text in utf-16 .*; set data\.encoding"),
        (GERMAN.encode("latin-1"), {"encoding": "utf-16"}, r"is not text in utf-16"),
    ],
)
def test_what_fits_in_two_ways_or_none_is_refused(tmp_path: Path, text: str | bytes, data: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as refused:
        read(tmp_path, text, **data)
    assert "\n" not in str(refused.value)


def test_a_comma_between_thousands_is_never_read_as_decimals_unless_asked(tmp_path: Path) -> None:
    assert values(read(tmp_path, "date;a\n2024-01-01;1,234\n2024-01-02;5,678\n", decimal=",")) == [[np.float32(1.234)], [np.float32(5.678)]]


@pytest.mark.parametrize(("key", "value"), [("encoding", "klingon"), ("encoding", "base64"), ("separator", ";;"), ("separator", "a")])
def test_settings_that_cannot_be(tmp_path: Path, key: str, value: str) -> None:
    with pytest.raises(SpecError, match=f"data.{key}|{key} '{value}'"):
        spec(tmp_path, "t.csv", **{key: value})


def test_names_of_text_and_label_columns(tmp_path: Path) -> None:
    rows = [("ab", "good", "x"), ("ba", "bad", "y"), ("aa", "good", "z")]
    frame = pd.DataFrame(rows, columns=["review", "stars", "text"])
    frame.to_csv(tmp_path / "t.csv", index=False, sep=";")
    frame.to_json(tmp_path / "t.jsonl", orient="records", lines=True)
    pyarrow.parquet.write_table(pa.Table.from_pandas(frame), tmp_path / "t.parquet")
    names = {"text": "review", "label": "stars"}
    found = [prepare(spec(tmp_path, f"t.{kind}", "classification", **names)) for kind in ("csv", "jsonl", "parquet")]
    found.append(from_python(frame, spec(tmp_path, "none", "classification", **names)))
    for each in found:
        assert each.codec.labels == ("bad", "good")
        assert [each.codec.decode(part) for part in np.split(each.train.inputs, 3)] == ["ab", "ba", "aa"]
        assert np.asarray(each.train.labels).tolist() == [1, 0, 1]


def test_names_of_lists_of_words_and_tags(tmp_path: Path) -> None:
    row = {"words": ["the", "carry"], "pos": ["DET", "NOUN"], "tokens": ["not", "these"]}
    found = read(tmp_path, json.dumps(row), "t.jsonl", "tagging", text="words", label="pos")
    assert {"the", "carry"} <= set(found.codec.vocabulary)
    assert "these" not in found.codec.vocabulary
    assert found.codec.labels == ("DET", "NOUN")


def test_a_decimal_comma_in_a_label(tmp_path: Path) -> None:
    found = read(tmp_path, "text;label\nab;1,5\nba;2\n", task="regression", decimal=",")
    assert np.asarray(found.train.labels).tolist() == [[1.5], [2.0]]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"text": "reviw"}, r"row 1 has no column 'reviw' \(data\.text\); did you mean review"),
        ({"text": "review", "label": "x"}, r"has no column 'x' \(data\.label\); use one of review, stars"),
        ({}, r"none of the fields steps, text and tokens \(it has review, stars\); add one, or set data\.text"),
    ],
)
def test_columns_that_are_not_there(tmp_path: Path, data: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(tmp_path, "review,stars\nab,1\n", task="classification", **data)
