"""Defaults that depend on the task: they fill what is not set, fit together, and change nothing in the spec of a run."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carrywave.spec.load import parse
from carrywave.spec.spec import Spec

TASKS = ("language", "classification", "tagging", "transcription", "forecasting", "regression")


OPTIONS: dict[str, list[dict[str, Any]]] = {
    "language": [
        {"model": {"cell": "rnn"}},
        {"train": {"optimizer": "sgd", "lr": 20}},
        {"data": {"tokens": "word"}, "model": {"hidden": 650}},
    ],
    "classification": [{"model": {"hidden": [8, 6], "layers": 2}}, {"model": {"bidirectional": False}}, {"train": {"optimizer": "adam"}}],
    "tagging": [{"batch": {"lanes": 4, "steps": 8}}, {"model": {"bidirectional": False}}],
    "transcription": [{"model": {"upsample": 3}}, {"model": {"bidirectional": False}}, {"model": {"front": "small"}}],
    "forecasting": [
        {"data": {"transform": "log"}},
        {"data": {"quantiles": [0.1, 0.5, 0.9]}},
        {"model": {"hidden": [8, 6], "layers": 2}},
    ],
    "regression": [{"model": {"front": "none"}}, {"train": {"weight_decay": 0.5}}, {"train": {"optimizer": "adamw"}}],
}


@pytest.mark.parametrize(("task", "given_keys"), [(task, keys) for task in TASKS for keys in OPTIONS[task]])
def test_what_is_set_stays_and_what_does_not_go_with_it_is_left_out(task: str, given_keys: dict[str, Any]) -> None:
    spec = parse({"task": task, **given_keys})
    Spec.model_validate_json(spec.model_dump_json())  # keys fit together
    for section, keys in given_keys.items():
        for key, value in keys.items():
            found = getattr(getattr(spec, section), key)
            assert (list(found) if isinstance(found, tuple) else found) == value


@settings(max_examples=30, deadline=None)
@given(width=st.integers(1, 4096), layers=st.integers(1, 3))
def test_the_rate_of_a_language_model_falls_with_its_width(width: int, layers: int) -> None:
    rate = parse({"model": {"hidden": width, "layers": layers}}).train.lr
    assert rate == pytest.approx(1.28 / max(128, width))


def test_a_default_that_is_written_out_changes_nothing() -> None:
    for task in TASKS:
        spec = parse({"task": task})
        for section in ("data", "model", "batch", "train"):
            for name in type(getattr(spec, section)).model_fields:
                value = getattr(getattr(spec, section), name)
                if value == getattr(getattr(parse({"task": task}, defaults=False), section), name):
                    continue
                assert parse({"task": task, section: {name: value}}) == spec, (task, section, name)
