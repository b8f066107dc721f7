"""What wastes a run is said in one line, and nothing is said where it does not."""

from __future__ import annotations

from typing import Any

import numpy as np

from carrywave.data.order import SequenceOrder
from carrywave.data.prepare import from_python
from carrywave.spec.spec import Spec
from carrywave.tasks.task import Task
from carrywave.tasks.warnings import (
    flat_sequences,
    one_step,
    short_of_season,
    single_words,
    too_few_epochs,
    unknown_tokens,
    untrained_tokens,
    warnings_of,
)


def spec(task: str = "classification", *, batch: dict[str, Any] | None = None, train: dict[str, Any] | None = None, **data: Any) -> Spec:
    return Spec.model_validate({"task": task, "data": {"share": 0, "horizon": 2, **data}, "batch": batch or {}, "train": train or {}})


def waves(count: int = 40) -> tuple[Any, list[int]]:
    """The same shapes at sizes eight orders of magnitude apart: two kinds of waves."""
    time = np.arange(16.0)
    labels = [number % 2 for number in range(count)]
    return [10.0 ** (number % 9 - 4) * np.sin(time * (1 + label)) for number, label in enumerate(labels)], labels


def test_sequences_that_are_flat_once_they_are_scaled() -> None:
    found = from_python(waves(), spec())
    said = flat_sequences(spec(), found.codec, found.train)
    assert said is not None
    assert said.startswith("70% of the sequences in train are nearly constant after scaling (standard deviation below 0.01);")
    own = spec(standardize="sequence")
    scaled = from_python(waves(), own)
    assert flat_sequences(own, scaled.codec, scaled.train) is None
    even = ([wave / np.abs(wave).max() for wave in waves()[0]], waves()[1])
    found = from_python(even, spec())
    assert flat_sequences(spec(), found.codec, found.train) is None


def test_a_vocabulary_that_hardly_covers_valid() -> None:
    words = spec("language", tokens="word", batch={"lanes": 1, "steps": 4})
    found = from_python({"train": "a b c d\n" * 20, "valid": "a b x y\n" * 5}, words)
    said = unknown_tokens(found.codec, found.train, found.valid)
    fact = "40.0% of the tokens in valid are <unk>, but train has none, so nothing is learned about it"
    assert said == f"{fact}; set model.dropout_rare=0.5 or data.min_count=2, or data.tokens=bpe"
    limited = spec("language", tokens="word", vocabulary=3, batch={"lanes": 1, "steps": 4})
    found = from_python({"train": "a b c d\n" * 20 + "e\n", "valid": "a b x y\n" * 5}, limited)
    said = unknown_tokens(found.codec, found.train, found.valid)
    assert said is not None
    assert "in train; set a larger data.vocabulary" in said
    covered = from_python({"train": "a b c d\n" * 20, "valid": "a b c\n" * 5}, words)
    assert unknown_tokens(covered.codec, covered.train, covered.valid) is None
    assert warnings_of(words, covered.codec, SequenceOrder(np.full(20, 10), tokens=20), covered.train, covered.valid) == []


def test_forecasts_without_a_season_before_them() -> None:
    asked = spec("forecasting", season=24, split=[0.5, 0.5])
    found = from_python(np.arange(40.0)[:, None], asked)
    task = Task.of(asked, found.codec, found.facts, found.train)
    assert found.valid is not None
    part = task.part("valid", found.valid)
    # Its first origin is the last of the 20 rows before it, however few of them warm up the carry.
    assert part.notes == (
        "valid: 4 of 19 forecasts have less than a season (24 rows) before them, so their naive forecast is the last value; "
        "add earlier rows",
    )
    enough = asked.model_copy(update={"data": asked.data.model_copy(update={"season": 20})})
    found = from_python(np.arange(40.0)[:, None], enough)
    assert found.valid is not None
    assert Task.of(enough, found.codec, found.facts, found.train).part("valid", found.valid).notes == ()


def test_the_vocabulary_is_that_of_the_whole_file_and_what_only_valid_holds_is_told() -> None:
    text = " ".join(f"w{number % 20}" for number in range(400)) + "\n" + " ".join(f"z{number}" for number in range(60)) + "\n"
    asked = spec("language", tokens="word", share=0.1, batch={"lanes": 1, "steps": 8})
    found = from_python(text, asked)
    assert found.valid is not None
    assert len({f"z{number}" for number in range(60)} - set(found.codec.vocabulary)) == 4  # <unk> is learned from these
    told = untrained_tokens(found.codec, found.train, found.valid)
    # Of the last 46 tokens, 44: words that are there once, but for one that is <unk>, and not the end of the line.
    assert told is not None
    assert told.startswith("95.7% of the tokens in valid never occur in train, so nothing is learned about them; set data.min_count=2")
    apart = from_python({"train": text, "valid": "w1 z1 new\n"}, asked)
    assert "new" not in apart.codec.vocabulary
    assert untrained_tokens(apart.codec, apart.train, apart.valid) is None
    assert "whole training file" in (type(asked.data).model_fields["share"].description or "")


def test_epochs_that_end_before_the_steps_asked_for() -> None:
    one = SequenceOrder(np.full(20, 10), tokens=4096)
    few = spec(batch={"tokens": 4096}, train={"epochs": 5, "max_steps": 1000})
    assert one_step(few, one) is None
    said = too_few_epochs(few, one)
    assert said == "train.epochs=5 ends the run after 5 steps, before train.max_steps=1000; raise train.epochs to reach it"
    assert too_few_epochs(spec(batch={"tokens": 4096}, train={"epochs": 5, "max_steps": 5}), one) is None
    assert too_few_epochs(spec(), one) is None


def test_a_forecast_with_less_than_a_season_before_it() -> None:
    rows = np.array([7, 6, 30])
    said = short_of_season(spec("forecasting", season=7), rows)
    assert said is not None
    assert said.startswith("1 of 3 forecasts have less than a season (7 rows) before the first step, so the last value stands for the last")
    assert short_of_season(spec("forecasting", season=6), rows) is None


def test_names_are_better_read_by_characters() -> None:
    """Surnames by nationality, one to a line, are what many learn recurrent networks with."""
    asked = spec(tokens="word")
    names, phrases = (
        from_python([{"text": text, "label": "x"} for text in texts], asked)
        for texts in (("Nagata", "Rossi", "Van Dijk"), ("so it is", "it is so", "is it"))
    )
    said = single_words(asked, names.codec, names.train)
    assert said is not None
    assert "set data.tokens=char" in said
    assert single_words(asked, phrases.codec, phrases.train) is None
