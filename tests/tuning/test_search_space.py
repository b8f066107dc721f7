"""What a search tries: choices and ranges, and which of them are refused before the first trial."""

from __future__ import annotations

from typing import Any

import pytest

from carrywave.errors import SpecError
from carrywave.tuning.search_space import Choices, Range, check_space, read_space, space_from, space_of, spec_with

BASE: dict[str, Any] = {"task": "classification", "data": {"train": "a.jsonl", "valid": "b.jsonl"}}


def test_words_are_choices_ranges_and_values_for_all() -> None:
    words = ["model.hidden=64,128", "train.lr=1e-4..1e-2", "model.layers=1..3", "train.epochs=9", "train.optimizer=adam,sgd"]
    space, fixed = space_of([*words, "model.dropout=0..0.5", "train.betas=[0.9,0.99],[0.8,0.9]", "data.columns=[a,b]"])
    assert space == {
        "model.hidden": Choices((64, 128)),
        "train.lr": Range(1e-4, 1e-2),
        "model.layers": Range(1, 3),
        "train.optimizer": Choices(("adam", "sgd")),
        "model.dropout": Range(0, 0.5),
        "train.betas": Choices(([0.9, 0.99], [0.8, 0.9])),
    }
    assert fixed == ["train.epochs=9", "data.columns=[a,b]"]
    assert read_space({key: values.to_json() for key, values in space.items()}) == space


def test_a_range_is_whole_or_by_orders_of_magnitude_as_its_ends_say() -> None:
    assert (Range(1, 3).whole, Range(1, 3).log) == (True, False)
    assert (Range(1e-4, 1e-2).whole, Range(1e-4, 1e-2).log) == (False, True)
    assert (Range(1, 10).log, Range(0, 100).log, Range(2.0, 19.0).log) == (True, False, False)
    assert Range(0.0, 0.5).rounded(0.123456) == 0.1235
    assert Range(0.12345, 0.5).rounded(0.123451) == 0.12345 or Range(0.12345, 0.5).rounded(0.123451) == 0.1235
    assert Range(0.99996, 2.0).rounded(0.99996) == 1.0


def test_python_says_the_same_with_lists_and_tuples() -> None:
    assert space_from({"train.lr": (1e-4, 1e-2), "model.hidden": [4, 8]}) == space_of(["train.lr=1e-4..1e-2", "model.hidden=4,8"])[0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"train.lr": 0.1}, "pass a list of choices, or a tuple"),
        ({"train.lr": (0.1, 0.1)}, "the lower one first"),
        ({"train.lr": (0.1, "x")}, "two finite numbers"),
        ({"model.hidden": [4]}, "fewer than two choices"),
        ({"model.hidden": [4, 4]}, "the same choice twice"),
        ({"model.hidden": [4, object()]}, "a choice that a spec cannot hold"),
    ],
)
def test_what_is_no_choice_and_no_range_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        space_from(given)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model.hiden=4,8"], "unknown key model.hiden; did you mean model.hidden"),
        (["model.hidden=4,-8"], "model.hidden is -8"),
        (["train.lr=-1..1"], "train.lr is -1"),
        (["train.best=loss,accuracy"], "train.best changes what"),
        (["data.share=0.1,0.2"], "data.share"),
        (["train.class_weights=balanced,null"], "train.class_weights changes what loss measures"),
        ([], "nothing is searched"),
    ],
)
def test_keys_and_values_are_checked_before_the_first_trial(words: list[str], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        check_space(BASE, space_of(words)[0])


def test_a_value_may_need_another_key() -> None:
    space, _ = space_of(["train.optimizer=adam,sgd", "train.momentum=0.0,0.9"])
    check_space(BASE, space)
    assert spec_with(BASE, {"train.optimizer": "sgd", "train.momentum": 0.9}).train.momentum == 0.9


def test_a_seed_that_picks_what_is_held_out_is_not_searched() -> None:
    with pytest.raises(SpecError, match=r"set data\.valid"):
        check_space({"task": "classification", "data": {"train": "a.jsonl"}}, space_of(["train.seed=1,2"])[0])
    check_space(BASE, space_of(["train.seed=1,2"])[0])
