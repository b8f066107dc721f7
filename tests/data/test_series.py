"""Tables as series: order in time, scales, parts by exact row numbers, and those that are refused. How files are read: test_tables.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from carrywave.data.prepare import Prepared, prepare, read_python
from carrywave.errors import DataError, SpecError
from carrywave.spec.spec import Spec


def spec(folder: Path, train: str, **data: Any) -> Spec:
    values = {"horizon": 2, "share": 0, "cache": str(folder / "cache"), "train": str(folder / train), **data}
    return Spec.model_validate({"task": "forecasting", "data": values, "batch": {"lanes": 2, "steps": 3}})


def run(folder: Path, text: str, **data: Any) -> Prepared:
    (folder / "t.csv").write_text(text)
    return prepare(spec(folder, "t.csv", **data))


def wide(rows: int) -> str:
    """Column a counts from 0, column b is its negative."""
    return "date,a,b\n" + "".join(f"2024-01-{row + 1:02d},{row},{-row}\n" for row in range(rows))


def values(prepared: Prepared) -> Any:
    return np.round(prepared.train.inputs * prepared.codec.std + prepared.codec.mean, 4).tolist()


def test_wide_is_one_series_of_all_numeric_columns(tmp_path: Path) -> None:
    found = run(tmp_path, "date,a,note,b\n2024-01-02,2,x,20\n2024-01-01,1,y,10\n2024-01-03,3,z,30\n")
    assert (found.codec.columns, found.codec.targets, found.codec.time, found.codec.series) == (("a", "b"), (0, 1), "date", ())
    assert values(found) == [[1, 10], [2, 20], [3, 30]]
    assert (found.train.starts.tolist(), found.train.lengths.tolist()) == ([0], [3])
    assert found.train.inputs.dtype == np.float32
    assert (found.codec.mean, found.codec.std) == ((2.0, 20.0), (pytest.approx(np.sqrt(2 / 3)), pytest.approx(np.sqrt(200 / 3))))
    assert (found.facts.features, found.facts.outputs, found.valid, found.test) == (2, 2, None, None)


def test_long_is_a_sequence_for_each_series(tmp_path: Path) -> None:
    rows = ["q,2,5,1", "p,3,3,0", "q,1,4,1", "p,1,1,0", "q,3,6,0", "p,2,2,1"]
    found = run(tmp_path, "unique_id,ds,y,holiday\n" + "\n".join(rows), standardize=False, targets=["y"])
    assert (found.train.names, found.train.starts.tolist(), found.train.lengths.tolist()) == (("q", "p"), [0, 3], [3, 3])
    assert found.train.inputs.tolist() == [[4, 1], [5, 1], [6, 0], [1, 0], [2, 1], [3, 0]]
    assert (found.codec.series, found.codec.time, found.codec.columns, found.codec.targets) == (
        ("unique_id",),
        "ds",
        ("y", "holiday"),
        (0,),
    )
    assert found.facts.outputs == 1


def test_columns_targets_time_and_series_can_be_chosen(tmp_path: Path) -> None:
    text = "when,who,a,b,c\n2,x,1,2,3\n1,x,4,5,6\n3,x,7,8,9\n"
    found = run(tmp_path, text, columns=["c", "a"], targets=["a"], time="when", series="who", standardize=False)
    assert (found.codec.columns, found.codec.targets, found.train.names) == (("c", "a"), (1,), ("x",))
    assert found.train.inputs.tolist() == [[6, 4], [3, 1], [9, 7]]


def test_split_by_rows_with_context(tmp_path: Path) -> None:
    found = run(tmp_path, wide(30), split=[12, 4, 5], standardize=False)
    assert found.valid is not None
    assert found.test is not None
    parts = {
        name: (part.starts.tolist(), part.lengths.tolist()) for name, part in vars(found).items() if name in ("train", "valid", "test")
    }
    assert parts == {"train": ([0], [12]), "valid": ([0], [16]), "test": ([4], [17])}  # 4 windows of 3 steps are read before
    assert found.train.warm is None
    assert found.valid.warm is not None
    assert found.test.warm is not None
    assert (found.valid.warm.tolist(), found.test.warm.tolist()) == ([12], [12])
    first = int(found.valid.starts[0] + found.valid.warm[0])
    assert found.valid.inputs[first, 0] == 12  # the first row that is valid's own
    assert found.test.inputs is found.valid.inputs is found.train.inputs  # one array, stored once


def test_split_by_shares_is_for_each_series(tmp_path: Path) -> None:
    rows = "".join(f"{name},{row},{row}\n" for name, count in (("p", 10), ("q", 20)) for row in range(count))
    found = run(tmp_path, "unique_id,ds,y\n" + rows, split=[0.5, 0.2, 0.3])
    assert found.valid is not None
    assert found.test is not None
    assert (found.train.starts.tolist(), found.train.lengths.tolist()) == ([0, 10], [5, 10])
    assert (found.valid.starts.tolist(), found.valid.lengths.tolist()) == ([0, 10], [7, 14])
    assert (found.test.starts.tolist(), found.test.lengths.tolist()) == ([0, 12], [10, 18])


def test_scale_is_of_train_alone(tmp_path: Path) -> None:
    assert run(tmp_path, wide(30), split=[3, 10]).codec.mean == (1.0, -1.0)


def test_without_valid_the_last_share_is_held_out(tmp_path: Path) -> None:
    found = run(tmp_path, wide(30), share=0.2)
    assert found.valid is not None
    assert found.valid.warm is not None
    assert (found.train.lengths.tolist(), found.valid.starts.tolist(), found.valid.lengths.tolist(), found.valid.warm.tolist()) == (
        [24],
        [12],
        [18],
        [12],
    )
    at_least_the_horizon = run(tmp_path, wide(30), share=0.01)
    assert at_least_the_horizon.train.lengths.tolist() == [28]


def test_files_of_their_own_have_no_context(tmp_path: Path) -> None:
    (tmp_path / "v.csv").write_text(wide(5))
    found = run(tmp_path, wide(9), valid=str(tmp_path / "v.csv"))
    assert found.valid is not None
    assert (found.train.lengths.tolist(), found.valid.lengths.tolist(), found.valid.warm) == ([9], [5], None)
    np.testing.assert_allclose(found.valid.inputs * found.codec.std + found.codec.mean, [[row, -row] for row in range(5)], atol=1e-6)
    again = read_python(str(tmp_path / "v.csv"), found.codec, spec(tmp_path, "t.csv"))
    np.testing.assert_array_equal(again.inputs, found.valid.inputs)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"targets": ["c"]}, r"has no column 'c' \(data\.targets\)"),
        ({"split": [8, 4]}, r"series .*t\.csv has 10 rows, but data\.split asks for 12"),
        ({"split": [1, 1, 1]}, "has 1 row in train, but a horizon of 2 needs 3"),
        ({"split": [8, 1]}, "has 1 row in valid, but a horizon of 2 needs 2"),
    ],
)
def test_a_refused_table(tmp_path: Path, data: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        run(tmp_path, wide(10), **data)
    assert "t.csv" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rows_without_the_name_of_a_series_are_one(tmp_path: Path) -> None:
    rows = "".join(f"{name},{row},{row}\n" for name in ("p", "") for row in range(5))
    assert run(tmp_path, "unique_id,ds,y\n" + rows, series="unique_id").train.names == ("p", "NA")


def test_split_and_files_contradict(tmp_path: Path) -> None:
    (tmp_path / "v.csv").write_text(wide(9))
    with pytest.raises(SpecError, match=r"data\.split takes valid and test from the training file"):
        run(tmp_path, wide(30), split=[12, 4], valid=str(tmp_path / "v.csv"))
