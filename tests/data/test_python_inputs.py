"""Data from Python: every kind of object gives what a file with the same content gives, and bad items are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from carrywave.data.prepare import Prepared, from_python, prepare, read_python
from carrywave.errors import DataError, SpecError
from carrywave.spec.spec import Spec

STEPS = [[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0]], [[7.0, 8.0]]]
LABELS = ["b", "a", "b"]
ROWS = [{"steps": steps, "label": label} for steps, label in zip(STEPS, LABELS, strict=True)]


def spec(task: str, *, lines: bool = False, **data: Any) -> Spec:
    batch = {"tokens": 64} if lines or task not in ("language", "forecasting") else {}
    return Spec.model_validate({"task": task, "data": {"share": 0, "horizon": 2, **data}, "batch": batch})


def sequences(found: Prepared) -> list[Any]:
    train = found.train
    return [train.inputs[start : start + length].tolist() for start, length in zip(train.starts, train.lengths, strict=True)]


class Items:
    """The least that a map-style Dataset is."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> Any:
        return self.items[number]


CLASSIFIED: dict[str, Any] = {
    "dicts": ROWS,
    "pairs": list(zip(STEPS, LABELS, strict=True)),
    "(inputs, targets)": (STEPS, LABELS),
    "arrays": ([np.array(steps) for steps in STEPS], LABELS),
    "tensors": ([torch.tensor(steps) for steps in STEPS], LABELS),
    "bfloat16": ([torch.tensor(steps, dtype=torch.bfloat16) for steps in STEPS], LABELS),
    "dataset of dicts": Items(ROWS),
    "dataset of pairs": Items(list(zip(STEPS, LABELS, strict=True))),
    "arrow": pa.Table.from_pylist(ROWS),
    "parts": {"train": ROWS, "valid": None},
}


@pytest.mark.parametrize("kind", CLASSIFIED)
def test_classification_equals_the_file(tmp_path: Path, kind: str) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    file = prepare(spec("classification", train=str(tmp_path / "a.jsonl"), cache=str(tmp_path / "cache")))
    found = from_python(CLASSIFIED[kind], spec("classification"))
    assert (found.codec, found.facts) == (file.codec, file.facts)
    assert found.train.labels is not None
    assert file.train.labels is not None
    np.testing.assert_array_equal(found.train.inputs, file.train.inputs)
    np.testing.assert_array_equal(found.train.labels, file.train.labels)


def test_frames_hold_rows_too() -> None:
    expected = from_python(ROWS, spec("classification"))
    for library in ("pandas", "polars"):
        frame = pytest.importorskip(library).DataFrame(ROWS)
        found = from_python(frame, spec("classification"))
        assert (found.codec, found.fingerprint) == (expected.codec, expected.fingerprint)


def test_labels_as_tensors() -> None:
    found = from_python((torch.zeros(3, 2, 1), torch.tensor([2, 10, 2])), spec("classification"))
    assert found.train.labels is not None
    assert (found.codec.labels, found.train.labels.tolist()) == (("2", "10"), [0, 1, 0])
    regression = from_python((torch.zeros(2, 2, 1), torch.tensor([[1.0, 2.0], [3.0, 2.0]])), spec("regression"))
    assert regression.train.labels is not None
    assert regression.train.labels.tolist() == [[-1, 0], [1, 0]]
    tagging = from_python((torch.zeros(2, 2, 1), torch.tensor([[0, 1], [-100, 0]])), spec("tagging"))
    assert tagging.train.tags is not None
    assert tagging.train.tags.tolist() == [0, 1, -100, 0]
    words = from_python([(["a", "b"], ["N", None]), (["b"], ["V"])], spec("tagging"))
    assert words.train.tags is not None
    assert (words.codec.vocabulary, words.train.tags.tolist()) == (("b", "a", "<unk>"), [0, -100, 1])


@pytest.mark.parametrize("make", [lambda ids: ids, np.array, torch.tensor, lambda ids: np.array(ids, np.uint8)])
def test_flat_tokens_are_one_stream(make: Any) -> None:
    found = from_python(make([3, 1, 0, 2] * 5), spec("language", share=0.1))
    assert found.valid is not None
    assert (found.codec.kind, found.codec.size, found.train.inputs.dtype) == ("int", 5, np.uint8)  # one for tokens that train does not have
    assert (found.train.lengths.tolist(), found.valid.starts.tolist()) == ([18], [18])


def test_text() -> None:
    stream = from_python("ab\nba\n", spec("language"))
    assert (stream.codec.vocabulary, sequences(stream)) == (("\n", "a", "b", "<unk>"), [[1, 2, 0, 2, 1, 0]])
    lines = from_python("ab\n\nba\n", spec("language", lines=True))
    assert sequences(lines) == [[0, 1], [1, 0]]
    words = from_python("a b\na", spec("language", tokens="word"))
    assert words.codec.decode(words.train.inputs) == "a b\na\n"
    texts = from_python(["ab", "ba"], spec("language"))
    assert sequences(texts) == [[0, 1, 1, 0]]
    held = from_python("ab" * 50, spec("language", share=0.1))
    assert held.valid is not None
    assert held.valid.starts.tolist() == [90]


def test_forecasting_from_arrays() -> None:
    one = from_python(np.arange(12.0).reshape(6, 2), spec("forecasting", standardize=False))
    assert (one.codec.columns, one.train.lengths.tolist(), one.train.inputs[1].tolist()) == (("0", "1"), [6], [2, 3])
    assert from_python([1.0, 2.0, 3.0, 4.0], spec("forecasting")).train.inputs.shape == (4, 1)
    assert from_python(torch.arange(6), spec("forecasting")).train.inputs.shape == (6, 1)
    assert from_python(torch.zeros(2, 5, 3), spec("forecasting")).train.lengths.tolist() == [5, 5]
    unequal = from_python([np.zeros((4, 1)), np.ones((7, 1))], spec("forecasting", split=[0.5, 0.5], horizon=1))
    assert unequal.valid is not None
    assert (unequal.train.starts.tolist(), unequal.train.lengths.tolist(), unequal.valid.starts.tolist()) == ([0, 4], [2, 3], [0, 4])
    chosen = from_python(np.arange(12.0).reshape(4, 3), spec("forecasting", columns=["2", "0"], targets=["0"], standardize=False))
    assert (chosen.codec.targets, chosen.train.inputs[0].tolist()) == ((1,), [2, 0])


def frames() -> list[Any]:
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    columns = {"unique_id": ["p"] * 4 + ["q"] * 3, "ds": [4, 3, 2, 1, 1, 2, 3], "y": [4.0, 3.0, 2.0, 1.0, 7.0, 8.0, 9.0]}
    return [pandas.DataFrame(columns), polars.DataFrame(columns), pa.table(columns)]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_forecasting_from_frames(place: int) -> None:
    found = from_python(frames()[place], spec("forecasting", standardize=False))
    assert (found.train.names, found.codec.time, found.codec.series) == (("p", "q"), "ds", ("unique_id",))
    assert sequences(found) == [[[1], [2], [3], [4]], [[7], [8], [9]]]


def test_index_of_pandas() -> None:
    pandas = pytest.importorskip("pandas")
    times = pandas.to_datetime(["2024-01-03", "2024-01-01", "2024-01-02"])
    dated = from_python(pandas.DataFrame({"y": [3.0, 1.0, 2.0]}, index=times), spec("forecasting", standardize=False))
    assert (dated.codec.columns, sequences(dated)) == (("y",), [[[1], [2], [3]]])
    numbered = from_python(pandas.DataFrame({"y": [3.0, 1.0, 2.0]}, index=[7, 5, 6]), spec("forecasting", standardize=False))
    assert (numbered.codec.columns, sequences(numbered)) == (("y",), [[[3], [1], [2]]])
    column = from_python(pandas.Series([3.0, 1.0, 2.0], index=times, name="load"), spec("forecasting", standardize=False))
    assert (column.codec.columns, sequences(column)) == (("load",), [[[1], [2], [3]]])


def test_files_by_part(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abab" * 5)
    found = from_python({"train": tmp_path / "a.txt", "test": tmp_path / "a.txt"}, spec("language", cache=str(tmp_path / "cache")))
    assert found.test is not None
    assert found.test.lengths.tolist() == [20]
    with pytest.raises(DataError, match=r"data mixes files \(train\) and objects"):
        from_python({"train": tmp_path / "a.txt", "test": "ab"}, spec("language"))


BAD: list[tuple[str, Any, str]] = [
    ("classification", [], "train is empty"),
    ("classification", 5, "train is a int, which has no length or cannot be indexed"),
    ("classification", {"train": ROWS, "dev": ROWS}, "dict with keys train, dev; use train and, optionally, valid and test"),
    ("classification", (STEPS, LABELS, 1), "train is a tuple of 3, 3, int items"),
    ("classification", (STEPS, LABELS, [1.0, -2.0, 1.0]), "train item 1: the weight is -2.0; write a finite number from 0 on"),
    ("classification", (STEPS, LABELS, [0, 0, 0]), "train: every weight in it is 0, .*; change them, or remove data.weight"),
    ("tagging", ([[[1.0], [2.0]]], [[0, 1]], [[1.0]]), "train item 0: the weight is .*; write .* one for each of the 2 steps"),
    ("classification", (STEPS, np.eye(3)), r"item 0: label is .*; write a string, .*of one-hot rows pass"),
    ("classification", STEPS, r"train has no row with a sequence and a target \(a row has steps\)"),
    ("classification", [*ROWS, {"steps": [[1.0]], "label": "a"}], "train item 3: a step has 1 numbers in steps, but others have 2"),
    ("classification", ([[[1.0], [1.0, 2.0]]], ["a"]), "train item 0: steps cannot be read as numbers"),
    ("classification", (np.array([[[1.0]], [[np.nan]]]), [0, 1]), "train item 1: step 0, column 0 of steps is nan"),
    ("tagging", (np.zeros((1, 3, 1)), [[0, 1]]), "train item 0: 2 labels for 3 steps"),
    ("regression", (np.zeros((1, 3, 1)), [np.inf]), "train item 0: label is inf; write a finite number"),
    ("regression", (np.ones((3, 4, 2)), np.ones(3) + 1j), r"train item 0: label cannot be read as numbers \(they are complex"),
    ("language", np.array([1, -2]), "train item 0: tokens is .*-2.*; write a list of words"),
    ("language", [([1, 2], [2, 3])], "train item 0 is a pair, but language takes its targets from the data itself"),
    ("forecasting", np.array([[1.0], [np.inf], [2.0]]), "train item 0: step 1, column 0 of steps is inf"),
    ("forecasting", np.zeros((2, 1)), "series train has 2 rows in train, but a horizon of 2 needs 3"),
]


@pytest.mark.parametrize(("task", "data", "message"), BAD)
def test_bad_data_is_refused_by_item(task: str, data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        from_python(data, spec(task))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("wrap", [lambda x, y: (x, y), lambda x, y: list(zip(x, y, strict=True)), lambda x, y: (pd.DataFrame(x), y)])
def test_whole_numbers_are_told_to_be_tokens_unless_they_are_called_so(wrap: Any) -> None:
    counts, labels = np.arange(24).reshape(6, 4) % 5, ["a", "b"] * 3
    told = (
        "train: whole numbers are read as tokens, 5 different ones at most; to read them as numbers, pass floats, as in x.astype(float)",
    )
    assert from_python(wrap(counts, labels), spec("classification")).notes == told
    assert from_python(wrap(counts.astype(float) + np.arange(6)[:, None], labels), spec("classification")).notes == ()
    named = [{"tokens": row, "label": label} for row, label in zip(counts + np.arange(6)[:, None], labels, strict=True)]
    assert from_python(named, spec("classification")).notes == ()
    assert from_python(counts, spec("language", lines=True)).notes == ()


def test_a_model_of_numbers_reads_whole_numbers() -> None:
    values = np.random.default_rng(1).integers(0, 9, size=(6, 4))
    codec = from_python((values + 0.5, ["a", "b"] * 3), spec("classification")).codec
    whole, fractions = (read_python(each, codec, spec("classification"), labelled=False) for each in (values, values.astype(float)))
    np.testing.assert_array_equal(whole.inputs, fractions.inputs)
    one = read_python([values[0].tolist()], codec, spec("classification"), labelled=False)
    np.testing.assert_array_equal(one.inputs, fractions.inputs[:4])
    with pytest.raises(DataError, match="steps"):  # what a file calls tokens is none
        read_python([{"tokens": [1, 2]}], codec, spec("classification"), labelled=False)


def test_beside_a_file_to_train_on_the_files_of_the_spec_are_read(tmp_path: Path) -> None:
    rows = "\n".join(json.dumps(row) for row in ROWS)
    train, other = tmp_path / "train.jsonl", tmp_path / "other.jsonl"
    train.write_text(rows)
    other.write_text(rows.splitlines()[0])
    asked = spec("classification", valid=str(other), test=str(other))
    for data in (train, {"train": train}, {"train": train, "test": train}):
        found = from_python(data, asked)
        assert found.valid is not None
        assert len(found.valid) == 1
        assert found.test is not None
        assert len(found.test) == (3 if isinstance(data, dict) and "test" in data else 1)
    with pytest.raises(DataError, match=r"no such file|not found|does not exist"):
        from_python(train, spec("classification", test=str(tmp_path / "none.jsonl")))


def test_beside_objects_the_files_of_the_spec_are_refused() -> None:
    with pytest.raises(
        SpecError, match=r"the spec names data\.test, but the data was passed as an object.*pass \{'train': …, 'test': …\}, or remove data"
    ):
        from_python(ROWS, spec("classification", test="test.jsonl"))
    with pytest.raises(SpecError, match=r"names data\.valid and data\.test, .*pass \{'train': …, 'valid': …, 'test': …\}"):
        from_python(ROWS, spec("classification", valid="valid.jsonl", test="test.jsonl"))
    with pytest.raises(SpecError, match=r"names data\.test, .*pass \{'train': …, 'valid': …, 'test': …\}"):
        from_python({"train": ROWS, "valid": ROWS}, spec("classification", valid="valid.jsonl", test="test.jsonl"))
    assert from_python({"train": ROWS, "test": ROWS}, spec("classification", test="test.jsonl")).test is not None
