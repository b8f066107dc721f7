"""Sequences of numbers with a label, and series, as their archives write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from carrywave.data.formats.series_formats import arff, series_of_frame, ts, tsf
from carrywave.data.prepare import Prepared, prepare
from carrywave.spec.spec import Spec

TS = """#The title
@problemName JapaneseVowels
@timeStamps false
@univariate false
@classLabel true 1 2
@data
1.5,2,3:-1,-2,-3:1
4,?:-4,-5:2
"""
MONASH = """# Dataset Information
@relation M1
@attribute series_name string
@attribute start_timestamp date
@frequency monthly
@missing true
@data
T1:1979-01-01 00-00-00:417,?,360
T2:1980-02-29 00-00-00:1,2
"""


def prepared(folder: Path, file: str, content: str, **data: Any) -> Prepared:
    (folder / file).write_text(content)
    given = {"train": str(folder / file), "cache": str(folder / "cache"), "share": 0, "standardize": False, **data}
    return prepare(Spec.model_validate({"task": "classification", "data": given}))


def test_ts_has_dimensions_of_unequal_length() -> None:
    """Japanese vowels, of UEA; a missing value at the end is the one before."""
    read = ts(TS)
    assert read is not None
    assert [row["label"] for row in read.rows] == ["1", "2"]
    assert [row["steps"].tolist() for row in read.rows] == [[[1.5, -1], [2, -2], [3, -3]], [[4, -4], [4, -5]]]
    timed = ts("@problemName T\n@timeStamps true\n@classLabel true a\n@data\n(2007-01-01 00:00:00,241.97),(2007-01-01 00:01:00,1):a\n")
    assert timed is not None
    assert timed.rows[0]["steps"].tolist() == [[241.97], [1]]
    assert ts("a text with @data\n") is None


@pytest.mark.parametrize(
    ("attributes", "rows"),
    [
        ("@attribute att0 numeric\n@attribute att1 numeric\n@attribute target {1,2}\n", "1,2,1\n3,?,2\n"),
        ("@attribute R relational\n @attribute t1 numeric\n@end R\n@attribute c {1,2}\n", "'1,2\\n5,6',1\n'3,?\\n7,?',2\n"),
    ],
)
def test_arff_with_and_without_relations(attributes: str, rows: str) -> None:
    """GunPoint and, with several dimensions of unequal length, those of UEA."""
    read = arff(f"% a comment\n@relation Gun_Point\n\n{attributes}\n@data\n{rows}")
    assert read is not None
    several = "relational" in attributes
    assert [row["label"] for row in read.rows] == ["1", "2"]
    assert [row["steps"].tolist() for row in read.rows] == ([[[1, 5], [2, 6]], [[3, 7]]] if several else [[[1], [2]], [[3]]])


@pytest.mark.parametrize(("file", "separator"), [("GunPoint_TRAIN.tsv", "\t"), ("GunPoint_TRAIN", ","), ("GunPoint_TRAIN.txt", "   ")])
def test_tables_of_ucr(tmp_path: Path, file: str, separator: str) -> None:
    """The label comes first; shorter sequences are filled up at their ends, as PLAID's are; one missing within is interpolated."""
    rows = [["2", "0.5", "-1.5", "1e-3", "4.0"], ["1.0000000e+00", "1", "NaN", "3", "NaN"]] * 2
    found = prepared(tmp_path, file, "\n".join(separator.join(row) for row in rows) + "\n")
    assert (found.codec.labels, found.codec.columns) == (("1", "2"), ("0",))
    assert found.train.lengths.tolist() == [4, 3, 4, 3]
    np.testing.assert_allclose(found.train.inputs[:7, 0], [0.5, -1.5, 1e-3, 4, 1, 2, 3])


def test_a_table_of_texts_is_no_table_of_numbers() -> None:
    frame = pd.DataFrame([["1", "2", "3", "four"]], columns=list("abcd"))
    assert series_of_frame(frame, None) is None
    assert series_of_frame(frame[["a", "b"]], None) is None


def test_tsf_is_a_long_frame() -> None:
    """M1, of the Monash archive: series with starts of their own."""
    frame = tsf(MONASH)
    assert list(frame.columns) == ["series_name", "time", "value"]
    assert frame["series_name"].tolist() == ["T1"] * 3 + ["T2"] * 2
    assert frame["time"].dt.strftime("%Y-%m-%d").tolist() == ["1979-01-01", "1979-02-01", "1979-03-01", "1980-02-29", "1980-03-29"]
    np.testing.assert_array_equal(frame["value"], [417, np.nan, 360, 1, 2])
    tens = tsf(MONASH.replace("monthly", "10_minutes"))
    assert tens["time"].diff()[1] == pd.Timedelta("10min")


def test_tsf_without_times_counts_them() -> None:
    """Series of the archive that have no start, with two text attributes."""
    text = "@relation x\n@attribute series_name string\n@attribute state string\n@data\nT1:NSW:1,2\n"
    assert tsf(text).to_dict("list") == {"series_name": ["T1", "T1"], "state": ["NSW", "NSW"], "time": [0, 1], "value": [1.0, 2.0]}
    assert tsf(MONASH.replace("monthly", "often"))["time"].tolist() == [0, 1, 2, 0, 1]
