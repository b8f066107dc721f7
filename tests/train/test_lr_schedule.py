"""Learning-rate schedules at exact points."""

from __future__ import annotations

import math
from typing import Any

import pytest

from carrywave.spec.train_spec import TrainSpec
from carrywave.train import lr_schedule
from carrywave.train.lr_schedule import RateState


def spec(**fields: Any) -> TrainSpec:
    return TrainSpec(lr=8.0, **fields)


@pytest.mark.parametrize(
    ("fields", "total", "rates"),
    [
        ({}, 100, {0: 8, 50: 8, 1000: 8}),
        ({"schedule": "cosine"}, 100, {0: 8, 25: 4 * (1 + math.cos(math.pi / 4)), 50: 4, 100: 0, 200: 0}),
        ({"schedule": "linear"}, 100, {0: 8, 25: 6, 50: 4, 100: 0, 101: 0}),
        *(({"schedule": each, "warmup": 3}, 100, {0: 2, 1: 4, 2: 6, 3: 8}) for each in ("constant", "cosine", "linear", "plateau")),
        ({"schedule": "linear", "warmup": 20}, 100, {20: 8, 60: 4, 100: 0}),
        ({"schedule": "cosine", "warmup": 20, "hold": 40}, 100, {9: 80 / 21, 20: 8, 60: 8, 80: 4, 100: 0}),
        ({"schedule": "linear", "hold": 1000}, 100, {0: 8, 99: 8}),
        ({"schedule": "cosine", "warmup": 7}, 2, {0: 1, 1: 2}),  # longer than the run
    ],
)
def test_rates(fields: dict[str, Any], total: int, rates: dict[int, float]) -> None:
    found = {step: lr_schedule.lr(spec(**fields), RateState(), step, total) for step in rates}
    assert found == pytest.approx(rates, rel=1e-14, abs=1e-14)  # a cosine is rounded


def after(asked: TrainSpec, losses: list[float]) -> list[RateState]:
    states, state = [], RateState()
    for loss in losses:
        state = lr_schedule.after_evaluation(asked, state, loss)
        states.append(state)
    return states


@pytest.mark.parametrize(
    ("fields", "losses", "scales", "best", "since_best"),
    [
        # As in the word language model example.
        ({"factor": 0.25, "patience": 0}, [5.0, 4.0, 4.0, 4.5, 3.0, 3.1], [1, 1, 0.25, 0.0625, 0.0625, 0.015625], 3.0, 1),
        ({"factor": 0.5, "patience": 2}, [1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0], [1, 1, 1, 0.5, 0.5, 0.5, 0.25], 1.0, 6),
        ({"schedule": "constant"}, [2.0, math.nan, 3.0, 1.0], [1, 1, 1, 1], 1.0, 0),
        ({"schedule": "constant"}, [math.nan, 3.0], [1, 1], 3.0, 0),
    ],
)
def test_evaluations(fields: dict[str, Any], losses: list[float], scales: list[float], best: float, since_best: int) -> None:
    asked = spec(**{"schedule": "plateau"} | fields)
    states = after(asked, losses)
    assert [state.scale for state in states] == scales
    assert (states[-1].best, states[-1].since_best) == (best, since_best)
    if asked.schedule == "plateau":
        assert lr_schedule.lr(asked, states[-1], 10, 100) == 8.0 * scales[-1]


def test_early_stopping() -> None:
    asked = spec(schedule="plateau", early_stop=2)
    assert [lr_schedule.stops_early(asked, state) for state in after(asked, [2.0, 3.0, 1.0, 1.0, 1.0])] == [False] * 4 + [True]
    assert not lr_schedule.stops_early(spec(), RateState(since_best=1000))
