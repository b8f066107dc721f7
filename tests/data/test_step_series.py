"""Series with targets at every step: what is read of tables and rows, how parts are cut and scaled, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from carrywave.data.prepare import Prepared, from_python, prepare, read_python
from carrywave.errors import DataError
from carrywave.spec.load import parse
from carrywave.spec.spec import Spec


def spec(**data: Any) -> Spec:
    return parse({"task": "regression", "data": {"each_step": True, **data}, "batch": {"lanes": 2, "steps": 4}})


def table(rows: int = 20, series: str = "ab") -> pd.DataFrame:
    draw = np.random.default_rng(1)
    parts = []
    for place, name in enumerate(series):
        days = pd.date_range("2024-01-01", periods=rows)
        values = {"rain": draw.normal(5, 2, rows), "size": 10.0 * (place + 1), "flow": draw.normal(100, 30, rows) * (place + 1)}
        parts.append(pd.DataFrame({"unique_id": name, "ds": days, **values}))
    return pd.concat(parts, ignore_index=True)


def read(frame: pd.DataFrame, **data: Any) -> Prepared:
    return from_python({"train": frame}, spec(targets=["flow"], **data))


def test_inputs_and_targets_are_apart_and_have_one_scale() -> None:
    frame = table()
    frame.loc[[3, 25], "flow"] = np.nan
    found = read(frame, split=[15, 5], static=["size"])
    codec, train = found.codec, found.train
    assert codec.columns == ("rain", "size")
    assert codec.step_targets == ("flow",)
    trained = frame.groupby("unique_id").head(15)
    assert codec.target_mean == pytest.approx([trained.flow.mean()], rel=1e-12)
    assert codec.target_std == pytest.approx([trained.flow.std(ddof=0)], rel=1e-12)
    assert codec.std == pytest.approx([trained.rain.std(ddof=0), trained["size"].std(ddof=0)], rel=1e-12)
    assert (found.facts.features, found.facts.outputs, found.facts.sequences) == (2, 1, 2)
    assert train.tags is not None
    targets = codec.restore(np.asarray(train.tags, np.float64))[:, 0]
    np.testing.assert_allclose(targets, frame.flow, rtol=1e-5)  # NaN where there are none
    assert [train.starts.tolist(), train.lengths.tolist()] == [[0, 20], [15, 15]]
    assert found.valid is not None
    assert found.valid.warm is not None
    assert [found.valid.starts.tolist(), found.valid.lengths.tolist(), found.valid.warm.tolist()] == [[0, 20], [20, 20], [15, 15]]
    assert train.spreads is not None
    own = [each.flow.std(ddof=0) / codec.target_std[0] for _, each in trained.groupby("unique_id")]
    np.testing.assert_allclose(train.spreads[:, 0], own, rtol=1e-9)
    np.testing.assert_array_equal(found.valid.spreads, train.spreads)  # the deviation in train is what counts


def test_warm_up_is_not_scored_anywhere() -> None:
    found = read(table(), split=[12, 8], warmup=5)
    assert found.train.warm is not None
    assert found.train.warm.tolist() == [5, 5]
    assert found.valid is not None
    assert found.valid.warm is not None
    assert found.valid.warm.tolist() == [12, 12]  # the rows before it
    with pytest.raises(
        DataError, match=r"no step of train has a target after the first 20 \(data.warmup\); add rows, or lower data.warmup"
    ):
        read(table(), split=[15, 5], warmup=20)


def test_series_without_targets_are_left_out_and_told() -> None:
    frame = table(series="abc")
    frame.loc[frame.unique_id == "b", "flow"] = np.nan
    frame.loc[(frame.unique_id == "c") & (frame.ds >= "2024-01-16"), "flow"] = np.nan
    found = read(frame, split=[15, 5])
    assert found.train.names == ("a", "c")
    assert found.valid is not None
    assert found.valid.names == ("a",)
    assert [line for line in found.notes if "left out" in line] == [
        "train: 1 of 3 series have no target in train and are left out of it",
        "train: 2 of 3 series have no target in valid and are left out of it",
    ]


def test_missing_inputs() -> None:
    frame = table()
    frame.loc[[0, 4, 5], "rain"] = np.nan
    for method, first in ({}, frame.rain[:20].mean()), ({"missing": "forward"}, frame.rain[1]):
        found = read(frame, **method)
        assert any("empty cells: rain 3 (data.missing=" in line for line in found.notes)
        rain = found.train.inputs[:7, 0] * found.codec.std[0] + found.codec.mean[0]
        np.testing.assert_allclose(rain, [first, *frame.rain[1:4], frame.rain[3], frame.rain[3], frame.rain[6]], rtol=1e-5)  # float32
    told = read(frame, missing="mask")
    assert told.codec.columns == ("rain", "size", "rain_seen", "size_seen", "rain_age", "size_age")
    rows = told.train.inputs[:7]
    assert rows[:, 2].tolist() == [0, 1, 1, 1, 0, 0, 1]
    np.testing.assert_allclose(rows[:, 4], np.log1p([1, 0, 0, 0, 1, 2, 0]), rtol=1e-6)
    assert rows[0, 0] == 0.0
    assert rows[4, 0] == rows[5, 0] == rows[3, 0]
    static = read(frame, missing="mask", static=["size"])
    assert static.codec.columns == ("rain", "size", "rain_seen", "rain_age")
    assert static.codec.measured == ("rain", "size")


def test_rows_of_steps(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [{"steps": [[float(n), 1.0]] * 6, "labels": [n, None, n, n + 1, n, n]} for n in range(8)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    asked = spec(train=str(tmp_path / "train.jsonl"), cache=str(tmp_path / "cache"), share=0.25)
    found = prepare(asked)
    assert (len(found.train), len(found.valid or ())) == (6, 2)  # whole rows are held out
    assert found.train.lengths.tolist() == [6] * 6
    assert found.codec.columns == ("0", "1")
    assert found.codec.step_targets == ("label",)
    alike = from_python({"train": ([each["steps"] for each in lines], [each["labels"] for each in lines])}, spec(share=0.25))
    np.testing.assert_array_equal(alike.train.inputs, found.train.inputs)
    np.testing.assert_array_equal(np.asarray(alike.train.tags), np.asarray(found.train.tags))
    given = read_python([{"steps": [[1.0, 2.0]] * 3}], found.codec, asked, labelled=False)
    assert (given.lengths.tolist(), given.tags) == ([3], None)


def test_a_step_of_which_nothing_is_there_may_be_null() -> None:
    """Also where steps have several numbers, and where a whole row has none."""
    rows = [
        {"steps": [None, None], "labels": [None, None]},
        {"steps": [[1.0, 2.0], None], "labels": [None, [3.0, 4.0]]},
        {"steps": [[5.0, None], [7.0, 8.0]], "labels": [[1.0, None], [9.0, 10.0]]},
    ]
    found = from_python({"train": rows, "valid": rows}, spec(missing="mask"))
    assert found.codec.columns == ("0", "1", "0_seen", "1_seen", "0_age", "1_age")
    assert found.train.tags is not None
    targets = found.codec.restore(np.asarray(found.train.tags, np.float64))
    np.testing.assert_allclose(targets[2:], [[np.nan, np.nan], [3, 4], [1, np.nan], [9, 10]], rtol=1e-6)
    for name in ("steps", "labels"):
        with pytest.raises(DataError, match=rf"a step has 1 numbers in {name}, but others have 2; use 2 in every step"):
            from_python({"train": [*rows, rows[1] | {name: [1.0, 1.0]}]}, spec(missing="mask"))


def test_weights_of_steps() -> None:
    frame = table().assign(trust=np.linspace(0, 1, 40))
    found = read(frame, weight="trust")
    assert found.codec.columns == ("rain", "size")
    assert found.train.step_weights is not None
    np.testing.assert_allclose(found.train.step_weights, frame.trust, rtol=1e-6)
    asked = spec(targets=["flow"], weight="trust")
    with pytest.raises(DataError, match=r"has no column 'trust' \(data.weight\)"):
        read_python(table(), found.codec, asked)
    assert read_python(table(), found.codec, asked, labelled=False).step_weights is None
    with pytest.raises(DataError, match=r"train: column flow \(data.targets\) is empty or of weight 0 in all rows of train"):
        read(frame.assign(trust=0.0), weight="trust")
    rows = [{"steps": [1.0, 2.0], "labels": [1.0, 2.0]}, {"steps": [1.0, 2.0], "labels": [3.0, 2.0], "weight": [0.5, 2.0]}]
    weighed = from_python({"train": rows}, spec(share=0.0, weight="weight")).train.step_weights
    assert weighed is not None
    assert weighed.tolist() == [1.0, 1.0, 0.5, 2.0]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"steps": [1.0, 2.0], "labels": [1.0]}], "item 0: 1 labels for 2 steps; use one per step"),
        ([{"steps": [1.0], "labels": [float("inf")]}], "step 0, column 0 of labels is inf.*correct it"),
        ([{"steps": [1.0]}], "train is empty"),
        (
            [{"steps": [[1.0]], "labels": [1.0]}, {"steps": [[1.0, 2.0]], "labels": [1.0]}],
            "a step has 2 numbers in steps, but others have 1",
        ),
        ([{"unique_id": "x", "steps": [1.0], "labels": [1.0]}] * 2, "two rows are named x"),
        ([{"steps": [1.0, 2.0], "labels": [None, None]}], r"column label \(data.targets\) is empty in all rows of train"),
    ],
)
def test_rows_that_are_refused(rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_python({"train": rows}, spec(share=0.0))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "train is a table, but data.targets does not say what to estimate at every step; set it to a column or several"),
        ({"targets": ["flux"]}, r"no column 'flux' \(data.targets\); use one of unique_id, ds, rain, size, flow"),
        ({"targets": ["unique_id"]}, "column unique_id holds the names of series; remove it from what the other keys name"),
        ({"targets": ["rain", "size", "flow"]}, "nothing is left to read besides rain, size, flow"),
    ],
)
def test_tables_that_are_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_python({"train": table()}, spec(**data))
