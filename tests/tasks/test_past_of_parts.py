"""Parts that follow others in their series: what is read of the past is that of the whole series, however few rows warm up the carry."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from carrywave.data.loader import build
from carrywave.data.order import Cursor
from carrywave.data.python_inputs import from_python
from carrywave.errors import SpecError
from carrywave.prediction.evaluation import order_for
from carrywave.spec.load import parse
from carrywave.tasks.task import Task


def frame(rows: dict[str, int]) -> pd.DataFrame:
    draw = np.random.default_rng(4)
    return pd.concat(
        pd.DataFrame({"unique_id": name, "ds": pd.date_range("2026-01-01", periods=many), "y": draw.normal(size=many).cumsum()})
        for name, many in rows.items()
    )


def scored(context: int, **sections: Any) -> tuple[dict[str, float], list[np.ndarray], list[str]]:
    """The baselines of test; inputs, targets and past values of its scored steps; and what is told."""
    data = {"horizon": 2, "split": [0.5, 0.25, 0.25], "context": context, **sections.pop("data", {})}
    spec = parse({"task": "forecasting", "data": data, "batch": {"lanes": 4, "steps": 500}, **sections})
    found = from_python(frame({"a": 200, "b": 120}), spec)
    assert found.test is not None
    part = Task.of(spec, found.codec, found.facts, found.train).part("test", found.test)
    batch = build(part.view, order_for(spec, part.view, training=False).window(Cursor(0, 0)), Cursor(0, 0))
    assert batch.targets is not None
    there = ~batch.targets[..., 0, 0].isnan()
    read = [batch.inputs, batch.targets]
    if batch.history is not None:
        past = part.view.history.steps  # type: ignore[union-attr]
        read.append(batch.history.unfold(0, past, 1))
    # By lane, since lanes begin at other rows.
    return part.baseline, [each[:, lane][there[:, lane]].numpy() for each in read for lane in range(each.shape[1])], list(part.notes)


@pytest.mark.parametrize(
    "sections",
    [
        {"data": {"season": 7}},
        {"data": {"season": 7}, "model": {"linear": 20}},
        {"data": {"standardize": "window"}},
        {"data": {"season": 14, "residual": "season", "standardize": "window"}},
    ],
)
def test_a_small_context_changes_nothing_but_the_carry(sections: dict[str, Any]) -> None:
    small, large = (scored(context, **{name: dict(section) for name, section in sections.items()}) for context in (2, 1000))
    assert small[0] == pytest.approx(large[0])
    assert len(small[1]) == len(large[1])
    for one, other in zip(small[1], large[1], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert not any("season" in line for line in small[2])


def test_a_context_below_the_warm_up_is_refused() -> None:
    data = {"each_step": True, "targets": ["y"], "warmup": 10, "context": 5}
    with pytest.raises(SpecError, match=r"data.context=5 is less than data.warmup=10, so the first rows of valid and test"):
        parse({"task": "regression", "data": data})
    parse({"task": "regression", "data": {**data, "context": 10}})
