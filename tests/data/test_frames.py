"""Columns and frames are read by position, whatever their index says."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from carrywave.data.files.fields import as_plain
from carrywave.data.python_inputs import from_python
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


@pytest.mark.parametrize("dtype", ["str", "string", "category", "object", "string[pyarrow]"])
def test_labels_as_text(dtype: str) -> None:
    assert labels((STEPS, pd.Series(WORDS, index=SHUFFLED).astype(dtype))) == LABELS


COLUMNS: dict[str, Any] = {
    "pandas index": pd.Index(LABELS),
    "pandas categorical": pd.Categorical(WORDS),
    "pandas frame": pd.DataFrame({"label": LABELS}, index=SHUFFLED),
    "polars": pl.Series(LABELS),
    "polars text": pl.Series(WORDS),
    "polars categorical": pl.Series(WORDS, dtype=pl.Categorical),
    "polars frame": pl.DataFrame({"label": LABELS}),
    "arrow": pa.array(LABELS),
    "arrow chunks": pa.chunked_array([WORDS[:2], WORDS[2:]]),
    "arrow table": pa.table({"label": WORDS}),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_columns_of_every_library(kind: str) -> None:
    assert labels((STEPS, COLUMNS[kind])) == LABELS


INPUTS: dict[str, Any] = {
    "frames": [pd.DataFrame(steps, index=[9, 2, 5, 1]) for steps in STEPS],
    "polars frames": [pl.DataFrame(steps) for steps in STEPS],
    "series of arrays": pd.Series(list(STEPS), index=SHUFFLED),
    "a column of a frame": pd.DataFrame({"id": range(6), "steps": list(STEPS)}, index=SHUFFLED),
    "nullable numbers": [pd.DataFrame(steps).astype("Float64") for steps in STEPS],
}


@pytest.mark.parametrize("kind", INPUTS)
def test_inputs_are_read_by_position(kind: str) -> None:
    found = from_python((INPUTS[kind], LABELS), spec(standardize=False))
    np.testing.assert_array_equal(found.train.inputs, STEPS.reshape(-1, 2).astype(np.float32))


@pytest.mark.parametrize("make", [lambda rows: pd.DataFrame(rows, index=SHUFFLED), lambda rows: pl.DataFrame(rows)])
def test_a_frame_of_numbers_holds_a_sequence_in_each_row(make: Any) -> None:
    found = from_python((make(STEPS[:, :, 0]), LABELS), spec(standardize=False))
    np.testing.assert_array_equal(found.train.inputs[:, 0], STEPS[:, :, 0].ravel().astype(np.float32))
    with pytest.raises(DataError, match="train item 0: steps cannot be read as numbers"):
        from_python((pd.DataFrame({"a": [1.0] * 6, "b": WORDS}), LABELS), spec())


def test_a_frame_of_cells_that_hold_matrices() -> None:
    frame = pd.DataFrame({"steps": list(STEPS), "label": LABELS}, index=SHUFFLED)
    found = from_python(frame, spec(standardize=False))
    np.testing.assert_array_equal(found.train.inputs, STEPS.reshape(-1, 2).astype(np.float32))
    assert labels(frame) == LABELS
    twice = from_python(pd.concat([frame, frame], axis=1), spec(standardize=False))  # the second columns are steps.1 and label.1
    np.testing.assert_array_equal(twice.train.inputs, found.train.inputs)


def test_targets_of_other_tasks() -> None:
    numbers = pd.DataFrame({"a": np.arange(6.0), "b": -np.arange(6.0)}, index=SHUFFLED)
    assert labels((STEPS, numbers), "regression") == [[value, -value] for value in range(6)]
    assert labels((STEPS, numbers["a"]), "regression") == [[value] for value in range(6)]
    tags = [pd.Series([0, 1, pd.NA, 0], index=[3, 2, 1, 0], dtype="Int64")] * 6
    found = from_python((list(STEPS), tags), spec("tagging"))
    assert found.train.tags is not None
    assert found.train.tags.tolist() == [0, 1, -100, 0] * 6


@pytest.mark.parametrize("missing", [pd.Series([1, None] * 3, dtype="Int64"), pl.Series([1, None] * 3), pd.Series(["a", None] * 3)])
def test_rows_with_a_missing_label_are_left_out(missing: Any) -> None:
    found = from_python((STEPS, missing), spec())
    assert (len(found.train), found.notes[-1]) == (3, "train: 3 rows without a text or a label are left out")


def test_masked_values_are_missing() -> None:
    masked = np.ma.masked_array([[1.0, 2.0], [3.0, 4.0]], mask=[[False, True], [False, False]])
    assert as_plain(masked) == [[1.0, None], [3.0, 4.0]]


def test_texts_in_a_column() -> None:
    texts = pd.Series(["ab", "ba"], index=[1, 0])
    assert from_python(texts, spec("language")).train.inputs.tolist() == [0, 1, 1, 0]
    assert from_python(pl.Series(["ab", "ba"]), spec("language")).train.inputs.tolist() == [0, 1, 1, 0]


VALUES = np.arange(12.0)
TIMES = pd.date_range("2024-01-01", periods=12)
FORECAST: dict[str, tuple[Any, str | None]] = {
    "shuffled index": (pd.Series(VALUES, index=np.random.default_rng(1).permutation(12)), None),
    "times": (pd.Series(VALUES, index=TIMES), "time"),
    "named times": (pd.DataFrame({"a": VALUES}, index=TIMES.rename("day")), "day"),
    "times backwards": (pd.Series(VALUES[::-1], index=TIMES[::-1]), "time"),
    "text of times": (pd.Series(VALUES, index=TIMES.strftime("%Y-%m-%d")), "time"),
    "periods": (pd.Series(VALUES, index=pd.period_range("2024-01", periods=12, freq="M")), "time"),
    "years": (pd.DataFrame({"a": VALUES}, index=pd.Index(range(1990, 2002), name="year")), "year"),
    "a time beside an index": (pd.DataFrame({"ds": TIMES, "a": VALUES}, index=pd.Index(range(12), name="row")), "ds"),
    "words": (pd.Series(VALUES, index=list("lkjihgfedcba")), None),
    "nullable": (pd.DataFrame({"a": VALUES}).astype("Float64"), None),
    "objects": (pd.DataFrame({"a": VALUES.astype(object)}), None),
    "decimals of a database": (pd.DataFrame({"day": TIMES, "a": [Decimal(str(value)) for value in VALUES]}), "day"),
    "polars": (pl.DataFrame({"when": TIMES.to_pydatetime().tolist(), "a": VALUES}), "when"),
    "polars column": (pl.Series(VALUES), None),
    "arrow": (pa.table({"date": TIMES.strftime("%Y-%m-%d"), "a": VALUES}), "date"),
}


@pytest.mark.parametrize("kind", FORECAST)
def test_series_to_forecast(kind: str) -> None:
    data, time = FORECAST[kind]
    found = from_python(data, spec("forecasting", standardize=False))
    assert (found.train.inputs.tolist(), found.codec.time, len(found.codec.columns)) == ([[value] for value in VALUES], time, 1)


def test_columns_of_one_name_are_numbered() -> None:
    twice = pd.DataFrame(np.column_stack([VALUES, -VALUES]), TIMES, columns=["a", "a"])
    assert from_python(twice, spec("forecasting")).codec.columns == ("a", "a.1")


def test_levels_of_an_index_are_columns() -> None:
    frame = pd.DataFrame({"a": VALUES}, index=pd.MultiIndex.from_product([["p", "q"], TIMES[:6]]))
    for data in ({}, {"series": "level_0"}):
        found = from_python(frame, spec("forecasting", **data))
        assert (found.train.names, found.codec.series, found.codec.time) == (("p", "q"), ("level_0",), "level_1")
