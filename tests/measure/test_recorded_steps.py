"""Whole steps as the training loop takes them; without a GPU nothing is captured, and steps are timed as they are."""

from __future__ import annotations

import pytest
import torch

from carrywave.measure import recorded_steps
from carrywave.measure.recorded_steps import RecordedStep, step_overheads


def test_a_step_changes_hardly_anything_and_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_steps, "REPEATS", 2)
    step = RecordedStep(torch.device("cpu"), 8, 4, "sgd", "fp32")
    before = [parameter.clone() for parameter in step.model.parameters()]
    assert step.device_seconds() > 0
    assert torch.as_tensor(step.sums)[3] == 5  # steps
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(before, step.model.parameters(), strict=True))


def test_what_a_step_takes_at_least_grows_with_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer has six tensors with its head, four have eighteen."""
    monkeypatch.setattr(recorded_steps, "LONG", 4)
    known = {6: 2e-3, 18: 5e-3}
    monkeypatch.setattr(RecordedStep, "seconds", lambda step, repeats=0: known[len(list(step.model.parameters()))])
    monkeypatch.setattr(RecordedStep, "device_seconds", lambda step: 1.5e-3)
    found = step_overheads(torch.device("cpu"), "fp32")
    assert found == pytest.approx({"step_seconds": 0.5e-3, "least_step_seconds": 0.5e-3, "least_tensor_seconds": 0.25e-3})
    known[18] = 1e-3  # noise
    found = step_overheads(torch.device("cpu"), "fp32")
    assert found["least_step_seconds"] == 2e-3
    assert found["least_tensor_seconds"] == 0
