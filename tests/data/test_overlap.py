"""What a model is judged by and also trained on is told."""

from __future__ import annotations

from typing import Any

import numpy as np

from carrywave.data.python_inputs import from_python
from carrywave.spec.load import parse

DRAW = np.random.default_rng(1)
STEPS, LABELS = DRAW.normal(size=(30, 5, 2)), np.arange(30) % 2


def lines(data: Any, part: str = "valid", /, **spec: Any) -> list[str]:
    return [line for line in from_python(data, parse(spec)).notes if line.startswith(f"{part}:")]


def test_sequences_that_are_also_in_train() -> None:
    data = {"train": (STEPS[:20], LABELS[:20]), "valid": (STEPS[15:], LABELS[15:]), "test": (STEPS[:4], LABELS[:4])}
    assert lines(data, task="classification") == [
        "valid: 5 of 15 sequences are also in train, so the figures look better than they are; keep them in only one of the two"
    ]
    assert lines(data, "test", task="classification")[0].startswith("test: all 4 sequences are also in train")
    assert not lines({"train": (STEPS[:20], LABELS[:20]), "valid": (STEPS[20:], LABELS[20:])}, task="classification")


def test_sequences_that_are_twice_in_one_file_are_told_when_a_share_is_held_out() -> None:
    assert lines((np.concatenate([STEPS, STEPS]), np.concatenate([LABELS, LABELS])), task="classification")[0].startswith("valid: ")
    assert not lines((STEPS, LABELS), task="classification")
