"""Which columns of a table are read, which are not and why; and tables that are not what their name says."""

from __future__ import annotations

from datetime import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from carrywave.data.prepare import Prepared, prepare
from carrywave.data.tables.columns import ColumnChoice
from carrywave.data.tables.table import arrange
from carrywave.errors import DataError
from carrywave.spec.spec import Spec


def run(folder: Path, content: str | bytes, name: str = "t.csv", task: str = "forecasting", **data: Any) -> Prepared:
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    values = {"horizon": 1, "share": 0, "cache": str(folder / "cache"), "train": str(folder / name), **data}
    return prepare(Spec.model_validate({"task": task, "data": values}))


TOLD: list[tuple[str, dict[str, Any], str]] = [
    ("date,a,b\n2024-01-01,1,2\n2024-01-02,1,2\n", {}, "reading a, b, ordered by date; forecast: all of them (data.targets chooses)"),
    ("date,a,b\n2024-01-01,1,2\n2024-01-02,1,2\n", {"targets": ["b"]}, "reading a, b, ordered by date; forecast: b"),
    (
        "date,a,place,seen,c\n2024-01-01,1,x,2024-01-01,1 kW\n2024-01-02,1,y,2024-01-02,2 kW\n",
        {},
        "reading a, ordered by date; ignored: place (text), seen (times), c (text)",
    ),
    (",date,a\n0,2024-01-01,1\n1,2024-01-02,1\n", {}, "reading a, ordered by date; ignored: '' (a row index)"),
    ("Unnamed: 0,a\n7,1\n3,1\n", {}, "reading a; ignored: Unnamed: 0 (a row index)"),
    (",a\n2024-01-01,1\n2024-01-02,1\n", {}, "reading a, ordered by ''"),
    ("Store,Date,a\nx,2024-01-01,1\ny,2024-01-02,1\n", {}, "reading a, ordered by Date; ignored: Store (text)"),
    ("place,day,a\nx,2024-01-01,1\ny,2024-01-02,1\n", {}, "reading a, ordered by day; ignored: place (text)"),
    ("code,a\nA,1\nB,1\n17,2\n", {}, "reading a; ignored: code (text, 33% of it numeric)"),
    ("date,a,b\n2024-01-01,1,2\n2024-01-02,1,2\n", {"columns": ["b"]}, "reading b, ordered by date; ignored: a (not in data.columns)"),
    ("shop,day,a\nx,1,1\nx,2,1\ny,1,1\ny,2,1\n", {"series": "shop", "time": "day"}, "reading a, ordered by day, one series per shop"),
]


@pytest.mark.parametrize(("text", "data", "told"), TOLD)
def test_what_is_read_is_said(tmp_path: Path, text: str, data: dict[str, Any], told: str) -> None:
    first, again = run(tmp_path, text, **data), run(tmp_path, text, **data)
    assert first.notes[0] == f"{tmp_path / 't.csv'}: {told}"
    assert again.notes == first.notes  # also where the cache has it


def test_many_columns_are_cut_short(tmp_path: Path) -> None:
    names = [f"c{number}" for number in range(20)]
    rows = ",".join("1" * len(names))
    assert (
        run(tmp_path, f"{','.join(names)}\n{rows}\n{rows}\n")
        .notes[0]
        .endswith("c5, c6, c7 and 12 more; forecast: all of them (data.targets chooses)")
    )


def test_fields_that_are_not_read_are_said(tmp_path: Path) -> None:
    row = '{"id": 7, "steps": [1, 2], "label": "a", "source": "x"}\n'
    found = run(tmp_path, row, "t.jsonl", "classification")
    assert found.notes == (f"{tmp_path / 't.jsonl'}: reading steps and label; ignored: id, source",)
    assert run(tmp_path, '{"steps": [1, 2], "label": "a"}\n', "u.jsonl", "classification").notes == ()


DAYS = ("2024-01-01", "2024-01-02")
REFUSED: list[tuple[str | bytes, str]] = [
    ("date,store,a\n" + "".join(f"{day},{store},1\n" for store in "xy" for day in DAYS), "repeats 2024-01-01; set data.series=store"),
    ("date,store,a\n" + "".join(f"{day},{store},1\n" for store in (1, 2) for day in DAYS), "repeats 2024-01-01; set data.series=store"),
    (
        "date,store,item,a\n" + "".join(f"{day},{store},{item},1\n" for store in "xy" for item in "uv" for day in DAYS),
        "combine columns store and item into one that names each series, and set data.series to it",
    ),
    ("date,a\n2024-01-01,1\n2024-01-01,2\n", "repeats 2024-01-01; keep one row per time"),
    ("date,a\n" + "".join(f"{day},{a}\n" for day in DAYS for a in (1, 2)), "keep one row per time"),  # the only column is forecast
    (
        "date,store,a\n" + "".join(f"{day},{store},1\n" for store in ("x", "") for day in DAYS),
        "repeats 2024-01-01; keep one row per time",  # a column with empty cells names no series
    ),
    (
        "date,a\n" + "".join(f"2024-10-27 {time},1\n" for time in ("01:30", "02:00", "02:30", "02:00", "02:30", "03:00")),
        r"row 4, .* repeats 2024-10-27 02:00:00; if clocks were set back then, .* with their offset \(2024-10-27 02:00:00\+01:00\)",
    ),
    ("date,a\n" + "".join(f"2024-10-{day} 00:00,1\n" for day in (26, 27, 27)), "repeats 2024-10-27 00:00:00; keep one row per time"),
    ("date,a\n2024-10-27 12:00,1\n2024-10-27 12:00,2\n", "repeats 2024-10-27 12:00:00; keep one row per time"),
    (
        "date,a\n" + "".join(f"2024-10-{day} 01:00,1\n" for day in (11, 11, 12, 12)) + "2024-10-13 02:00,1\n",
        "repeats 2024-10-11 01:00:00; keep one row per time",
    ),
    ("date,time,a\n2024-01-01,00:00:00,1\n2024-01-01,01:00:00,2\n", "combine columns date and time into one"),
    ("date;a|b\n2024-01-01;1\n2024-01-02;2;3\n", "columns seem to be separated by `;`, but not equally many in every row"),
    ("date;a,b\n2024-01-01;1,5\n", "columns may be separated by commas or by `;`; set data.separator"),
    ("date,ort,a\n2024-01-01,Köln,1\n".encode("latin-1"), r"t\.csv:2: .*K\\xf6ln.* is not valid utf-8; set data\.encoding"),
    ("date,a\n2024-01-01,1\n2024-01-02,n.v.\n2024-01-03,2\n", "row 2, column a is 'n.v.', which is text, not a finite number"),
    ('date,a\n2024-01-01,"1,200"\n', r"column a contains '1,200', whose comma may stand before decimals; set data\.decimal=, or"),
]


@pytest.mark.parametrize(("content", "message"), REFUSED)
def test_what_cannot_be_right_is_refused_with_a_remedy(tmp_path: Path, content: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        run(tmp_path, content)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("text|label\nab|1,5\n", r"row 1, column label is '1,5', which is text, not a number; set data\.decimal=, if"),
        ("text,label\nab,1\nba,high\n", r"row 2, column label is 'high', which is text, not a number; correct it"),
        ("text,label\nab,\n", "the field label is empty; fill it in, or remove the row"),
        ("text,label\nKöln,1\n".encode("latin-1"), r"t\.csv:2: .* is not valid utf-8"),
    ],
)
def test_rows_of_a_csv_file(tmp_path: Path, content: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        run(tmp_path, content, task="regression")


def kaggle() -> Any:
    """Sales by store and item: whole numbers, different on every day."""
    draw = np.random.default_rng(0)
    days = pd.date_range("2024-01-01", periods=60)
    rows = [(day, store, item, int(draw.integers(0, 100_000))) for store in (1, 2) for item in (1, 2, 3) for day in days]
    return pd.DataFrame(rows, columns=["date", "store", "item", "sales"])


@pytest.mark.parametrize(
    ("series", "remedy"),
    [
        (None, "combine columns store and item into one that names each series, and set data.series to it"),
        ("store", "combine columns store and item into one that names each series, and set data.series to it"),
        ("item", "combine columns item and store into one that names each series, and set data.series to it"),
    ],
)
def test_what_is_measured_is_not_taken_for_the_name_of_a_series(series: str | None, remedy: str) -> None:
    with pytest.raises(DataError, match=f"repeats .*; {remedy}$"):
        arrange(pa.Table.from_pandas(kaggle(), preserve_index=False), "t", ColumnChoice(series=series))
    one = kaggle().query("store == 1")
    with pytest.raises(DataError, match=r"repeats 2024-01-01 00:00:00; set data\.series=item$"):
        arrange(pa.Table.from_pandas(one, preserve_index=False), "t", ColumnChoice())
    twice = pd.concat([kaggle(), kaggle()])
    with pytest.raises(DataError, match=r"repeats .*; keep one row per time$"):
        arrange(pa.Table.from_pandas(twice, preserve_index=False), "t", ColumnChoice(series=series))


@pytest.mark.parametrize(
    ("label", "clock"),
    [
        ("Time", ["00:00", "01:00", "02:00"]),
        ("Time", ["1:00 AM", "2:00 PM", "3:00 PM"]),
        ("hour", [0, 1, 2]),
        ("at", [time(1), time(2), time(3)]),
    ],
)
def test_a_clock_is_joined_to_the_days_and_names_no_series(label: str, clock: list[Any]) -> None:
    days = [day for day in ("2024-01-01", "2024-01-02", "2024-01-03") for _ in clock]
    table = pa.table({"Date": days, label: clock * 3, "load": np.arange(9.0)})
    with pytest.raises(DataError, match=f"repeats 2024-01-01; combine columns Date and {label} into one, such as 2024-01-31 23:00:00$"):
        arrange(table, "t", ColumnChoice())
