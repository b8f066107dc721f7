"""Whole steps as the training loop takes them; without a GPU nothing is captured, and steps are timed as they are."""

from __future__ import annotations

import pytest
import torch

from carrywave.measure import recorded_steps
from carrywave.measure.recorded_steps import RecordedStep


def test_a_step_changes_hardly_anything_and_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_steps, "REPEATS", 2)
    step = RecordedStep(torch.device("cpu"), 8, 4, "sgd", "fp32")
    before = [parameter.clone() for parameter in step.model.parameters()]
    assert step.device_seconds() > 0
    assert torch.as_tensor(step.sums)[3] == 5  # steps
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(before, step.model.parameters(), strict=True))
