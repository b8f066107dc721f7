"""MASE divides the errors of each series by that series' own change within train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import carrywave as cw

DAYS = pd.date_range("2024-01-01", periods=100)
DRAW = np.random.default_rng(7)
VALUES = {"a": np.cumsum(DRAW.normal(size=100)), "b": DRAW.normal(size=100), "c": np.full(100, 4.0)}
HOW: dict[str, Any] = {"task": "forecasting", "batch": {"lanes": 2, "steps": 16}, "train": {"max_steps": 2}, "device": "cpu"}


def long(names: str) -> Any:
    return pd.concat([pd.DataFrame({"unique_id": name, "ds": DAYS, "y": VALUES[name[0]]}) for name in names])


def ratio(name: str) -> float:
    """The MASE of the naive forecast of the last 30 rows."""
    changes = np.abs(np.diff(VALUES[name]))
    return float(changes[69:].mean() / changes[:69].mean())


@pytest.mark.filterwarnings("ignore:.*not in the training data", "ignore:.*mase leaves out")
@pytest.mark.parametrize("standardize", [True, False])
def test_every_series_has_its_own_denominator(tmp_path: Path, standardize: bool) -> None:
    data = {"horizon": 1, "split": [70, 30], "standardize": standardize}
    run = tmp_path / "run"
    # The third series never changes, and does not enter.
    found = cw.fit({"hidden": 8, "layers": 1}, long("abc"), data=data, run=run, **HOW).metrics["valid"]
    wanted = np.mean([ratio("a"), ratio("b")])
    # Rows are read in float32.
    assert found["naive_mase"] == pytest.approx(wanted, rel=1e-5)
    # A series by itself, opened again: of every row, since the file is all of it.
    alone = [cw.evaluate(run, long(name), device="cpu") for name in "ab"]
    for name, values in zip("ab", alone, strict=True):
        changes = np.abs(np.diff(VALUES[name]))
        assert values["naive_mase"] == pytest.approx(changes.mean() / changes[:69].mean(), rel=1e-5)
        assert values["mase"] / values["mae"] == pytest.approx(values["naive_mase"] / values["naive_mae"], rel=1e-5)
    both = cw.evaluate(run, long("ab"), device="cpu")
    assert both["mase"] == pytest.approx(np.mean([values["mase"] for values in alone]), rel=1e-5)
    assert "mase" not in cw.evaluate(run, long("c"), device="cpu")


@pytest.mark.filterwarnings("ignore:.*not in the training data")
def test_a_series_that_train_did_not_hold_is_left_out_and_told(tmp_path: Path) -> None:
    run = tmp_path / "run"
    cw.fit({"hidden": 8, "layers": 1}, long("ab"), data={"horizon": 1, "split": [70, 30]}, run=run, **HOW)
    other = long("a").assign(unique_id="new")
    with pytest.warns(UserWarning, match="1 of 2 series, because train does not contain them"):
        found = cw.evaluate(run, pd.concat([long("b"), other]), device="cpu")
    assert found["mase"] == pytest.approx(cw.evaluate(run, long("b"), device="cpu")["mase"], rel=1e-5)
    with pytest.warns(UserWarning, match="mase leaves out all series"):
        assert not {"mase", "naive_mase"} & set(cw.evaluate(run, other, device="cpu"))
