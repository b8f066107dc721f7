"""Units are timed as the runtime runs them: every kind can be, in every precision that the CPU has, and nothing of it is zero or below."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from carrywave.measure import rig, work
from carrywave.measure.rig import Rig, nothing, time_task, time_unit
from carrywave.model.model import Model
from carrywave.plan.cost.profile import Sample
from carrywave.plan.cost.sample_requests import Ask
from carrywave.step.passes.task_clock import TaskClock
from carrywave.step.trainer import Trainer

CPU = torch.device("cpu")
KINDS = [
    Ask("lstm", 6, 8, 3, 4),
    Ask("lstm", 6, 8, 3, 4, projection=5),
    Ask("lstm", 8, 8, 3, 4, layers=3),
    Ask("embedding", 20, 8, 3, 4),
    Ask("softmax", 8, 20, 3, 4),
    Ask("linear", 8, 5, 3, 4),
    Ask("dropout", 8, 8, 3, 4),
    Ask("norm", 8, 8, 3, 4),
]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(rig, "LEAST_RUNS", 1)


@pytest.mark.parametrize("ask", KINDS, ids=lambda ask: f"{ask.kind}-{ask.projection}-{ask.layers}")
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16"])
def test_every_kind_is_timed(ask: Ask, whole: bool, precision: str) -> None:
    asked = replace(ask, precision=precision)
    met: list[None] = []
    found = time_unit(asked, CPU, 1e-6, lambda: met.append(None), alone=whole)
    assert isinstance(found, Sample)
    assert found.forward_seconds > 0
    assert found.backward_seconds >= found.deferred_seconds >= 0
    assert found.backward_seconds > 0
    assert (found.kind, found.inputs, found.outputs, found.lanes, found.steps) == (ask.kind, ask.inputs, ask.outputs, 3, 4)
    assert (found.projection, found.layers, found.precision) == (ask.projection, ask.layers, precision)
    assert met  # the others are waited for, so that all do the same at once


def test_a_stage_of_one_unit_runs_forward_and_backward_in_chunks() -> None:
    clock = TaskClock(CPU)
    unit = Rig(Ask("lstm", 6, 8, 3, 8), CPU)
    unit.run(4, clock)
    assert [lap.label for lap in clock.laps if lap.label in "FB"] == ["F"] * 4 + ["B"] * 4
    assert [lap.label for lap in clock.laps].count("W") == 1
    assert all(parameter.grad is not None for name, parameter in unit.stage.lstm.named_parameters() if "weight" in name)
    one = TaskClock(CPU)
    unit.run(1, one)
    assert one.seconds("W") == 0  # nothing is put off where time is not cut


def test_only_layers_have_work_in_them() -> None:
    empty = Rig(nothing("fp32"), CPU)
    clock = TaskClock(CPU)
    empty.run(2, clock)
    assert [lap.label for lap in clock.laps if lap.label in "FB"] == ["F", "F", "B", "B"]
    assert time_task(CPU, "fp32", lambda: None) > 0


def test_what_a_task_takes_anyway_is_taken_off() -> None:
    assert rig.without_task(1.0, 0.3) == pytest.approx(0.7)
    assert rig.without_task(1.0, 2.0) == pytest.approx(0.2)  # never below a share of what was timed


def test_updates_are_timed_without_moving_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wide model would diverge within the few steps that are timed: what is measured must not depend on how training goes."""
    made: list[tuple[Trainer, list[Tensor]]] = []

    def trainer(model: Model, *args: Any, **options: Any) -> Trainer:
        found = Trainer(model, *args, **options)
        made.append((found, [parameter.detach().clone() for parameter in model.parameters()]))
        return found

    monkeypatch.setattr(work, "Trainer", trainer)
    sample = work._update(torch.device("cpu"), "adam", 100_000, 1, "fp32", lambda: None)
    assert sample.name == "adam"
    assert sample.forward_seconds > 0
    [(found, before)] = made
    for parameter, own in zip(found.model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.detach(), own, rtol=0, atol=1e-7)
