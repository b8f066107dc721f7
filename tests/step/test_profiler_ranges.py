"""Ranges for torch.profiler: the tasks of the schedule in their order, and nothing where no profiler runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent))
from _small_models import batch_of, build

import carrywave as cw
from carrywave.plan.plan import Plan
from carrywave.step.passes.timing import PREFIX


def ranges(trainer: cw.Trainer, *, apart: bool = False) -> list[str]:
    batch = batch_of(4, [4, 3, 4, 2])
    trainer.step(batch)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as recorded:
        if apart:
            trainer.backward(batch)
            trainer.apply()
        else:
            trainer.step(batch)
    events = sorted((event for event in recorded.events() if event.name.startswith(PREFIX)), key=lambda event: event.time_range.start)
    return [event.name.removeprefix(PREFIX) for event in events]


@pytest.mark.parametrize(
    ("plan", "tasks"),
    [
        (Plan(), "F0 B0"),
        (Plan(chunk_steps=2), "F0 F1 B1 B0 W"),
        (Plan(chunk_steps=2, micro_batches=2), "F0a F1a F0b F1b B1a B0a Wa B1b B0b Wb"),
    ],
)
def test_the_tasks_of_a_step_in_their_order(plan: Plan, tasks: str) -> None:
    trainer = cw.Trainer(build(), {"lr": 0.01}, plan=plan)
    found = ranges(trainer)
    assert (found[0], found[-2:]) == ("step", ["sum of gradients", "update"])
    assert sorted(found[1:-2]) == sorted(tasks.split())
    assert ranges(trainer, apart=True) == ["backward", *found[1:]]
