"""A `DeviceClock` times the tasks of a step that is captured: laps have fixed places, and the last step is read from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from carrywave.data.batch import Batch
from carrywave.errors import PlanError
from carrywave.kernels.cuda import clock
from carrywave.model.encoders import Numbers
from carrywave.model.heads.forecast import Forecast
from carrywave.model.lstm import LSTM
from carrywave.model.model import Model
from carrywave.parallel.mesh import Mesh
from carrywave.plan.plan import Plan
from carrywave.plan.schedule.schedule import StageTask
from carrywave.step.graphs.capture import Capture
from carrywave.step.passes import device_clock
from carrywave.step.passes.device_clock import DeviceClock
from carrywave.step.passes.task_clock import TaskClock
from carrywave.step.trainer import Trainer

CPU = torch.device("cpu")


@pytest.fixture
def stamps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The addresses that stamps were written to; the n-th stamp writes n seconds."""
    seen: list[int] = []

    def stamp(at: Tensor) -> None:
        seen.append(at.data_ptr())
        at.fill_(len(seen) * 10**9)

    monkeypatch.setattr(clock, "stamp", stamp)
    return seen


def test_a_lap_has_the_same_place_in_every_step(stamps: list[int]) -> None:
    own = DeviceClock(CPU)
    tasks = [StageTask("F", 0, 0), StageTask("B", 0, 0)]
    for _ in range(2):
        for task in tasks:
            with own.lap(task.phase, task):
                pass
        with own.lap("W", tasks[1]):
            pass
    assert stamps[:6] == stamps[6:]
    assert len(set(stamps)) == 6
    laps = own.read()
    assert [(lap.label, lap.task, lap.start, lap.end) for lap in laps] == [
        ("F", tasks[0], 7.0, 8.0),
        ("B", tasks[1], 9.0, 10.0),
        ("W", tasks[1], 11.0, 12.0),
    ]
    assert own.seconds("F", "W") == 2.0


def test_a_step_of_too_many_laps_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_clock, "MOST_LAPS", 1)
    own = DeviceClock(CPU)
    with own.lap("F", StageTask("F", 0, 0)):
        pass
    with pytest.raises(PlanError, match="more than 1 laps to time; use fewer chunks"), own.lap("F", StageTask("F", 0, 1)):
        pass


def trainer() -> tuple[Trainer, Batch]:
    torch.manual_seed(0)
    model = Model(Numbers(4), LSTM(4, 4, 2), Forecast(4, 1, 1))
    plan = Plan(chunk_steps=2)
    batch = Batch.of(torch.randn(6, 3, 4), torch.zeros(6, 3, 1, 1))
    return Trainer(model, {"lr": 0.1}, mesh=Mesh.alone(CPU, plan), keep_state=False), batch


def test_it_times_all_tasks_of_a_step() -> None:
    own, batch = trainer()
    own.compute.clock = timer = DeviceClock(CPU)
    own.step(batch)
    laps = timer.read()
    assert [f"{lap.label}{lap.task.chunk}" for lap in laps] == ["F0", "F1", "F2", "B2", "B1", "B0", "W0"]
    assert all(lap.seconds > 0 for lap in laps)


class Passing(Capture):
    """Counts what it is given, and captures nothing."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.calls = 0

    def __call__(self, kind: str, step: Callable[..., Any], batches: Any, tensors: Any, state: Any, *, under: Any = ()) -> Any:
        self.calls += 1
        return step(batches, tensors, state)


@pytest.mark.parametrize(("kind", "captured"), [(DeviceClock, 1), (TaskClock, 0), (None, 1)])
def test_only_a_step_without_a_clock_of_the_host_is_captured(kind: type[TaskClock] | None, captured: int) -> None:
    own, batch = trainer()
    own.capture = capture = Passing()
    own.compute.clock = None if kind is None else kind(CPU)
    own.step(batch)
    assert capture.calls == captured
