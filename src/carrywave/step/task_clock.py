"""A `Clock` that goes along with a step: what a worker did from when to when. It waits for the device around each task, so that it is
for single steps that are looked at, not for every one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from carrywave.plan.schedule.schedule import StageTask


class Lap(NamedTuple):
    """From one moment to another: a task by its phase, `wait` for the message that a task reads, `send`, or `pay` (put-off gradients)."""

    label: str
    task: StageTask
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Arrived(NamedTuple):
    """A message that was waited for already."""

    tensor: Tensor

    def wait(self) -> Tensor:
        """The message."""
        return self.tensor


class TaskClock:
    """Collects laps."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.laps: list[Lap] = []

    @contextmanager
    def lap(self, label: str, task: StageTask) -> Iterator[None]:
        """Time what is done within."""
        start = self.now()
        yield
        self.laps.append(Lap(label, task, start, self.now()))

    def now(self) -> float:
        """The time at which the device is through with all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def seconds(self, *labels: str) -> float:
        """All laps of these labels together; of all, where none is named."""
        return sum(lap.seconds for lap in self.laps if not labels or lap.label in labels)
