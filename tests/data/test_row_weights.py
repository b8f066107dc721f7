"""Weights of targets as data has them: fields of rows, columns of tables, a third array; and in the batches made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from carrywave.data.loader import build
from carrywave.data.order import Cursor
from carrywave.data.prepare import from_python, prepare, read_python
from carrywave.data.sequences import Sequences
from carrywave.errors import DataError, SpecError
from carrywave.prediction.evaluation import order_for
from carrywave.spec.load import parse
from carrywave.spec.spec import Spec
from carrywave.tasks.task import Task

CLASSES = [{"text": text, "label": label, "weight": weight} for text, label, weight in (("ab", "x", 2), ("b", "y", 0.5), ("ba", "x", 0))]


def spec_of(task: str, folder: Path | None = None, **sections: Any) -> Spec:
    data = {"share": 0.0, "weight": "weight", **sections.pop("data", {})}
    if folder is not None:
        data |= {"cache": str(folder / "cache"), "train": str(folder / data.pop("file", "train.jsonl"))}
    return parse({"task": task, "data": data, **sections})


def written(folder: Path, rows: list[dict[str, Any]], name: str = "train.jsonl") -> None:
    (folder / name).write_text("\n".join(map(json.dumps, rows)))


def batch_of(data: Sequences, spec: Spec, codec: Any, facts: Any) -> Any:
    part = Task(spec, codec, facts).part("train", data)
    return build(part.view, order_for(spec, part.view, training=False).window(Cursor(0, 0)), Cursor(0, 0))


def test_a_row_has_the_weight_of_its_field(tmp_path: Path) -> None:
    written(tmp_path, CLASSES)
    found = prepare(spec_of("classification", tmp_path))
    assert found.train.weights is not None
    assert found.train.weights.tolist() == [2.0, 0.5, 0.0]
    assert found.train.step_weights is None
    batch = batch_of(found.train, spec_of("classification", tmp_path), found.codec, found.facts)
    assert dict(zip(batch.sequence.tolist(), batch.weights.tolist(), strict=True)) == {0: 2.0, 1: 0.5, 2: 0.0}


def test_a_name_means_nothing_unless_told(tmp_path: Path) -> None:
    """The weights of cars in seaborn's mpg are not those of rows."""
    written(tmp_path, CLASSES)
    found = prepare(spec_of("classification", tmp_path, data={"weight": None}))
    assert found.train.weights is None
    assert found.notes == (f"{tmp_path / 'train.jsonl'}: reading text and label; ignored: weight",)


TAGS = [
    {"steps": [[1.0], [2.0], [3.0]], "labels": [0, 1, 0], "weight": [0.5, 2.0, 0.0]},
    {"steps": [[1.0], [2.0]], "labels": [0, 1], "weight": 3.0},
    {"steps": [[5.0]], "labels": [1]},
]


def test_steps_of_tagging_have_weights() -> None:
    spec = spec_of("tagging")
    found = from_python(TAGS, spec)
    assert found.train.step_weights is not None
    assert found.train.weights is None
    assert found.train.step_weights.tolist() == [0.5, 2.0, 0.0, 3.0, 3.0, 1.0]
    batch = batch_of(found.train, spec, found.codec, found.facts)
    by_lane = {number: batch.weights[:, lane].tolist() for lane, number in enumerate(batch.sequence.tolist())}
    assert by_lane == {0: [0.5, 2.0, 0.0], 1: [3.0, 3.0, 0.0], 2: [1.0, 0.0, 0.0]}
    whole = from_python([{**row, "weight": 2.0} for row in TAGS], spec)  # one for each row: of the sequence
    assert whole.train.weights is not None
    assert whole.train.step_weights is None


def test_weights_of_a_file_to_evaluate_on_are_read_and_those_to_predict_from_are_not(tmp_path: Path) -> None:
    written(tmp_path, CLASSES)
    written(tmp_path, [{"text": "a", "label": "x", "weight": 7}], "more.jsonl")
    written(tmp_path, [{"text": "a", "weight": "heavy"}], "new.jsonl")
    spec = spec_of("classification", tmp_path)
    codec = prepare(spec).codec
    found = read_python(str(tmp_path / "more.jsonl"), codec, spec)
    assert found.weights is not None
    assert found.weights.tolist() == [7.0]
    assert read_python(str(tmp_path / "new.jsonl"), codec, spec, labelled=False).weights is None
    with pytest.raises(DataError, match="data item 0: the weight is None; write a finite number from 0 on"):  # it does not mean 1
        read_python([{"text": "a", "label": "x", "weight": None}], codec, spec)


def frame_of(rows: int = 12, **columns: Any) -> pd.DataFrame:
    return pd.DataFrame({"ds": range(rows), "y": np.arange(rows) ** 2.0, "w": np.arange(rows) / 4.0, **columns})


FORECASTS = {"horizon": 2, "weight": "w", "standardize": False}


def test_values_of_a_table_have_the_weight_of_their_row() -> None:
    spec = spec_of("forecasting", data=FORECASTS, batch={"steps": 16})
    found = from_python(frame_of(), spec)
    assert found.codec.columns == ("y",)
    assert "; weights: w" in found.notes[0]
    batch = batch_of(found.train, spec, found.codec, found.facts)
    assert batch.weights.shape == (10, 1, 2)
    for step in range(10):
        assert batch.weights[step, 0].tolist() == [(step + 1) / 4, (step + 2) / 4]


def test_weights_follow_series_times_and_channels() -> None:
    """Rows are sorted, missing ones are filled in with the weight before, and each column is a series of its own."""
    frame = pd.concat([frame_of(unique_id=name, z=range(12)) for name in "ba"]).iloc[::-1]
    frame = frame[~((frame.unique_id == "a") & (frame.ds == 5))]
    data = {**FORECASTS, "missing": "forward", "channels": "independent", "frequency": 1}
    found = from_python(frame, spec_of("forecasting", data=data)).train
    assert found.names is not None
    assert found.step_weights is not None
    assert len(found) == 4
    for name, start, length in zip(found.names, found.starts, found.lengths, strict=True):
        expected = np.arange(12) / 4
        expected[5] = expected[4] if name.startswith("a") else expected[5]
        assert found.step_weights[start : start + length].tolist() == expected.tolist()


def test_parts_of_a_table_and_other_tables_have_weights() -> None:
    spec = spec_of("forecasting", data={**FORECASTS, "split": [0.5, 0.5]})
    found = from_python(frame_of(16), spec)
    assert found.valid is not None
    assert found.valid.step_weights is found.train.step_weights
    other = read_python(frame_of(8), found.codec, spec)
    assert other.step_weights is not None
    assert read_python(frame_of(8).drop(columns="w"), found.codec, spec, labelled=False).step_weights is None
    assert read_python(frame_of(8, w="text"), found.codec, spec, labelled=False).step_weights is None
    with pytest.raises(DataError, match=r"has no column 'w' \(data.weight\)"):
        read_python(frame_of(8).drop(columns="w"), found.codec, spec)
    rows = [{"steps": [[1.0], [2.0], [4.0]], "w": [1.0, 0.0, 2.0]}, {"steps": [[1.0], [3.0], [4.0]], "w": 0.5}]
    lists = from_python(rows, spec_of("forecasting", data={**FORECASTS, "horizon": 1}))
    assert lists.train.step_weights is not None
    assert lists.train.step_weights.tolist() == [1.0, 0.0, 2.0, 0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    ("data", "more", "message"),
    [
        (frame_of(), {"weight": "v"}, r"train has no column 'v' \(data.weight\)"),
        (frame_of(w=-1.0), {}, r"train: row 1, column w \(data.weight\) is -1; write a number from 0 on, 0 for no target"),
        (frame_of(w=[1.0] * 11 + [None]), {}, r"train: row 12, column w \(data.weight\) is empty"),
        (frame_of(w=0.0), {}, "train: every weight in it is 0, so nothing could be learned or measured"),
        (frame_of(), {"weight": "ds"}, "train: column ds holds the times; remove it from what the other keys name"),
        (np.zeros((9, 1)), {}, "train has no column 'w' \\(data.weight\\); use one of steps"),
    ],
)
def test_what_is_no_weight_of_a_table_is_refused(data: Any, more: dict[str, Any], message: str) -> None:
    with pytest.raises((DataError, SpecError), match=message):
        from_python(data, spec_of("forecasting", data={**FORECASTS, **more}))


ESTIMATES = {"each_step": True, "targets": ["y"], "weight": "w"}


def test_numbers_at_every_step_have_the_weight_of_their_row(tmp_path: Path) -> None:
    frame = frame_of(x=np.arange(12.0))
    spec = spec_of("regression", data=ESTIMATES)
    found = from_python(frame, spec)
    assert found.codec.columns == ("x",)
    batch = batch_of(found.train, spec, found.codec, found.facts)
    assert batch.weights[:, 0].tolist() == (np.arange(12) / 4).tolist()
    frame.to_csv(tmp_path / "t.csv", index=False)
    of_file = prepare(spec_of("regression", tmp_path, data={**ESTIMATES, "file": "t.csv"})).train.step_weights
    assert of_file is not None
    assert of_file.tolist() == (np.arange(12) / 4).tolist()
    with pytest.raises(DataError, match=r"train: column y \(data.targets\) is empty or of weight 0 in all rows of train"):
        from_python(frame.assign(w=0.0), spec)
    assert read_python(frame.drop(columns=["w", "y"]), found.codec, spec, labelled=False).step_weights is None
