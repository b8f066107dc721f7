"""Rows with steps, text or tokens and their labels: what is read, and every way in which a row is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from carrywave.data import examples
from carrywave.data.codec import Codec
from carrywave.data.files.arrays import MemoryAppender
from carrywave.data.files.rows import CsvRows, open_rows
from carrywave.data.files.source import find
from carrywave.data.sequences import Sequences
from carrywave.errors import DataError
from carrywave.spec.spec import Spec

NONE = np.zeros(0, np.bool_)


def spec(task: str, **data: Any) -> Spec:
    return Spec.model_validate({"task": task, "data": data, "batch": {"tokens": 64}})


def run(
    folder: Path, rows: list[Any], asked: Spec, codec: Codec | None = None, *, labelled: bool = True, join: bool = False
) -> tuple[Sequences, Codec]:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / "d.jsonl").write_text("\n".join(lines))
    source = find(str(folder / "d.jsonl"), field="data.train")
    found = open_rows(source, numeric_label=False)
    codec = codec or examples.learn(found, asked, NONE)
    return examples.encode(found, codec, MemoryAppender, labelled=labelled, join=join), codec


def test_steps_and_labels(tmp_path: Path) -> None:
    rows = [{"steps": [[1, 10], [3, 10]], "label": "b"}, {"steps": [[5, 10]], "label": "a"}]
    data, codec = run(tmp_path, rows, spec("classification"))
    assert (codec.columns, codec.labels, codec.mean) == (("0", "1"), ("a", "b"), (3.0, 10.0))
    assert codec.std == (pytest.approx(np.sqrt(8 / 3)), 1.0)  # a constant column keeps its scale
    assert data.inputs.dtype == np.float32
    np.testing.assert_allclose(data.inputs, (np.array([[1, 10], [3, 10], [5, 10]]) - codec.mean) / codec.std, rtol=2**-23)
    assert data.labels is not None
    assert (data.starts.tolist(), data.lengths.tolist(), data.labels.tolist()) == ([0, 2], [2, 1], [1, 0])


def test_flat_steps_are_one_feature(tmp_path: Path) -> None:
    data, codec = run(tmp_path, [{"steps": [1, 2, 4], "label": 0}], spec("classification", standardize=False))
    assert data.inputs.tolist() == [[1], [2], [4]]
    assert (codec.mean, codec.std) == ((0.0,), (1.0,))


def test_scale_is_of_the_rows_trained_on(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"steps": [1, 3], "label": 1}\n{"steps": [100], "label": 9}\n')
    rows = open_rows(find(str(tmp_path / "d.jsonl"), field="x"), numeric_label=True)
    codec = examples.learn(rows, spec("regression"), np.array([False, True]))
    assert (codec.mean, codec.std, codec.target_mean, codec.target_std) == ((2.0,), (1.0,), (1.0,), (1.0,))


@pytest.mark.parametrize(
    ("labels", "expected"), [([10, 2, -1], ("-1", "2", "10")), (["b", "a", "B"], ("B", "a", "b")), ([True, False, True], ("false", "true"))]
)
def test_labels_are_sorted(tmp_path: Path, labels: list[Any], expected: tuple[str, ...]) -> None:
    _, codec = run(tmp_path, [{"steps": [1], "label": label} for label in labels], spec("classification"))
    assert codec.labels == expected


def test_regression_targets_are_standardised_and_restored(tmp_path: Path) -> None:
    data, codec = run(tmp_path, [{"steps": [1], "label": [2, 30]}, {"steps": [1], "label": [4, 10]}], spec("regression"))
    assert (codec.target_mean, codec.target_std) == ((3.0, 20.0), (1.0, 10.0))
    assert data.labels is not None
    assert data.labels.tolist() == [[-1, 1], [1, -1]]
    assert codec.restore(data.labels).tolist() == [[2, 30], [4, 10]]
    single, _ = run(tmp_path, [{"steps": [1], "label": 2.5}], spec("regression", standardize=False))
    assert single.labels is not None
    assert single.labels.tolist() == [[2.5]]


def test_words_of_text_have_no_end_token_outside_language(tmp_path: Path) -> None:
    data, codec = run(tmp_path, [{"text": "a b\na", "label": 1}], spec("classification", tokens="word"))
    assert (codec.vocabulary, data.inputs.tolist()) == (("a", "b", "<unk>"), [0, 1, 0])


def test_tagging_ignores_null_and_minus_hundred(tmp_path: Path) -> None:
    data, codec = run(
        tmp_path, [{"tokens": ["x", "y", "x"], "labels": ["N", None, -100]}, {"tokens": ["y"], "labels": ["V"]}], spec("tagging")
    )
    assert (codec.kind, codec.vocabulary, codec.labels) == ("word", ("x", "y", "<unk>"), ("N", "V"))
    assert data.tags is not None
    assert (data.inputs.tolist(), data.tags.tolist()) == ([0, 1, 0, 1], [0, -100, -100, 1])


def test_number_tokens_are_used_as_they_are(tmp_path: Path) -> None:
    data, codec = run(tmp_path, [{"tokens": [3, 0, 5], "label": 1}], spec("classification"))
    assert (codec.kind, codec.size, data.inputs.tolist()) == ("int", 6, [3, 0, 5])
    with pytest.raises(DataError, match=r"d\.jsonl:1: token 6 is outside the training vocabulary of 6 tokens"):
        run(tmp_path, [{"tokens": [6], "label": 1}], spec("classification"), codec)


def test_language_rows_are_sequences_or_one_stream(tmp_path: Path) -> None:
    rows = [{"text": "a b"}, {"text": "b"}]
    data, codec = run(tmp_path, rows, spec("language", tokens="word"))
    assert codec.vocabulary == ("<eos>", "b", "a", "<unk>")
    assert (data.inputs.tolist(), data.starts.tolist(), data.lengths.tolist()) == ([2, 1, 0, 1, 0], [0, 3], [3, 2])
    data, _ = run(tmp_path, [*rows, {"text": ""}], spec("language", tokens="word"), join=True)
    assert (data.inputs.tolist(), data.starts.tolist(), data.lengths.tolist()) == ([2, 1, 0, 1, 0, 0], [0], [6])


def test_labels_are_not_read_for_prediction(tmp_path: Path) -> None:
    _, codec = run(tmp_path, [{"steps": [1], "label": "a"}], spec("classification"))
    data, _ = run(tmp_path, [{"steps": [1]}, {"steps": [2], "label": "new"}], spec("classification"), codec, labelled=False)
    assert (len(data), data.labels, data.tags) == (2, None, None)


GOOD = {"steps": [[1.0, 2.0]], "label": "a"}
BAD_ROWS = [
    ("{", r"the line is not JSON .*; write one object per line"),
    ('{"steps": [[1, 2]], "label": "a"', "the line is not JSON"),
    ('{"steps": [[1, 2]], "label": "a", "label": "b"}', "field 'label' is given twice; remove one of them"),
    ("[1]", "is a JSON list, not an object"),
    ({"label": "a"}, r"the field steps is missing \(the row has label\); add it"),
    ({"steps": [[1, 2]]}, "the field label is missing"),
    ({"text": "x", "label": "a"}, "has text, expected steps; use the same field"),
    ({"steps": [[1, 2], [3]], "label": "a"}, "steps is ragged, with steps of 1 and 2 features"),
    ({"steps": [[1, 2], 3], "label": "a"}, "ragged, with steps of a bare number and 2 features"),
    ({"steps": [[1, 2, 3]], "label": "a"}, "a step has 3 features, but the training data has 2; use 2"),
    ({"steps": [[1, 2], [1, float("nan")]], "label": "a"}, "step 1, column 1 of steps is nan, not a finite number"),
    ({"steps": [[float("-inf"), 2]], "label": "a"}, "step 0, column 0 of steps is -inf"),
    ({"steps": [[1, None]], "label": "a"}, "step 0, column 1 of steps is nan"),
    ({"steps": [[1, "2"]], "label": "a"}, r"step 0, column 1 of steps is a string \('2'\), not a number"),
    ({"steps": [[1, 1e300]], "label": "a"}, r"step 0, column 1 of steps is 1e\+300, not a finite number \(below 1e25\)"),
    ({"steps": [[[1, 2]]], "label": "a"}, r"steps has shape \[1, 1, 2\]"),
    ({"steps": [[[1], 2]], "label": "a"}, "step 0, column 0 of steps is a list"),
    ({"steps": "abc", "label": "a"}, "of steps is a string"),
    ({"steps": [[], []], "label": "a"}, r"steps has shape \[2, 0\]"),
    ({"steps": [], "label": "a"}, "zero-length sequence; remove the row"),
    ({"steps": [[1, 2]], "label": "zebra"}, r"label 'zebra' was never seen in training \(labels: a\)"),
    ({"steps": [[1, 2]], "label": 0.5}, r"label is a number \(0\.5\); use a string"),
    ({"steps": [[1, 2]], "label": -100}, r"label is -100, which means no label; remove the row"),
    ({"steps": [[1, 2]], "label": None}, "the field label is empty"),
]


@pytest.mark.parametrize(("row", "message"), BAD_ROWS)
def test_bad_row_is_refused_with_file_and_line(tmp_path: Path, row: Any, message: str) -> None:
    asked = spec("classification", standardize=False)
    _, codec = run(tmp_path, [GOOD], asked)
    with pytest.raises(DataError, match=rf"d\.jsonl:3: .*{message}") as caught:
        run(tmp_path, [GOOD, "", row], asked, codec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("task", "rows", "message"),
    [
        ("classification", [], r"d\.jsonl is empty; use data with at least one row"),
        ("classification", ["", " "], "is empty"),
        ("classification", [{"label": 1}], r":1: the row has none of the fields steps, text and tokens \(it has label\)"),
        ("classification", [GOOD, {"steps": [[1, 2]], "label": 1}], ":2: label 1 is a whole number, but earlier rows have a string"),
        (
            "classification",
            [{"tokens": ["a"], "label": 1}, {"tokens": [1], "label": 1}],
            ":2: tokens contains numbers, but the training data contains words",
        ),
        (
            "classification",
            [{"tokens": [1], "label": 1}, {"tokens": ["a"], "label": 1}],
            ":2: tokens contains words, but the training data contains numbers",
        ),
        ("classification", [{"tokens": [1, "a"], "label": 1}], r":1: token 1 is a string \('a'\); write all tokens as strings"),
        ("classification", [{"tokens": [1, -4], "label": 1}], ":1: token -4 at step 1 is negative; tokens must be 0 or greater"),
        ("classification", [{"tokens": [1, 2**31], "label": 1}], ":1: token 2147483648 at step 1 is too large"),
        ("classification", [{"tokens": "ab", "label": 1}], ":1: tokens is a string, not a list"),
        ("classification", [{"tokens": [], "label": 1}], ":1: tokens is a zero-length sequence"),
        ("classification", [{"text": "", "label": 1}], ":1: text is a zero-length sequence"),
        ("classification", [{"text": 3, "label": 1}], ":1: text is a number, not a string"),
        ("classification", ['{"text": "a\\ud800", "label": 1}'], ":1: text is not valid Unicode at character 1"),
        (
            "classification",
            [{"text": "a", "label": "b"}, {"text": "b", "label": " "}],
            ":2: the field label is empty; fill it in, or remove",
        ),
        ("tagging", [{"tokens": ["a", "b"], "labels": ["N"]}], ":1: 1 label for 2 steps; use one label per step"),
        ("tagging", [{"tokens": ["a"], "labels": "N"}], ":1: labels is a string, not a list"),
        ("tagging", [{"tokens": ["a"], "labels": [None]}], "has no labels"),
        ("tagging", [{"tokens": ["a"], "label": "N"}], ":1: the field labels is missing"),
        ("regression", [{"steps": [1], "label": [1, 2]}, {"steps": [1], "label": 1}], ":2: label has 1 numbers, expected 2"),
        ("regression", [{"steps": [1], "label": "x"}], r":1: .* of label is a string \('x'\), not a number"),
        ("regression", [{"steps": [1], "label": [1, float("inf")]}], ":1: number 1 of label is inf, not a finite number"),
        ("regression", [{"steps": [1], "label": []}], r":1: label has shape \[0\]"),
        ("language", [{"steps": [1]}], ":1: a language model needs text or tokens"),
        ("language", [{"text": "ab"}, {"text": "a"}], ":2: the sequence has 1 token, but a language model needs 2"),
        ("language", [{"tokens": [1]}], ":1: the sequence has 1 token"),
    ],
)
def test_bad_training_rows_are_refused(tmp_path: Path, task: str, rows: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        run(tmp_path, rows, spec(task))
    assert "\n" not in str(caught.value)


def test_unknown_token_names_file_and_line(tmp_path: Path) -> None:
    _, codec = run(tmp_path, [{"text": "ab", "label": 1}], spec("classification"))
    with pytest.raises(DataError, match=r"d\.jsonl:2: token 'z' is not in the training vocabulary"):
        run(tmp_path, [{"text": "a", "label": 1}, {"text": "abz", "label": 1}], spec("classification"), codec)


def test_invalid_utf8_line_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(b'{"text": "\xff", "label": 1}')
    rows = open_rows(find(str(tmp_path / "d.jsonl"), field="x"), numeric_label=False)
    with pytest.raises(DataError, match=r"d\.jsonl:1: byte 10 of the line is not valid utf-8; set data\.encoding .*: iconv"):
        list(rows)


def test_parquet_rows_read_as_json_lines(tmp_path: Path) -> None:
    rows = [{"steps": [[1.0, 2.0], [3.0, 4.0]], "label": "b"}, {"steps": [[5.0, 6.0]], "label": "a"}]
    expected, codec = run(tmp_path, rows, spec("classification"))
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    parquet = open_rows(find(str(tmp_path / "d.parquet"), field="x"), numeric_label=False)
    assert parquet.count() == 2
    assert examples.learn(parquet, spec("classification"), NONE) == codec
    np.testing.assert_array_equal(examples.encode(parquet, codec, MemoryAppender, labelled=True, join=False).inputs, expected.inputs)
    with pytest.raises(DataError, match=r"d\.parquet: row 2: label 'a' was never seen"):
        examples.encode(
            parquet,
            Codec("classification", "steps", labels=("b",), columns=("0", "1"), mean=(0, 0), std=(1, 1)),
            MemoryAppender,
            labelled=True,
            join=False,
        )


def test_truncated_parquet_is_refused(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pa.table({"text": ["a"] * 100}), tmp_path / "d.parquet")
    whole = (tmp_path / "d.parquet").read_bytes()
    (tmp_path / "d.parquet").write_bytes(whole[:-10])
    rows = open_rows(find(str(tmp_path / "d.parquet"), field="x"), numeric_label=False)
    with pytest.raises(DataError, match=r"d\.parquet cannot be read"):
        list(rows)


def test_csv_rows_keep_text_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text('text,label\n007,1\n"a, ""b""\nc",2\n')
    rows = open_rows(find(str(tmp_path / "d.csv"), field="x"), numeric_label=False)
    assert list(rows) == [(1, {"text": "007", "label": "1"}), (2, {"text": 'a, "b"\nc', "label": "2"})]
    numeric = CsvRows(find(str(tmp_path / "d.csv"), field="x"), numeric_label=True)
    assert [row["label"] for _, row in numeric] == [1.0, 2.0]
    (tmp_path / "t.tsv").write_text("text\tlabel\na\t1\n")
    assert list(open_rows(find(str(tmp_path / "t.tsv"), field="x"), numeric_label=False)) == [(1, {"text": "a", "label": "1"})]


def test_csv_columns_that_are_not_read_may_hold_anything(tmp_path: Path) -> None:
    rows = 120_000  # more than a block of what is read at once
    (tmp_path / "d.csv").write_text(
        "text,label,other\n" + "".join(f"some words,a,{'7' if row < rows - 1 else 'x'}\n" for row in range(rows))
    )
    found = open_rows(find(str(tmp_path / "d.csv"), field="x"), numeric_label=False)
    assert found.count() == rows


def test_csv_numbers_are_those_that_people_write(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("text,label\na,1e3\na,+2.5\na, .5 \na,7\na,\n")
    written = find(str(tmp_path / "d.csv"), field="x")
    assert [row["label"] for _, row in open_rows(written, numeric_label=True)] == [1000.0, 2.5, 0.5, 7, None]
    for label in ("1_000", "\u0663", "nan", "0x10", "1e"):
        (tmp_path / "d.csv").write_text(f"text,label\na,{label}\n", encoding="utf-8")
        with pytest.raises(DataError, match=f"column label is '{label}', which is text, not a number"):
            list(open_rows(written, numeric_label=True))
    (tmp_path / "d.csv").write_text(f"text,label\na,1.5\na,{2**53 + 1}\n")
    with pytest.raises(DataError, match=r"label contains 9007199254740993, a whole number beyond 2\*\*53"):
        examples.learn(open_rows(written, numeric_label=True), spec("regression"), np.zeros(2, np.bool_))


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_column_that_occurs_twice_is_refused(tmp_path: Path, kind: str) -> None:
    """Rather than read as one of the two."""
    path = tmp_path / f"d.{kind}"
    if kind == "csv":
        path.write_text("text,text,label\nread,not read,a\n")
    else:
        pa.parquet.write_table(pa.table([["read"], ["not read"], ["a"]], names=["text", "text", "label"]), path)
    with pytest.raises(DataError, match=rf"d\.{kind}: duplicate column text; give every column a unique name"):
        list(open_rows(find(str(path), field="x"), numeric_label=False))


def test_csv_with_a_broken_row_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("text,label\na,1,2\n")
    with pytest.raises(DataError, match=r"d\.csv cannot be read .*Expected 2 columns, got 3"):
        list(open_rows(find(str(tmp_path / "d.csv"), field="x"), numeric_label=False))
