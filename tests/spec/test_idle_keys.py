"""Keys that are set where they have no effect: a line says so, and nothing is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import carrywave as cw
from carrywave.spec.idle_keys import WHERE, idle, is_set
from carrywave.spec.load import parse
from carrywave.spec.spec import Spec


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"train": {"patience": 3}}, "train.patience"),
        ({"train": {"momentum": 0.9}}, "train.momentum"),
        ({"train": {"optimizer": "sgd", "betas": [0.8, 0.9]}}, "train.betas"),
        ({"train": {"class_weights": "balanced"}}, "train.class_weights"),
        ({"train": {"loss": "mae"}}, "train.loss"),
        ({"data": {"valid": "v.txt", "share": 0.2}}, "data.share"),
        ({"data": {"split": [0.8, 0.2]}}, "data.split"),
        ({"data": {"horizon": 12}}, "data.horizon"),
        ({"model": {"pool": "mean"}}, "model.pool"),
        ({"data": {"augment": {"noise": 0.1}}}, "data.augment"),
    ],
)
def test_a_key_without_effect_is_named(values: dict[str, Any], key: str) -> None:
    [line] = idle(parse(values))
    assert line.startswith(f"{key} is for ")


@pytest.mark.parametrize("task", ["language", "classification", "tagging", "transcription", "forecasting", "regression"])
def test_no_default_is_idle(task: str) -> None:
    assert idle(parse({"task": task})) == []
    assert all(hasattr(getattr(Spec(), key.split(".")[0]), key.split(".")[1]) for keys, _, _ in WHERE for key in keys)


def test_what_goes_by_validation_data_needs_some() -> None:
    spec = parse({"train": {"early_stop": 3}})
    assert idle(spec) == []
    assert len(idle(spec, valid=False)) == 1
    assert is_set(spec, "train.early_stop")


def test_a_run_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = {"batch": {"lanes": 2, "steps": 5}, "train": {"max_steps": 1, "patience": 3}}
    cw.fit({"hidden": 4, "layers": 1}, "abcdefgh" * 40, spec=keys, run=tmp_path / "run")
    assert "train.patience is for train.schedule=plateau, and has no effect here" in caplog.text
