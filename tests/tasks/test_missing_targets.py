"""Empty cells of what is forecast: neither trained on nor scored, by a model, by baselines, or in the denominator of MASE."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from carrywave.data.loader import build
from carrywave.data.order import Cursor
from carrywave.data.prepare import Prepared, from_python
from carrywave.model.heads.forecast import Forecast
from carrywave.prediction.evaluation import order_for
from carrywave.spec.load import parse
from carrywave.spec.spec import Spec
from carrywave.tasks.baselines import LineForecast, baselines
from carrywave.tasks.forecasting import forecasting
from carrywave.tasks.mase_scale import MaseScale
from carrywave.tasks.ridge import PENALTIES, fit_line
from carrywave.tasks.task import Task

HORIZON, SEASON, LAGS, ROWS = 3, 4, 5, 60


def frame() -> pd.DataFrame:
    """Two series of a and b, with empty cells inside of each, a weight, and a column that is not forecast."""
    draw = np.random.default_rng(1)
    values = draw.normal(size=(2 * ROWS, 3)).cumsum(axis=0)
    values[[5, 6, 17, 30, 31, 32, 70, 90], 0] = np.nan
    values[[6, 20, 47, 71, 72, 95], 1] = np.nan
    times = pd.date_range("2021-01-01", periods=ROWS)
    weights = np.where(np.arange(2 * ROWS) % 7 == 3, 0.0, 1.0 + np.arange(2 * ROWS) % 3)
    return pd.DataFrame(
        {"id": ["p"] * ROWS + ["q"] * ROWS, "ds": [*times, *times], "a": values[:, 0], "b": values[:, 1], "x": values[:, 2], "w": weights}
    )


def spec_of(**data: Any) -> Spec:
    given = {"horizon": HORIZON, "season": SEASON, "share": 0.0, "targets": ["a"], "columns": ["a", "b", "x"], **data}
    return parse({"task": "forecasting", "data": given, "batch": {"lanes": 2, "steps": 8}})


VARIANTS: dict[str, dict[str, Any]] = {
    "one target": {},
    "several weighted targets": {"targets": ["a", "b"], "weight": "w"},
    "independent weighted channels": {"targets": ["a", "b"], "channels": "independent", "weight": "w"},
}


class Definition:
    """What is forecast, in float64: of each series of a model its values [rows, columns] as it reads them, which are there, and weights."""

    def __init__(self, found: Prepared, spec: Spec, table: pd.DataFrame) -> None:
        self.columns = np.array(found.codec.targets)
        self.values, self.real, self.weights = [], [], []
        targets = list(spec.data.targets or ())
        channels = [[target] for target in targets] if spec.data.channels == "independent" else [targets]
        groups = [(names, rows) for _, rows in table.groupby("id") for names in channels]
        for (names, rows), start, length in zip(groups, found.train.starts, found.train.lengths, strict=True):
            self.values.append(np.asarray(found.train.inputs[start : start + length][:, self.columns], np.float64))
            self.real.append(rows[names].notna().to_numpy())
            self.weights.append(rows.w.to_numpy() if spec.data.weight else np.ones(len(rows)))

    @property
    def counted(self) -> list[Any]:
        """Which values count: those that are there and have a weight."""
        return [real & (weights > 0)[:, None] for real, weights in zip(self.real, self.weights, strict=True)]


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> tuple[Prepared, Spec, Definition]:
    spec = spec_of(**VARIANTS[request.param])
    found = from_python(frame(), spec)
    return found, spec, Definition(found, spec, frame())


Variant = tuple[Prepared, Spec, Definition]


def test_ridge_is_fitted_without_them(variant: Variant) -> None:
    """Each column and step ahead on its own: the normal equations of the rows that have it, with one of the penalties."""
    found, _, defined = variant
    line = fit_line(found.train, defined.columns, LAGS, HORIZON)
    for column in range(len(defined.columns)):
        for step in range(HORIZON):
            read, ahead, weights = [], [], []
            for values, counted, rows in zip(defined.values, defined.counted, defined.weights, strict=True):
                for first in range(len(values) - LAGS - HORIZON + 1):
                    last, at = first + LAGS - 1, first + LAGS + step
                    if counted[at, column]:
                        read.append(np.append(values[first : first + LAGS, column] - values[last, column], 1.0))
                        ahead.append(values[at, column] - values[last, column])
                        weights.append(rows[at])
            x, y, w = np.array(read), np.array(ahead), np.array(weights)[:, None]
            square = x.T @ (w * x)
            size = np.diag(square)[:-1].mean()
            solved = [np.linalg.solve(square + np.diag([*[p * size] * LAGS, 0.0]), x.T @ (w[:, 0] * y)) for p in PENALTIES]
            got = np.append(line.weights_CNK[column, :, step], line.bias_CK[column, step])
            assert min(np.abs(got - each).max() for each in solved) < 1e-9  # of solving in another order


def test_baselines_are_not_scored_there(variant: Variant) -> None:
    found, spec, defined = variant
    change = MaseScale.of(found.train, found.codec, SEASON).of_series(found.train, found.codec.channels)
    line = fit_line(found.train, defined.columns, LAGS, HORIZON)
    errors, _ = baselines(found.train, spec.data, defined.columns, change, line)
    forecast = LineForecast(line, found.train, defined.columns)
    gaps: dict[str, list[Any]] = {"naive": [], "last": [], "ridge": []}
    for number, (start, values, counted) in enumerate(zip(found.train.starts, defined.values, defined.counted, strict=True)):
        for row in range(len(values) - HORIZON):
            straight = forecast(np.array([start + row]))[0]
            for step in range(HORIZON):
                season = row + 1 + step - SEASON
                for c in np.flatnonzero(counted[row + 1 + step]):
                    ahead, last = values[row + 1 + step, c], values[row, c]
                    naive = values[season, c] if season >= 0 else last
                    for name, guess in (("naive", naive), ("last", last), ("ridge", straight[step, c])):
                        gaps[name].append((step, c, ahead - guess, change[number, c]))
    for name, all_gaps in gaps.items():
        steps, columns, gap, scale = (np.array(each) for each in zip(*all_gaps, strict=True))
        for step in range(HORIZON):
            for c in range(len(defined.columns)):
                chosen = gap[(steps == step) & (columns == c)]
                assert errors[name].targets_HC[step, c] == len(chosen)
                np.testing.assert_allclose(errors[name].absolute_HC[step, c], np.abs(chosen).mean(), rtol=1e-12)
                np.testing.assert_allclose(errors[name].square_HC[step, c], (chosen**2).mean(), rtol=1e-12)
        assert errors[name].scaled == pytest.approx((np.abs(gap) / scale).mean(), rel=1e-12)


def test_a_batch_counts_what_is_there(variant: Variant) -> None:
    """The sum of weighted squares over all batches, and the sum of weights, of a model whose every forecast is the last value."""
    found, spec, defined = variant
    view = Task(spec, found.codec, found.facts).part("train", found.train).view
    order, head = order_for(spec, view, training=False), Forecast(1, HORIZON, len(defined.columns))
    sums = torch.zeros(2, dtype=torch.float64)
    for step in range(order.num_steps(0)):
        batch = build(view, order.window(Cursor(0, step)), Cursor(0, step))
        targets = batch.targets.double()
        sums += torch.stack(head.score(torch.zeros_like(targets), targets, None if batch.weights is None else batch.weights.double()))
    expected = np.zeros(2)
    for values, counted, weights in zip(defined.values, defined.counted, defined.weights, strict=True):
        for row in range(len(values) - HORIZON):
            for ahead in range(row + 1, row + 1 + HORIZON):
                gap = (values[ahead] - values[row])[counted[ahead]]
                expected += weights[ahead] * np.array([(gap**2).sum(), len(gap)])
    np.testing.assert_allclose(sums, expected, rtol=1e-5)  # the view subtracts in float32


def plain(values: list[Any], **data: Any) -> Prepared:
    """One series of a, beside x, which has a value every day from the first of January."""
    made = pd.DataFrame({"ds": pd.date_range("2021-01-01", periods=len(values)), "a": values, "x": np.arange(len(values)) / 2})
    return from_python(made, spec_of(columns=["a", "x"], standardize=False, horizon=1, **data))


def test_filled_cells_count_if_that_is_asked_for() -> None:
    values = [1.0, np.nan, 4.0, 6.0, np.nan, 7.0, 9.0]
    assert plain(values).train.missing is not None
    for method, filled in (("forward", [1, 1, 4, 6, 6, 7, 9]), ("interpolate", [1, 2.5, 4, 6, 6.5, 7, 9]), ("zero", [1, 0, 4, 6, 0, 7, 9])):
        found = plain(values, missing=method)
        assert found.train.missing is None
        view = forecasting(found.train, spec_of(horizon=1), np.array([0]))
        assert view.targets_at is not None
        assert view.targets_at(np.arange(6))[:, 0, 0].tolist() == np.diff(filled).tolist()
        assert any(f"empty cells: a 2 (data.missing={method})" in note for note in found.notes)
