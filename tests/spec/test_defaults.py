"""The batch that a spec leaves to the data."""

from __future__ import annotations

from typing import Any

import pytest

from carrywave.spec.data_spec import BatchSpec
from carrywave.spec.defaults import FEATURES, NGRAMS, resolve_for_data, with_kept_weights
from carrywave.spec.facts import DataFacts
from carrywave.spec.load import parse
from carrywave.spec.spec import Spec


def batch(task: str, facts: DataFacts, **given: Any) -> BatchSpec:
    return resolve_for_data(Spec.model_validate({"task": task, "batch": given}), facts).batch


@pytest.mark.parametrize(
    ("facts", "tokens"),
    [
        (DataFacts(sequences=270, steps=4_274, longest=26), 267),  # an epoch was a single batch of 4,096
        (DataFacts(sequences=537, steps=170_000, longest=1_344), 10_144),  # 32 sequences of 317 steps
        (DataFacts(sequences=1_000_000, steps=10_000_000, longest=30), 4_096),
        (DataFacts(sequences=3, steps=90, longest=40), 90),  # all of them, rather than batches of one
        (DataFacts(sequences=100, steps=146_000, longest=1_460), 23_360),  # 16 sequences, though an epoch then has few batches
        (DataFacts(sequences=50, steps=10_000_000, longest=400_000), 65_536),
    ],
)
def test_separate_sequences(facts: DataFacts, tokens: int) -> None:
    assert batch("classification", facts) == BatchSpec(tokens=tokens)


@pytest.mark.parametrize(
    ("steps", "lanes", "of_series"), [(460_000, 32, 32), (90_000, 7, 32), (32_768, 2, 32), (8_640, 1, 8), (2_048, 1, 2), (10, 1, 1)]
)
def test_streams(steps: int, lanes: int, of_series: int) -> None:
    facts = DataFacts(sequences=1, steps=steps, longest=steps)
    assert batch("language", facts) == BatchSpec(lanes=lanes, steps=64)
    assert batch("forecasting", facts) == BatchSpec(lanes=of_series, steps=64)


@pytest.mark.parametrize(
    ("task", "steps", "epochs", "patience"),
    [("language", 460_000, 5, 5), ("language", 90_000, 5, 5), ("forecasting", 60_480, 100, 15), ("forecasting", 10_000_000, 5, 5)],
)
def test_epochs_and_patience_follow_from_the_size_of_the_data(task: str, steps: int, epochs: int, patience: int) -> None:
    facts = DataFacts(sequences=1, steps=steps, longest=steps)
    train = resolve_for_data(Spec.model_validate({"task": task}), facts).train
    assert (train.epochs, train.early_stop) == (epochs, patience)
    given = resolve_for_data(Spec.model_validate({"task": task, "train": {"epochs": 7}}), facts).train
    assert (given.epochs, given.early_stop) == (7, 0)  # who says how long is not stopped before
    stopped = resolve_for_data(Spec.model_validate({"task": task, "train": {"epochs": 7, "early_stop": 2}}), facts).train
    assert (stopped.epochs, stopped.early_stop) == (7, 2)


def test_signals_get_a_front_and_short_sequences_none() -> None:
    asked = parse({"task": "classification"})
    signals = DataFacts(features=1, labels=("a", "b"), sequences=10, steps=5_000, longest=500)
    words = DataFacts(vocabulary=9, labels=("a", "b"), sequences=10, steps=5_000, longest=500)
    short = DataFacts(features=1, labels=("a", "b"), sequences=100, steps=2_000, longest=20)
    fronts = [resolve_for_data(asked, facts).model for facts in (signals, words, short)]
    assert [layer.stride for layer in fronts[0].front_layers] == [2, 2, 2]
    assert (fronts[0].front_dropout, fronts[0].front_scales) == (0.2, True)
    assert [(model.front, model.front_dropout, model.front_scales) for model in fronts[1:]] == [("none", 0.0, False)] * 2


def test_a_linear_part_is_there_unless_numbers_are_to_be_read_step_by_step() -> None:
    facts = DataFacts(features=1, labels=("a", "b"), sequences=10, steps=200, longest=20)
    words = DataFacts(vocabulary=9, labels=("a", "b"), sequences=10, steps=200, longest=20)
    found = [
        resolve_for_data(parse({"task": "classification", "model": model}), data).model.linear
        for model, data in (({}, facts), ({"linear": 0}, facts), ({"front": "none"}, facts), ({"bidirectional": False}, facts), ({}, words))
    ]
    assert found == [FEATURES, 0, 0, 0, NGRAMS]


def test_a_linear_part_follows_the_length_of_series_unless_it_is_given() -> None:
    facts = DataFacts(features=1, outputs=1, sequences=3, steps=108, longest=36)
    read = [
        resolve_for_data(
            Spec.model_validate({"task": "forecasting", "data": {"horizon": 4}, "model": {"linear": asked}}), facts
        ).model.linear
        for asked in (96, 30, 5, 0)
    ]
    assert read == [16, 30, 5, 0]  # 96 is the default


@pytest.mark.parametrize(("sequences", "season", "past"), [(400, 24, 336), (400, 48, 336), (400, 12, 168), (400, 1, 96), (10, 24, 96)])
def test_of_many_series_a_line_reads_several_seasons(sequences: int, season: int, past: int) -> None:
    facts = DataFacts(features=1, outputs=1, sequences=sequences, steps=1000 * sequences, longest=1000)
    asked = parse({"task": "forecasting", "data": {"horizon": 4, "season": season}})
    assert resolve_for_data(asked, facts).model.linear == past


def test_a_language_model_begins_as_its_optimizer_is_used_to() -> None:
    begun = [parse({"task": "language", "train": {"optimizer": optimizer}}).model for optimizer in ("adam", "sgd")]
    assert [(model.init_bias, model.forget_bias) for model in begun] == [("frequency", 1.0), ("zero", None)]


@pytest.mark.parametrize(
    ("task", "valid", "weights", "early_stop"),
    [
        ("classification", 20, "last", 0),
        ("classification", 200, "best", None),
        ("language", 1, "best", None),
        ("regression", None, "best", 0),
    ],
)
def test_what_is_too_small_to_choose_by_does_not_choose(task: str, valid: int | None, weights: str, early_stop: int | None) -> None:
    train = with_kept_weights(Spec.model_validate({"task": task}), valid).train
    assert (train.weights, train.early_stop) == (weights, early_stop)
    given = with_kept_weights(Spec.model_validate({"task": task, "train": {"weights": "last", "early_stop": 3}}), valid).train
    assert (given.weights, given.early_stop) == ("last", 3)


@pytest.mark.parametrize(
    ("sections", "wanted"),
    [
        ({}, "last"),
        ({"data": {"season": 24}}, "season"),
        ({"data": {"season": 24}, "model": {"linear": 5}}, "last"),
        ({"data": {"season": 24, "distribution": "poisson"}}, "none"),
    ],
)
def test_what_forecasts_are_added_to(sections: dict[str, Any], wanted: str) -> None:
    assert Spec.model_validate({"task": "forecasting", **sections}).starts_from == wanted
