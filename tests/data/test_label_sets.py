"""Several labels for a sequence or a step: lists of names, lists of numbers, vectors; and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from carrywave.data.prepare import Prepared, from_python, prepare
from carrywave.errors import DataError
from carrywave.spec.spec import Spec

STEPS = [[0.5], [1.5], [0.0]]


def a_spec(task: str = "classification", **data: Any) -> Spec:
    return Spec.model_validate({"task": task, "data": {"share": 0, "multi_label": True, **data}, "batch": {"tokens": 64}})


def read(labels: list[Any], task: str = "classification", **data: Any) -> Prepared:
    field = "label" if task == "classification" else "labels"
    return from_python([{"steps": STEPS, field: each} for each in labels], a_spec(task, **data))


def test_lists_of_names() -> None:
    found = read([["drama", "comedy"], [], ("war",), {"comedy"}])
    assert found.codec.labels == ("comedy", "drama", "war")
    assert found.codec.label_sets == "names"
    assert found.train.labels is not None
    assert found.train.labels.dtype == np.float32
    assert found.train.labels.tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0]]
    assert found.codec.listed([True, False, True]) == ["comedy", "war"]


def test_numbers_name_labels_unless_they_are_vectors() -> None:
    named = read([[3, 17], [17], []])
    assert (named.codec.labels, named.codec.label_sets) == (("3", "17"), "names")
    assert named.train.labels is not None
    assert named.train.labels.tolist() == [[1, 1], [0, 1], [0, 0]]
    assert named.codec.listed([False, True]) == [17]
    vectors = read([[0, 1, 1], [0, 0, None], [1, 0, 0]])
    assert (vectors.codec.labels, vectors.codec.label_sets) == (("0", "1", "2"), "vectors")
    assert vectors.train.labels is not None
    np.testing.assert_array_equal(vectors.train.labels, [[0, 1, 1], [0, 0, math.nan], [1, 0, 0]])
    assert vectors.codec.listed([False, True, True]) == [0, 1, 1]


@pytest.mark.parametrize("dtype", [bool, np.int64, np.float64])
def test_arrays_of_one_vector_for_each_sequence_or_step(dtype: Any) -> None:
    inputs = np.random.default_rng(1).normal(size=(4, 3, 2))
    wanted = np.array([[0, 1], [1, 1], [0, 0], [1, 0]], dtype)
    found = from_python((inputs, wanted), a_spec())
    assert found.train.labels is not None
    np.testing.assert_array_equal(found.train.labels, wanted.astype(float))
    by_step = np.stack([wanted[:3], wanted[1:], wanted[:3], wanted[1:]])
    found = from_python((inputs, by_step), a_spec("tagging"))
    assert found.train.tags is not None
    np.testing.assert_array_equal(found.train.tags, by_step.reshape(12, 2).astype(float))


def test_steps_with_lists_and_steps_without_a_target(tmp_path: Path) -> None:
    rows = [{"steps": STEPS, "labels": [["a"], None, []]}, {"steps": STEPS[:1], "labels": [["a", "b"]]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = prepare(a_spec("tagging", train=str(tmp_path / "rows.jsonl"), cache=str(tmp_path)))
    assert found.train.tags is not None
    nothing = math.nan
    np.testing.assert_array_equal(found.train.tags, [[1, 0], [nothing, nothing], [0, 0], [1, 1]])
    vectors = read([[[1, 0], None, [0, 0]], [None, None, None], [[0, 1], [1, None], [1, 1]]], "tagging")
    assert vectors.train.tags is not None
    np.testing.assert_array_equal(vectors.train.tags[:3], [[1, 0], [nothing, nothing], [0, 0]])
    assert np.isnan(vectors.train.tags[3:6]).all()
    np.testing.assert_array_equal(vectors.train.tags[7], [1, nothing])


@pytest.mark.parametrize(
    ("labels", "task", "said"),
    [
        (["a", "b"], "classification", 'label is \'a\'; write a list of labels, as in ["a", "b"]'),
        ([[0.0, 1.0], [0.5, 1.0]], "classification", "a label is 0.5; write a string, a whole number"),
        ([[]], "classification", "has no labels"),
        ([[["a"], ["b"]]], "tagging", "2 labels for 3 steps; write one for each step"),
        ([[["a"], "b", []]], "tagging", "labels of step 1 is 'b'"),
        ([None], "classification", "train has no row with a sequence and a target"),
    ],
)
def test_what_is_refused(labels: list[Any], task: str, said: str) -> None:
    with pytest.raises(DataError) as raised:
        read(labels, task)
    assert said in str(raised.value)


def test_later_data_must_fit() -> None:
    given = {"train": [{"steps": STEPS, "label": ["a"]}], "valid": [{"steps": STEPS, "label": ["b"]}]}
    found = from_python(given, a_spec())
    assert found.valid is not None
    assert found.valid.labels is not None
    assert (found.valid.labels.tolist(), found.notes[0]) == ([[0]], "valid: 1 label that train does not have ('b') is left out")
    for other, said in (
        ([1, 0], "write a vector of 3 numbers 0 or 1"),
        ([0, 2, 0], "write a vector of 3"),
        (["a"], "write a vector of 3"),
    ):
        given = {"train": [{"steps": STEPS, "label": [0, 1, 0]}], "valid": [{"steps": STEPS, "label": other}]}
        with pytest.raises(DataError, match=said):
            from_python(given, a_spec())
