"""Missing cells and rows filled as pandas fills them, and told; what cannot be filled is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from carrywave.data.prepare import Prepared, prepare
from carrywave.data.python_inputs import from_python
from carrywave.errors import DataError, SpecError
from carrywave.spec.load import parse


def read(folder: Path, data: str | pd.DataFrame, **settings: Any) -> Prepared:
    values = {"horizon": 2, "cache": str(folder / "cache"), "standardize": False, "share": 0, **settings}
    if isinstance(data, str):
        (folder / "t.csv").write_text(data)
        return prepare(parse({"task": "forecasting", "data": {**values, "train": str(folder / "t.csv")}}))
    return from_python(data, parse({"task": "forecasting", "data": {**values, "train": None}}))


def filled(frame: pd.DataFrame, method: str, frequency: str) -> np.ndarray[Any, Any]:
    """As pandas fills each series: on a regular index, then by the method, from the nearest value at the ends."""
    parts = []
    for _, part in frame.groupby("unique_id", sort=False):
        column = part.set_index("ds")["y"].asfreq(frequency)
        column = column.ffill() if method == "forward" else column.interpolate() if method == "interpolate" else column.fillna(0.0)
        parts.append(column.bfill().to_numpy())
    return np.concatenate(parts)


@pytest.mark.parametrize("method", ["forward", "interpolate", "zero"])
@pytest.mark.parametrize("frequency", ["h", "D", "MS", "B"])
def test_cells_and_rows_are_filled_as_pandas_fills_them(tmp_path: Path, method: str, frequency: str) -> None:
    draw = np.random.default_rng(5)
    parts = []
    for name, rows in (("p", 40), ("q", 30)):
        part = pd.DataFrame(
            {"unique_id": name, "ds": pd.date_range("2023-12-01", periods=rows, freq=frequency), "y": draw.normal(size=rows)}
        )
        part.loc[[0, 7, 8, rows - 1], "y"] = np.nan
        parts.append(part.drop(index=[3, 20, 21]))
    frame = pd.concat(parts)
    found = read(
        tmp_path, frame.sample(frac=1.0, random_state=1).sort_values("unique_id", kind="stable"), missing=method, frequency=frequency
    )
    np.testing.assert_allclose(found.train.inputs[:, 0], filled(frame, method, frequency), rtol=1e-6)  # float32
    assert found.train.lengths.tolist() == [40, 30]
    told = " ".join(found.notes)
    assert f"6 missing rows are filled in (data.missing={method})" in told
    assert f"8 empty cells are filled (data.missing={method}; y: 8)" in told


def test_gaps_on_local_clocks_across_the_change_to_summer_time(tmp_path: Path) -> None:
    days = pd.date_range("2024-03-25", periods=12, freq="D", tz="Europe/Berlin")
    frame = pd.DataFrame({"ds": days, "y": np.arange(12.0)}).drop(index=[6, 7])  # the 31st has 23 hours
    found = read(tmp_path, frame, missing="interpolate")
    assert found.train.inputs[:, 0].tolist() == list(range(12))


def test_the_first_places_are_told(tmp_path: Path) -> None:
    text = "unique_id,ds,y\n" + "".join(f"q,2024-01-{day:02},{day}\n" for day in range(1, 9))
    text += "".join(f"p,2024-01-{day:02},{'' if day == 3 else day}\n" for day in (1, 2, 3, 4, 7, 8))
    found = read(tmp_path, text, missing="forward")
    assert found.notes[1:] == (
        f"{tmp_path}/t.csv: 2 missing rows are filled in (data.missing=forward), the first after 2024-01-04 in series p (column ds)",
        f"{tmp_path}/t.csv: 1 empty cell is filled (data.missing=forward; y: 1), the first in row 11",
    )
    assert found.train.inputs[8:, 0].tolist() == [1, 2, 2, 4, 4, 4, 7, 8]


def test_without_it_rows_beside_a_gap_are_neighbours_and_empty_cells_are_refused(tmp_path: Path) -> None:
    days = [1, 2, 3, 4, 7, 8]
    found = read(tmp_path, "ds,y\n" + "".join(f"2024-01-{day:02},{day}\n" for day in days))
    assert found.train.inputs[:, 0].tolist() == days
    assert "so set data.missing to fill it in" in found.notes[1]
    with pytest.raises(DataError, match=r"row 2, column y is empty or NaN, not a finite number; fill the gap, .* or set data\.missing"):
        read(tmp_path, "ds,y\n2024-01-01,1\n2024-01-02,\n2024-01-03,3\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "unique_id,ds,y,x\n" + "".join(f"{s},{t},1,{'' if s == 'q' else 2}\n" for s in "pq" for t in range(4)),
            "column x is empty throughout",
        ),
        ("ds,y\n" + "".join(f"{10_000_000 * (t > 3) + t},1\n" for t in range(9)), "rows are missing between 9, too many to fill in"),
        ("ds,y\n2024-01-01,1\n2024-01-02,x\n2024-01-03,2\n2024-01-04,3\n", "row 2, column y is 'x', which is text"),
    ],
)
def test_what_cannot_be_filled(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as refused:
        read(tmp_path, text, missing="forward")
    assert "\n" not in str(refused.value)


def test_only_for_series(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"data\.missing is for forecasting, not for language; remove it"):
        parse({"data": {"missing": "zero"}})


def long(**rows: int) -> str:
    return "unique_id,ds,y\n" + "".join(f"{name},{t},{t}\n" for name, count in rows.items() for t in range(count))


def test_short_series_are_left_out_and_named(tmp_path: Path) -> None:
    found = read(tmp_path, long(a=20, b=2, c=12, d=1), share=0.25)
    assert (found.train.names, found.codec.names, found.facts.sequences) == (("a", "c"), (), 2)
    assert found.valid is not None
    assert found.valid.names == ("a", "c")
    assert found.notes[1].endswith("t.csv: 2 of 4 series are too short for a horizon of 2 and left out of train: b (2 rows), d (1 row)")


def test_series_that_are_short_only_later_are_left_out_there(tmp_path: Path) -> None:
    found = read(tmp_path, long(a=40, b=10), split=[0.8, 0.1, 0.1], standardize=True)
    assert (found.train.names, found.codec.names) == (("a", "b"), ("a", "b"))
    assert found.valid is not None
    assert found.test is not None
    assert (found.valid.names, found.test.names) == (("a",), ("a",))
    assert [note for note in found.notes if "left out" in note] == [
        f"{tmp_path}/t.csv: 1 of 2 series is too short for a horizon of 2 and left out of {part}: b (10 rows)" for part in ("valid", "test")
    ]


def test_rows_of_split_leave_series_out_too(tmp_path: Path) -> None:
    found = read(tmp_path, long(a=20, b=9), split=[12, 4])
    assert found.train.names == ("a",)
    assert "too short for data.split and a horizon of 2 and left out of train: b (9 rows)" in found.notes[1]


def test_a_separate_file_leaves_out_its_own(tmp_path: Path) -> None:
    (tmp_path / "v.csv").write_text(long(b=2, a=9))
    found = read(tmp_path, long(a=20, b=9), valid=str(tmp_path / "v.csv"))
    assert found.valid is not None
    assert (found.valid.names, found.valid.starts.tolist(), found.valid.lengths.tolist()) == (("a",), [2], [9])
    assert found.notes[-1].endswith("v.csv: 1 of 2 series is too short for a horizon of 2 and left out of valid: b (2 rows)")


def test_nothing_left_is_the_end(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"series b has 2 rows in train, but a horizon of 2 needs 3, and no series has enough; reduce"):
        read(tmp_path, long(a=1, b=2))
