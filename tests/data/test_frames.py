"""Columns and frames are read by position, whatever their index says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest

from carrywave.data.prepare import from_python
from carrywave.errors import DataError
from carrywave.spec.spec import Spec

STEPS = np.random.default_rng(1).normal(size=(6, 4, 2))
LABELS = [0, 1, 0, 1, 1, 0]
WORDS = ["no", "yes", "no", "yes", "yes", "no"]
SHUFFLED = [3, 5, 1, 0, 4, 2]
INDICES: dict[str, Any] = {
    "shuffled": SHUFFLED,
    "a later part": range(100, 106),
    "the same label": [7] * 6,
    "times": pd.date_range("2024-01-01", periods=6)[::-1],
    "text": list("fedcba"),
    "pairs": pd.MultiIndex.from_product([["a", "b"], [3, 2, 1]]),
}


def spec(task: str = "classification", **data: Any) -> Spec:
    return Spec.model_validate({"task": task, "data": {"share": 0, "horizon": 2, **data}})


def labels(data: Any, task: str = "classification") -> list[Any]:
    found = from_python(data, spec(task, standardize=False)).train
    assert found.labels is not None
    return list(found.labels.tolist())


@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("dtype", ["int64", "Int64", "category", "boolean", "int64[pyarrow]", "object"])
def test_a_series_of_labels_is_read_by_position(index: str, dtype: str) -> None:
    assert labels((STEPS, pd.Series(LABELS, index=INDICES[index]).astype(dtype))) == LABELS


@pytest.mark.parametrize("make", [lambda rows: pd.DataFrame(rows, index=SHUFFLED), lambda rows: pl.DataFrame(rows)])
def test_a_frame_of_numbers_holds_a_sequence_in_each_row(make: Any) -> None:
    found = from_python((make(STEPS[:, :, 0]), LABELS), spec(standardize=False))
    np.testing.assert_array_equal(found.train.inputs[:, 0], STEPS[:, :, 0].ravel().astype(np.float32))
    with pytest.raises(DataError, match="train item 0: steps cannot be read as numbers"):
        from_python((pd.DataFrame({"a": [1.0] * 6, "b": WORDS}), LABELS), spec())


@pytest.mark.parametrize("missing", [pd.Series([1, None] * 3, dtype="Int64"), pl.Series([1, None] * 3), pd.Series(["a", None] * 3)])
def test_rows_with_a_missing_label_are_left_out(missing: Any) -> None:
    found = from_python((STEPS, missing), spec())
    assert (len(found.train), found.notes[-1]) == (3, "train: 3 rows without a text or a label are left out")


VALUES = np.arange(12.0)
TIMES = pd.date_range("2024-01-01", periods=12)


def test_columns_of_one_name_are_numbered() -> None:
    twice = pd.DataFrame(np.column_stack([VALUES, -VALUES]), TIMES, columns=["a", "a"])
    assert from_python(twice, spec("forecasting")).codec.columns == ("a", "a.1")


def test_levels_of_an_index_are_columns() -> None:
    frame = pd.DataFrame({"a": VALUES}, index=pd.MultiIndex.from_product([["p", "q"], TIMES[:6]]))
    for data in ({}, {"series": "level_0"}):
        found = from_python(frame, spec("forecasting", **data))
        assert (found.train.names, found.codec.series, found.codec.time) == (("p", "q"), ("level_0",), "level_1")
