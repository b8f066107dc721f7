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
from carrywave.data.files.source import find
from carrywave.data.formats.opening import open_rows
from carrywave.data.formats.recognised import NOTHING
from carrywave.data.inputs import told_by
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
    found = open_rows(source, asked, labelled=labelled, known=NOTHING if codec is None else told_by(codec))
    codec = codec or examples.learn(found, asked, NONE)
    return examples.encode(found, codec, labelled=labelled, join=join), codec


def test_steps_and_labels(tmp_path: Path) -> None:
    rows = [{"steps": [[1, 10], [3, 10]], "label": "b"}, {"steps": [[5, 10]], "label": "a"}]
    data, codec = run(tmp_path, rows, spec("classification"))
    assert (codec.columns, codec.labels, codec.mean) == (("0", "1"), ("a", "b"), (3.0, 10.0))
    assert codec.std == (pytest.approx(np.sqrt(8 / 3)), 1.0)  # a constant column keeps its scale
    assert data.inputs.dtype == np.float32
    np.testing.assert_allclose(data.inputs, (np.array([[1, 10], [3, 10], [5, 10]]) - codec.mean) / codec.std, rtol=2**-23)
    assert data.labels is not None
    assert (data.starts.tolist(), data.lengths.tolist(), data.labels.tolist()) == ([0, 2], [2, 1], [1, 0])


def test_scale_is_of_the_rows_trained_on(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"steps": [1, 3], "label": 1}\n{"steps": [100], "label": 9}\n')
    rows = open_rows(find(str(tmp_path / "d.jsonl"), field="x"), spec("regression"))
    codec = examples.learn(rows, spec("regression"), np.array([False, True]))
    assert (codec.mean, codec.std, codec.target_mean, codec.target_std) == ((2.0,), (1.0,), (1.0,), (1.0,))


def test_regression_targets_are_standardised_and_restored(tmp_path: Path) -> None:
    data, codec = run(tmp_path, [{"steps": [1], "label": [2, 30]}, {"steps": [1], "label": [4, 10]}], spec("regression"))
    assert (codec.target_mean, codec.target_std) == ((3.0, 20.0), (1.0, 10.0))
    assert data.labels is not None
    assert data.labels.tolist() == [[-1, 1], [1, -1]]
    assert codec.restore(data.labels).tolist() == [[2, 30], [4, 10]]
    single, _ = run(tmp_path, [{"steps": [1], "label": 2.5}], spec("regression", standardize=False))
    assert single.labels is not None
    assert single.labels.tolist() == [[2.5]]


def test_tagging_ignores_null_and_minus_hundred(tmp_path: Path) -> None:
    data, codec = run(
        tmp_path, [{"tokens": ["x", "y", "x"], "labels": ["N", None, -100]}, {"tokens": ["y"], "labels": ["V"]}], spec("tagging")
    )
    assert (codec.kind, codec.vocabulary, codec.labels) == ("word", ("x", "y", "<unk>"), ("N", "V"))
    assert data.tags is not None
    assert (data.inputs.tolist(), data.tags.tolist()) == ([0, 1, 0, 1], [0, -100, -100, 1])


def test_number_tokens_are_used_as_they_are(tmp_path: Path) -> None:
    data, codec = run(tmp_path, [{"tokens": [3, 0, 5], "label": 1}], spec("classification"))
    assert (codec.kind, codec.size, data.inputs.tolist()) == ("int", 7, [3, 0, 5])
    data, _ = run(tmp_path, [{"tokens": [5, 900], "label": 1}], spec("classification"), codec)
    assert (data.inputs.tolist(), data.notes) == (
        [5, 6],
        (f"{tmp_path / 'd.jsonl'}: 1 of 2 tokens is unknown to the vocabulary, and read as <unk>",),
    )


GOOD = {"steps": [[1.0, 2.0]], "label": "a"}
BAD_ROWS = [
    ("{", r"the line is not JSON .*; write one object per line"),
    ('{"steps": [[1, 2]], "label": "a"', "the line is not JSON"),
    ("[1]", r"the line is not JSON \(it is not an object\)"),
    ({"text": "x", "label": "a"}, "has text, expected steps; use the same field"),
    ({"steps": [[1, 2], [3]], "label": "a"}, "steps cannot be read as numbers"),
    ({"steps": [[1, 2], 3], "label": "a"}, "steps cannot be read as numbers"),
    ({"steps": [[1, 2, 3]], "label": "a"}, "a step has 3 numbers in steps, but others have 2; use 2"),
    ({"steps": [[1, 2], [1, float("nan")]], "label": "a"}, "step 1, column 1 of steps is nan, not a finite number"),
    ({"steps": [[float("-inf"), 2]], "label": "a"}, "step 0, column 0 of steps is -inf"),
    ({"steps": [[1, None]], "label": "a"}, "step 0, column 1 of steps is nan"),
    ({"steps": [[1, "two"]], "label": "a"}, r"steps cannot be read as numbers \(could not convert string to float: 'two'\)"),
    ({"steps": [[1, 1e300]], "label": "a"}, r"step 0, column 1 of steps is 1e\+300, not a finite number \(below 1e25\)"),
    ({"steps": [[[1, 2]]], "label": "a"}, r"steps has shape \[1, 1, 2\]"),
    ({"steps": "abc", "label": "a"}, "steps cannot be read as numbers"),
    ({"steps": [[], []], "label": "a"}, r"steps has shape \[2, 0\]"),
    ({"steps": [[1, 2]], "label": 0.5}, r"label is 0\.5; write a string"),
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
        ("classification", [{"label": 1}], r"d\.jsonl has no row with a sequence and a target \(a row has label\); set data.text"),
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
        ("classification", [{"tokens": [1, "a"], "label": 1}], r":1: tokens is .*; write a list of words .* or of whole numbers from 0 on"),
        ("classification", [{"tokens": [1, -4], "label": 1}], r":1: tokens is \[1, -4\]; write"),
        ("classification", [{"tokens": "ab", "label": 1}], ":1: tokens is 'ab'; write a list"),
        ("classification", [{"tokens": [], "label": 1}], "has no row with a sequence and a target"),
        ("classification", [{"text": 3, "label": 1}], ":1: text is 3; write a string"),
        ("classification", ['{"text": "a\\ud800", "label": 1}'], r":1: text is 'a.ud800'; write a string of valid Unicode"),
        ("tagging", [{"tokens": ["a", "b"], "labels": ["N"]}], ":1: 1 labels for 2 steps; write one for each step"),
        ("tagging", [{"tokens": ["a", "b"], "labels": "N"}], ":1: labels is 'N'; write a list of labels"),
        ("tagging", [{"tokens": ["a"], "labels": [None]}], "has no labels"),
        ("regression", [{"steps": [1], "label": [1, 2]}, {"steps": [1], "label": 1}], ":2: label is 1; write .*, 2 in every row"),
        ("regression", [{"steps": [1], "label": "x"}], ":1: label cannot be read as numbers"),
        ("regression", [{"steps": [1], "label": [1, float("inf")]}], r":1: label is \[1, inf\]; write a finite number"),
        ("language", [{"steps": [1, 2]}], ":1: a language model needs text or tokens"),
        ("language", [{"tokens": [1]}], "has no row with a sequence"),
    ],
)
def test_bad_training_rows_are_refused(tmp_path: Path, task: str, rows: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        run(tmp_path, rows, spec(task))
    assert "\n" not in str(caught.value)


def test_rows_that_lack_a_text_or_a_label_are_left_out(tmp_path: Path) -> None:
    """Tables of tweets have such rows."""
    rows: list[Any] = [{"text": "ab", "label": "x"}, {"text": " ", "label": "x"}, {"text": "b", "label": None}, {"text": "b", "label": ""}]
    rows += [{"label": "y"}, {"text": "b", "label": float("nan")}, {"text": "ba", "label": "y"}]
    data, codec = run(tmp_path, rows, spec("classification"))
    assert (codec.labels, data.lengths.tolist()) == (("x", "y"), [2, 2])
    assert data.notes == (f"{tmp_path / 'd.jsonl'}: 5 rows without a text or a label are left out",)
    short, _ = run(tmp_path, [{"text": "ab"}, {"text": "a"}], spec("language"))
    assert short.lengths.tolist() == [2]


def test_labels_that_train_does_not_have_are_wrong(tmp_path: Path) -> None:
    """The test set of ATIS has slots that its training set lacks."""
    _, codec = run(tmp_path, [{"tokens": ["a", "b"], "labels": ["B-x", "O"]}], spec("tagging"))
    data, _ = run(tmp_path, [{"tokens": ["a", "b", "b"], "labels": ["B-y", "I-y", "O"]}], spec("tagging"), codec)
    assert data.tags is not None
    assert data.tags.tolist() == [-101, -102, 1]
    assert data.notes == (f"{tmp_path / 'd.jsonl'}: 2 labels that train does not have ('B-y', 'I-y') are counted as wrong",)


@pytest.mark.parametrize(("task", "field"), [("tagging", "label"), ("classification", "labels")])
def test_label_and_labels_are_one_name(tmp_path: Path, task: str, field: str) -> None:
    value = ["N", "V"] if task == "tagging" else "N"
    _, codec = run(tmp_path, [{"tokens": ["a", "b"], field: value}], spec(task))
    assert codec.labels == ("N", "V")[: len(codec.labels)]


def test_parquet_rows_read_as_json_lines(tmp_path: Path) -> None:
    rows = [{"steps": [[1.0, 2.0], [3.0, 4.0]], "label": "b"}, {"steps": [[5.0, 6.0]], "label": "a"}]
    expected, codec = run(tmp_path, rows, spec("classification"))
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    parquet = open_rows(find(str(tmp_path / "d.parquet"), field="x"), spec("classification"))
    assert len(parquet) == 2
    assert examples.learn(parquet, spec("classification"), NONE) == codec
    np.testing.assert_array_equal(examples.encode(parquet, codec, labelled=True, join=False).inputs, expected.inputs)


def test_truncated_parquet_is_refused(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pa.table({"text": ["a"] * 100}), tmp_path / "d.parquet")
    whole = (tmp_path / "d.parquet").read_bytes()
    (tmp_path / "d.parquet").write_bytes(whole[:-10])
    with pytest.raises(DataError, match=r"d\.parquet cannot be read"):
        open_rows(find(str(tmp_path / "d.parquet"), field="x"), spec("language"))


def test_csv_numbers_are_those_that_people_write(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text('text,label\na,1e3\na,+2.5\na, .5 \na,7\na,\na,"3,25"\n')
    written = find(str(tmp_path / "d.csv"), field="x")
    assert [row["label"] for _, row in open_rows(written, spec("regression"))] == [1000.0, 2.5, 0.5, 7, 3.25]
    (tmp_path / "d.csv").write_text("text,label\na,1.5\na,much\n")
    written = find(str(tmp_path / "d.csv"), field="x")
    with pytest.raises(DataError, match=r"d\.csv: row 2: label cannot be read as numbers \(could not convert string to float: 'much'\)"):
        examples.learn(open_rows(written, spec("regression")), spec("regression"), np.zeros(2, np.bool_))
