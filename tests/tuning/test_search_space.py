"""What a search tries: choices and ranges, and which of them are refused before the first trial."""

from __future__ import annotations

from typing import Any

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from carrywave.errors import SpecError
from carrywave.tuning.search_space import check_space, combinations, samples_of, space_from, space_of, value_of

BASE: dict[str, Any] = {"task": "classification", "data": {"train": "a.jsonl", "valid": "b.jsonl"}}


def test_words_are_choices_ranges_and_values_for_all() -> None:
    words = ["model.hidden=64,128", "train.lr=1e-4..1e-2", "model.layers=1..3", "train.epochs=9", "train.optimizer=adam,sgd"]
    space, fixed = space_of(
        [*words, "model.dropout=0..0.5", "train.betas=[0.9,0.99],[0.8,0.9]", "data.columns=[a,b]", "train.warmup=1..10"]
    )
    assert space == {
        "model.hidden": CategoricalDistribution(("64", "128")),
        "train.lr": FloatDistribution(1e-4, 1e-2, log=True),
        "model.layers": IntDistribution(1, 3),
        "train.optimizer": CategoricalDistribution(('"adam"', '"sgd"')),
        "model.dropout": FloatDistribution(0, 0.5),
        "train.betas": CategoricalDistribution(("[0.9, 0.99]", "[0.8, 0.9]")),
        "train.warmup": IntDistribution(1, 10, log=True),
    }
    assert fixed == ["train.epochs=9", "data.columns=[a,b]"]
    assert samples_of(space["train.betas"]) == [[0.9, 0.99], [0.8, 0.9]]
    assert value_of(space["train.betas"], "[0.8, 0.9]") == [0.8, 0.9]
    assert [value_of(space["model.dropout"], drawn) for drawn in (0.123456, 0.49999999)] == [0.1235, 0.5]
    assert combinations(space) is None
    assert len(combinations({key: space[key] for key in ("model.hidden", "train.betas")}) or []) == 4
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


def test_a_seed_that_picks_what_is_held_out_is_not_searched() -> None:
    with pytest.raises(SpecError, match=r"set data\.valid"):
        check_space({"task": "classification", "data": {"train": "a.jsonl"}}, space_of(["train.seed=1,2"])[0])
    check_space(BASE, space_of(["train.seed=1,2"])[0])
