"""Learning-rate schedules at exact points."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import pytest

from carrywave.errors import RunError
from carrywave.spec.train_spec import TrainSpec
from carrywave.train import lr_schedule
from carrywave.train.lr_schedule import Rate


def spec(**fields: Any) -> TrainSpec:
    return TrainSpec(lr=8.0, **fields)


def course(asked: TrainSpec, steps: list[int], total: int = 100) -> list[float]:
    return [lr_schedule.lr(asked, Rate(), step, total) for step in steps]


def test_constant() -> None:
    assert course(spec(), [0, 50, 1000]) == [8.0, 8.0, 8.0]


def test_cosine() -> None:
    asked = spec(schedule="cosine")
    assert course(asked, [0, 50, 100, 200]) == pytest.approx([8.0, 4.0, 0.0, 0.0], rel=1e-15)
    assert course(asked, [25])[0] == pytest.approx(8.0 * (1 + math.cos(math.pi / 4)) / 2, rel=1e-15)


def test_linear() -> None:
    assert course(spec(schedule="linear"), [0, 25, 50, 100, 101]) == [8.0, 6.0, 4.0, 0.0, 0.0]


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear", "plateau"])
def test_warm_up_rises_evenly_with_any_schedule(schedule: str) -> None:
    asked = spec(schedule=schedule, warmup=3)
    assert course(asked, [0, 1, 2, 3]) == [2.0, 4.0, 6.0, 8.0]


def test_decay_begins_after_warm_up() -> None:
    asked = spec(schedule="linear", warmup=20)
    assert course(asked, [20, 60, 100], total=100) == [8.0, 4.0, 0.0]


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_decay_begins_after_the_full_rate_was_held(schedule: str) -> None:
    asked = spec(schedule=schedule, warmup=20, hold=40)
    assert course(asked, [9, 20, 60, 80, 100], total=100) == pytest.approx([8.0 * 10 / 21, 8.0, 8.0, 4.0, 0.0], abs=1e-15)


@pytest.mark.parametrize("hold", [100, 1000])
def test_the_full_rate_held_to_the_end(hold: int) -> None:
    assert course(spec(schedule="linear", hold=hold), [0, 99], total=100) == [8.0, 8.0]


def test_warm_up_longer_than_the_run() -> None:
    assert course(spec(schedule="cosine", warmup=7), [0, 1], total=2) == [1.0, 2.0]


def after(asked: TrainSpec, losses: list[float]) -> list[Rate]:
    states, state = [], Rate()
    for loss in losses:
        state = lr_schedule.after_evaluation(asked, state, loss)
        states.append(state)
    return states


def test_plateau_as_in_the_word_language_model_example() -> None:
    asked = spec(schedule="plateau", factor=0.25, patience=0)
    states = after(asked, [5.0, 4.0, 4.0, 4.5, 3.0, 3.1])
    assert [state.scale for state in states] == [1.0, 1.0, 0.25, 0.0625, 0.0625, 0.015625]
    assert states[-1].best == 3.0
    assert lr_schedule.lr(asked, states[-1], 10, 100) == 8.0 * 0.25**3


def test_plateau_waits_out_its_patience() -> None:
    states = after(spec(schedule="plateau", factor=0.5, patience=2), [1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0])
    assert [state.scale for state in states] == [1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.25]
    assert states[-1].since_best == 6


def test_other_schedules_track_the_best_and_keep_their_rate() -> None:
    states = after(spec(), [2.0, math.nan, 3.0, 1.0])
    assert [(state.best, state.since_best, state.scale) for state in states] == [(2.0, 0, 1.0), (2.0, 1, 1.0), (2.0, 2, 1.0), (1.0, 0, 1.0)]


def test_a_first_loss_that_is_no_number_is_no_best() -> None:
    assert after(spec(), [math.nan, 3.0])[-1].best == 3.0


def test_early_stopping() -> None:
    asked = spec(schedule="plateau", early_stop=2)
    assert [lr_schedule.stops_early(asked, state) for state in after(asked, [2.0, 3.0, 1.0, 1.0, 1.0])] == [
        False,
        False,
        False,
        False,
        True,
    ]
    assert not lr_schedule.stops_early(spec(), Rate(since_best=1000))


def test_state_goes_through_json_exactly() -> None:
    state = after(spec(schedule="plateau", factor=0.3), [0.1 + 0.2, 1.0, 1.0])[-1]
    assert lr_schedule.from_json(json.loads(json.dumps(asdict(state)))) == state
    assert lr_schedule.from_json(asdict(Rate())) == Rate()


@pytest.mark.parametrize("kept", [{}, {"scale": "1", "best": None, "bad_evals": 0, "since_best": 0}, {**asdict(Rate()), "more": 1}])
def test_refuses_another_state(kept: dict[str, Any]) -> None:
    with pytest.raises(RunError, match="learning rate state"):
        lr_schedule.from_json(kept)
