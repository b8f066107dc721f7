"""Covariates of series: known ahead, calendar, categories and static columns, as arrays; and every way to misuse them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from carrywave.data.codec import Codec
from carrywave.data.loader import build
from carrywave.data.order import Cursor, Window
from carrywave.data.prepare import Prepared
from carrywave.data.python_inputs import from_python, read_python
from carrywave.data.tables.calendar import FEATURES, calendar_columns, calendar_features
from carrywave.errors import DataError, SpecError
from carrywave.spec.load import parse
from carrywave.spec.spec import Spec
from carrywave.spec.step_inputs import step_inputs
from carrywave.tasks.task import Task


def spec(**data: Any) -> Spec:
    values = {"horizon": 2, "share": 0, "standardize": False, "train": None, **data}
    return parse({"task": "forecasting", "data": values, "batch": {"lanes": 2, "steps": 3}, "model": {"hidden": 4, "layers": 1}})


def shops(rows: int = 6) -> pd.DataFrame:
    """Two shops; y counts up, price is ten times as much, the promotion changes every day."""
    parts = []
    for name, size, region, low in (("p", 3.0, "north", 0), ("q", 5.0, "south", 100)):
        y = np.arange(low, low + rows, dtype=float)
        days = pd.date_range("2024-01-01", periods=rows)
        promo = np.array(["none", "tv", "web"])[np.arange(rows) % 3]
        parts.append(pd.DataFrame({"unique_id": name, "ds": days, "y": y, "price": 10 * y, "promo": promo, "region": region, "size": size}))
    return pd.concat(parts, ignore_index=True)


ALL = {"known": ["price", "promo"], "categorical": ["promo"], "static": ["region", "size"], "calendar": ["weekday", "weekend"]}


def prepared(frame: pd.DataFrame, **data: Any) -> tuple[Prepared, Spec]:
    asked = spec(**data)
    return from_python(frame, asked), asked


def test_calendar_features_are_those_of_pandas() -> None:
    days = pd.date_range("2023-12-28 00:17", periods=2000, freq="7h")
    wanted: dict[str, tuple[Any, float]] = {
        "minute": (days.minute, 60),
        "hour": (days.hour, 24),
        "weekday": (days.day_of_week, 7),
        "monthday": (days.day - 1, 31),
        "yearday": (days.day_of_year - 1, 366),
        "month": (days.month - 1, 12),
        "quarter": (days.quarter - 1, 4),
    }
    names = list(FEATURES)
    found = dict(zip(calendar_columns(names), calendar_features(names, days.to_numpy().astype("datetime64[us]")).T, strict=True))
    for name, (position, cycle) in wanted.items():
        angle = 2 * np.pi * np.asarray(position) / cycle
        np.testing.assert_allclose(found[f"{name}_sin"], np.sin(angle), atol=1e-12)
        np.testing.assert_allclose(found[f"{name}_cos"], np.cos(angle), atol=1e-12)
    np.testing.assert_array_equal(found["weekend"], days.day_of_week >= 5)


def test_a_step_holds_what_the_model_is_built_for() -> None:
    found, asked = prepared(shops(), **ALL, season=2, residual="season")
    codec = found.codec
    assert codec.columns == ("y", "price", "size", "weekday_sin", "weekday_cos", "weekend")
    assert (codec.targets, codec.categorical, codec.categories) == ((0,), ("promo", "region"), (("none", "tv", "web"), ("north", "south")))
    assert Codec.from_json(codec.to_json()) == codec
    task = Task.of(asked, codec, found.facts, found.train)
    view = task.part("train", found.train).view
    window = Window(1, np.array([1]), np.array([2]), np.array([1]), np.array([True]))
    step = build(view, window, Cursor(0, 0)).inputs[0, 0].tolist()
    # The third day of shop q, a Wednesday: numbers, changes of y and price over two days, prices ahead, categories, promotions ahead.
    angle = 2 * np.pi * 2 / 7
    numbers = [102, 1020, 5, np.sin(angle), np.cos(angle), 0, 2, 20, 1030, 1040]
    assert step == pytest.approx([*numbers, 3, 2, 1, 2], abs=1e-6)
    inputs = step_inputs(asked, found.facts)
    assert (inputs.numbers, inputs.tables, inputs.places) == (10, ((4, 2), (3, 2)), (0, 1, 0, 0))
    model = task.model()
    assert model.lstm.input_size == inputs.width == 10 + 4 * 2
    assert sum(table.numel() for table in model.encoder.tables) == inputs.parameters  # type: ignore[union-attr]


def test_static_columns_keep_what_tells_series_apart() -> None:
    """Scaled by its own series alone, a constant would be 0 in all of them."""
    found, _ = prepared(shops(), **ALL, standardize=True)
    sizes = found.train.inputs[:, 2]
    assert np.unique(sizes).tolist() == [-1.0, 1.0]
    np.testing.assert_allclose(found.train.inputs[:6, 0], found.train.inputs[6:, 0], atol=1e-6)  # y has the scale of its series


def test_rows_ahead_are_read_where_they_are_known_and_nowhere_else() -> None:
    frame = shops(8)
    ends = frame["ds"] > "2024-01-06"
    frame.loc[ends, ["y", "region", "size"]] = np.nan
    found, asked = prepared(frame, **ALL)
    assert found.train.lengths.tolist() == [6, 6]
    assert found.train.starts.tolist() == [0, 8]
    given = read_python(frame, found.codec, asked, labelled=False)
    view = Task.of(asked, found.codec, found.facts, found.train).unlabelled(given)
    window = Window(6, np.array([0, 1]), np.zeros(2, np.int64), np.full(2, 6), np.ones(2, np.bool_))
    inputs = build(view, window, Cursor(0, 0)).inputs
    assert bool(inputs.isfinite().all())
    assert inputs[-1, :, 6:8].tolist() == [[60, 70], [1060, 1070]]  # the prices of the two days ahead


def test_values_that_train_does_not_contain_are_unknown_and_told() -> None:
    found, asked = prepared(shops(), **ALL)
    other = shops().assign(promo=["radio", "tv"] * 6, region="east")
    given = read_python(other, found.codec, asked)
    assert given.inputs[:2, -2:].tolist() == [[0, 0], [2, 0]]
    assert given.notes == (
        "data: column promo has value 'radio' in 6 rows that train does not contain; counted as unknown",
        "data: column region has value 'east' in 12 rows that train does not contain; counted as unknown",
    )
    rows = Task.of(asked, found.codec, found.facts, found.train).model().encoder.tables  # type: ignore[union-attr]
    assert all(not table[0].any() for table in rows)


def test_values_only_in_the_rows_held_out_are_unknown_there() -> None:
    frame = shops(20)
    frame.loc[frame["ds"] > "2024-01-18", "promo"] = "radio"
    found, _ = prepared(frame, **ALL, share=0.1)
    assert found.codec.categories[0] == ("none", "tv", "web")
    assert "valid: column promo has value 'radio' in 4 rows" in found.notes[-1]


def changed(**columns: Any) -> pd.DataFrame:
    return shops().assign(**columns)


@pytest.mark.parametrize(
    ("frame", "data", "message"),
    [
        (shops(), {"known": ["prise"]}, r"train has no column 'prise' \(data\.known\); did you mean price"),
        (shops(), {"static": ["price"]}, r"column price \(data\.static\) changes within series p; write one value"),
        (shops(), {"known": ["promo"]}, r"column promo \(data\.known\) contains text, not numbers; add it to data\.categorical"),
        (shops(), {"categorical": ["ds"]}, r"column ds \(data\.categorical\) holds the times; remove it"),
        (changed(x=0.5), {"categorical": ["x"]}, r"column x \(data\.categorical\) contains fractions"),
        (changed(ds=list(range(6)) * 2), {"calendar": ["hour"]}, r"data\.calendar needs dates, but column ds contains 0; write dates as"),
        (changed(hour_sin=1.0), {"calendar": ["hour"]}, "has a column hour_sin, which data.calendar adds; rename it"),
        (changed(promo=[None] * 12), {"categorical": ["promo"]}, "row 1, column promo is empty or NaN, not a category; fill the gap"),
        (changed(price=[1.0, None] * 6), {"known": ["price"]}, "row 2, column price is empty or NaN"),
        (
            changed(y=[None] * 6 + [1.0] * 6),
            {"known": ["price"], "targets": ["y"]},
            "series p has no row with a measured value; add its past",
        ),
        (shops(), {"columns": ["price"], "known": ["price"]}, "no column is left to forecast; set data.targets"),
        (np.zeros((9, 2)), {"static": ["0"]}, r"train is a list of numbers, but data\.static names columns; use a CSV"),
        (np.zeros((9, 2)), {"frequency": "D"}, r"train is a list of numbers without times and names, but data\.frequency is D; use a CSV"),
        (np.zeros((9, 2)), {"series": "shop"}, r"train is a list of numbers without times and names, but data\.series is shop; use a CSV"),
    ],
)
def test_misuse(frame: Any, data: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as refused:
        prepared(frame, **data)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (shops(), r"price, promo must be known for 2 steps after the last values of series p, but 0 are given; add rows with their times"),
        (shops(8).assign(y=[0.0] * 6 + [None] * 2 + [0.0] * 7 + [None]), "after the last values of series q, but 1 are given"),
        (shops(9).assign(y=([0.0] * 6 + [None] * 3) * 2).drop(index=6), "row 1 after the last values of series p is not at the next time"),
    ],
)
def test_what_is_known_must_reach_to_the_end_of_the_horizon(frame: pd.DataFrame, message: str) -> None:
    found, asked = prepared(shops(), **ALL)
    with pytest.raises(DataError, match=message):
        read_python(frame, found.codec, asked, labelled=False)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"known": ["a"], "targets": ["a"]}, r"targets and data\.known both name 'a', but what is known needs no forecast"),
        ({"known": ["a"], "static": ["a"]}, r"known and data\.static both name 'a'"),
        ({"static": ["a", "a"]}, "names a column twice"),
        ({"calendar": ["hours"]}, "data.calendar"),
    ],
)
def test_settings_that_contradict_each_other(data: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        spec(**data)


def test_only_for_series() -> None:
    with pytest.raises(SpecError, match=r"data\.static is for forecasting, not for language; remove it"):
        parse({"data": {"static": ["a"]}})
