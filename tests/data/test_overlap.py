"""What a model is judged by and also trained on is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from carrywave.data.prepare import prepare
from carrywave.data.python_inputs import from_python
from carrywave.spec.load import parse

DRAW = np.random.default_rng(1)
STEPS, LABELS = DRAW.normal(size=(30, 5, 2)), np.arange(30) % 2


def lines(data: Any, part: str = "valid", /, **spec: Any) -> list[str]:
    return [line for line in from_python(data, parse(spec)).notes if line.startswith(f"{part}:")]


def test_sequences_that_are_also_in_train() -> None:
    data = {"train": (STEPS[:20], LABELS[:20]), "valid": (STEPS[15:], LABELS[15:]), "test": (STEPS[:4], LABELS[:4])}
    assert lines(data, task="classification") == [
        "valid: 5 of 15 sequences are also in train, so the figures look better than they are; keep them in only one of the two"
    ]
    assert lines(data, "test", task="classification")[0].startswith("test: all 4 sequences are also in train")
    assert not lines({"train": (STEPS[:20], LABELS[:20]), "valid": (STEPS[20:], LABELS[20:])}, task="classification")


def test_sequences_that_are_twice_in_one_file_are_told_when_a_share_is_held_out() -> None:
    assert lines((np.concatenate([STEPS, STEPS]), np.concatenate([LABELS, LABELS])), task="classification")[0].startswith("valid: ")
    assert not lines((STEPS, LABELS), task="classification")


def test_passages_of_a_text(tmp_path: Path) -> None:
    text = "".join(DRAW.choice(list("abcdefgh \n"), 4000).tolist())
    for name, part in (("train", text), ("same", text[1000:2500]), ("other", text[::-1][:1500])):
        (tmp_path / f"{name}.txt").write_text(part)
    spec = {"data": {"train": str(tmp_path / "train.txt"), "cache": str(tmp_path / "cache"), "vocabulary": 20}}
    same, other = (prepare(parse({"data": {**spec["data"], "valid": str(tmp_path / f"{name}.txt")}})) for name in ("same", "other"))
    assert any(line.startswith("valid: all 64 passages looked at are also in train") for line in same.notes)
    assert not any(line.startswith("valid:") for line in other.notes)
    assert not lines("the carry goes on and on\n" * 100)  # held out of a text that repeats itself


def series(first: str, rows: int, name: str = "a") -> pd.DataFrame:
    return pd.DataFrame({"unique_id": name, "ds": pd.date_range(first, periods=rows), "y": DRAW.normal(size=rows)})


def test_rows_of_series() -> None:
    train, spec = pd.concat([series("2024-02-01", 40), series("2024-02-01", 30, "b")]), {"task": "forecasting", "data": {"horizon": 3}}
    last = series("2024-03-06", 20)
    twice = lines({"train": train, "valid": last}, **spec)
    assert twice == ["valid: 6 of 20 rows are also in train, so the figures look better than they are; keep them in only one of the two"]
    earlier = lines({"train": train, "valid": series("2024-01-01", 20), "test": series("2024-03-12", 9)}, **spec)
    told = "series begin before train ends (2024-03-11), so the model is trained on times that it is judged by; files for each part can"
    assert earlier == [f"valid: all 1 {told} be cut at one time"]
    assert not lines({"train": train, "valid": series("2024-03-12", 20)}, **spec)
    other = lines({"train": train, "valid": series("2024-01-01", 20, "c")}, **spec)  # another series
    assert other == earlier
    alone = {"train": train[train.unique_id == "a"].drop(columns="unique_id"), "valid": series("2024-01-01", 20).drop(columns="unique_id")}
    assert lines(alone, **spec) == earlier


@pytest.mark.parametrize(("valid", "told"), [(slice(50, 90), True), (slice(100, 140), False)])
def test_rows_without_times(valid: slice, told: bool) -> None:
    rows = np.random.default_rng(2).normal(size=(140, 2))
    found = lines({"train": rows[:100], "valid": rows[valid]}, task="forecasting", data={"horizon": 3})
    assert any("passages looked at are also in train" in line for line in found) == told


def test_parts_that_begin_while_other_series_are_trained_on() -> None:
    spec: dict[str, Any] = {"task": "forecasting", "data": {"horizon": 3}, "batch": {"lanes": 1, "steps": 8}}
    ends_apart = pd.concat([series("2024-01-01", 100, "long"), series("2024-01-01", 50, "short")])
    told = (
        "1 of 2 series begin before train ends (2024-02-29), so the model is trained on times that it is judged by; files for each "
        "part can be cut at one time"
    )
    split = {**spec, "data": {"horizon": 3, "split": [0.6, 0.2, 0.2]}}
    assert lines(ends_apart, **split) == [f"valid: {told}"]
    assert lines(ends_apart, "test", **split) == [f"test: {told}"]
    assert lines(ends_apart, **spec)[0].startswith("valid: 1 of 2 series begin before train ends (2024-03-30")
    together = pd.concat([series("2024-01-01", 100), series("2024-01-01", 100, "b")])
    assert not lines(together, **split)
    assert not lines(together, **spec)
    in_words = together.assign(ds=[f"step {row:03}" for row in range(100)] * 2)
    assert not lines(in_words, **{**spec, "data": {"horizon": 3, "frequency": "none"}})


def test_rows_that_no_part_takes() -> None:
    spec: dict[str, Any] = {"task": "forecasting", "batch": {"lanes": 1, "steps": 8}}
    one, two = series("2024-01-01", 120), pd.concat([series("2024-01-01", 120), series("2024-01-01", 120, "b")])
    for parts, rows in (([50, 10, 10], 50), ([0.5, 0.2, 0.2], 12)):
        data = {"horizon": 3, "split": parts}
        said = f"data.split leaves {rows} of 120 rows, at the ends of series, unused; use larger parts to use them"
        assert lines(one, "train", **spec, data=data)[1:] == [f"train: {said}"]
        found = lines(two, "train", **spec, data=data)
        assert found[1].startswith(f"train: data.split leaves {2 * rows} of 240 rows, at the ends of series, unused")
    assert not lines(one, "train", **spec, data={"horizon": 3, "split": [0.7, 0.2, 0.1]})[1:]
    assert not lines(one, "train", **spec, data={"horizon": 3})[1:]
