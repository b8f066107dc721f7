"""Each task's view: which rows are steps, and what their targets are."""

from __future__ import annotations

from typing import Any

import numpy as np

from carrywave.data.codec import Codec
from carrywave.data.sequences import Sequences
from carrywave.spec.data_spec import DataSpec
from carrywave.spec.facts import DataFacts
from carrywave.spec.spec import Spec
from carrywave.tasks.baselines import baselines, origins_of
from carrywave.tasks.forecasting import forecasting
from carrywave.tasks.mase_scale import change
from carrywave.tasks.task import Task
from carrywave.tasks.views import Naive


def series(rows: int, columns: int = 2) -> np.ndarray:
    return np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)


def forecaster(linear: int = 0, standardize: Any = True, **data: Any) -> Spec:
    return Spec.model_validate({"task": "forecasting", "data": {"standardize": standardize, **data}, "model": {"linear": linear}})


def test_language_predicts_the_next_token_within_each_sequence() -> None:
    data = Sequences(np.array([5, 6, 7, 8, 9], dtype=np.uint8), np.array([0, 3]), np.array([3, 2]))
    view = Task(Spec(), Codec("language", "text"), DataFacts()).part("train", data).view
    assert view.lengths.tolist() == [2, 1]
    assert view.targets_at is not None
    assert view.targets_at(np.array([[0, 3], [1, 3]])).tolist() == [[6, 9], [7, 9]]


def test_forecasting_targets_are_the_whole_horizon_ahead() -> None:
    data = Sequences(series(10), np.array([0]), np.array([10]))
    view = forecasting(data, forecaster(horizon=3), np.array([1]))
    assert view.lengths.tolist() == [7]  # the last origin sees rows 7, 8, 9
    assert view.targets_at is not None
    assert view.targets_at(np.array([[6]]))[0, 0, :, 0].tolist() == [2.0, 4.0, 6.0]  # less the last value, 13


def test_without_a_season_of_history_the_last_value_stands_in() -> None:
    two = Sequences(series(12), np.array([0, 6]), np.array([6, 6]))
    naive = Naive(two, np.array([0]), horizon=2, season=3, kind="season")
    # Row 7 is the second of its series: a season back lies in the other series.
    assert naive(np.array([7]))[0, :, 0].tolist() == [14.0, 12.0]


def test_warm_rows_end_one_before_the_first_origin() -> None:
    data = Sequences(series(20), np.array([5]), np.array([15]), warm=np.array([5]))
    view = forecasting(data, forecaster(horizon=4), np.array([0]))
    # The part is rows 10..19: origins 9..15, so that all targets lie in it. That is 10 - 4 + 1 = 7 of them.
    assert view.warm is not None
    assert view.warm.tolist() == [4]
    assert view.lengths.tolist() == [11]
    origins = np.concatenate([rows for _, rows in origins_of(data, 4)])
    assert origins.tolist() == list(range(9, 16))


def test_naive_error_and_scale_by_hand() -> None:
    values = np.array([[0.0], [1.0], [4.0], [9.0], [16.0], [25.0]], dtype=np.float32)
    data = Sequences(values, np.array([0]), np.array([6]))
    spec = DataSpec(horizon=1, season=1)
    changes = np.abs(np.diff(values[:, 0]))
    errors = baselines(data, spec, np.array([0]), np.array([[2.0]]), None)[0]["naive"]
    assert (errors.absolute_HC.tolist(), errors.square_HC.tolist(), errors.pinball) == ([[changes.mean()]], [[(changes**2).mean()]], None)
    assert errors.scaled == changes.mean() / 2.0
    assert change(values, 2, np.array([0])).tolist() == [np.abs(values[2:] - values[:-2]).mean()]


def test_what_is_the_same_every_season_has_no_scale() -> None:
    values = np.tile(np.array([1, 2, 3, 2], np.float32), 10)[:, None]
    values[::8] = np.nextafter(values[::8], np.float32(9))  # rounded up every other time
    assert change(values, 4, np.array([0])).tolist() == [0.0]


def test_with_seasons_a_forecaster_reads_the_change_too() -> None:
    two = Sequences(series(12), np.array([0, 6]), np.array([6, 6]))
    spec = forecaster(horizon=1, season=3)
    view = forecasting(two, spec, np.array([0]))
    assert view.inputs_at is not None
    # Row 4 is worth 8, a season before it was 2; row 8 has no season of history within its own series.
    assert view.inputs_at(np.array([[4, 8]])).tolist() == [[[8.0, 9.0, 6.0, 6.0], [16.0, 17.0, 0.0, 0.0]]]


def test_a_window_scales_what_is_read_and_not_what_is_forecast() -> None:
    values = np.random.default_rng(4).normal(size=(20, 2)).astype(np.float32)
    data = Sequences(values, np.array([0]), np.array([20]))
    rows = np.array([[0, 9], [1, 10]])
    plain, scaled = (forecasting(data, forecaster(4, how, horizon=2, season=3), np.array([0])) for how in (True, "window"))
    assert plain.targets_at is not None
    assert scaled.targets_at is not None
    assert plain.inputs_at is not None
    assert scaled.inputs_at is not None
    np.testing.assert_array_equal(plain.targets_at(rows), scaled.targets_at(rows))
    last = values[6:10]
    deviation = np.maximum(last.std(axis=0), 0.1)
    found = scaled.inputs_at(rows)[0, 1]
    np.testing.assert_allclose(found[:2], (values[9] - last.mean(axis=0)) / deviation, rtol=1e-5)
    np.testing.assert_allclose(found[2:], (values[9] - values[6]) / deviation, rtol=1e-5)
    np.testing.assert_array_equal(scaled.inputs_at(rows)[0, 0], np.zeros(4))  # the first row is all there is
