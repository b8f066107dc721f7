"""The batch that a spec leaves to the data."""

from __future__ import annotations

from typing import Any

import pytest

from carrywave.spec.data_spec import BatchSpec
from carrywave.spec.defaults import fitted
from carrywave.spec.facts import DataFacts
from carrywave.spec.spec import Spec


def batch(task: str, facts: DataFacts, **given: Any) -> BatchSpec:
    return fitted(Spec.model_validate({"task": task, "batch": given}), facts).batch


@pytest.mark.parametrize(
    ("facts", "tokens"),
    [
        (DataFacts(sequences=270, steps=4_274, longest=26), 267),  # an epoch was a single batch of 4,096
        (DataFacts(sequences=537, steps=170_000, longest=1_344), 10_144),  # 32 sequences of 317 steps
        (DataFacts(sequences=1_000_000, steps=10_000_000, longest=30), 4_096),
        (DataFacts(sequences=3, steps=90, longest=40), 40),
        (DataFacts(sequences=50, steps=10_000_000, longest=400_000), 65_536),
    ],
)
def test_separate_sequences(facts: DataFacts, tokens: int) -> None:
    assert batch("classification", facts) == BatchSpec(tokens=tokens)


@pytest.mark.parametrize(("steps", "lanes"), [(460_000, 32), (32_768, 32), (8_640, 8), (2_048, 2), (400, 1), (10, 1)])
def test_streams(steps: int, lanes: int) -> None:
    facts = DataFacts(sequences=1, steps=steps, longest=steps)
    assert batch("language", facts) == batch("forecasting", facts) == BatchSpec(lanes=lanes, steps=64)


def test_what_is_given_stays() -> None:
    facts = DataFacts(sequences=1, steps=8_640, longest=8_640)
    assert batch("forecasting", facts, lanes=3) == BatchSpec(lanes=3, steps=64)
    assert batch("forecasting", facts, steps=16, vary=True) == BatchSpec(lanes=32, steps=16, vary=True)
    assert batch("language", facts, tokens=77) == BatchSpec(tokens=77)
    asked = Spec.model_validate({"batch": {"lanes": 3, "steps": 5}})
    assert fitted(asked, facts) is asked
    assert fitted(Spec(), DataFacts(vocabulary=10)) == Spec()  # nothing is known of its size


def test_a_season_is_what_forecasts_are_relative_to_unless_something_else_is_asked_for() -> None:
    facts = DataFacts(features=1, steps=1000)
    for data, wanted in (
        ({}, "last"),
        ({"season": 24}, "season"),
        ({"season": 24, "residual": "last"}, "last"),
        ({"residual": "none"}, "none"),
    ):
        assert fitted(Spec.model_validate({"task": "forecasting", "data": data}), facts).data.residual == wanted
    assert fitted(Spec(), facts).data.residual == "auto"
