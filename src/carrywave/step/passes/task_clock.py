"""A `TaskClock` records when a worker ran each task of a step. It synchronizes with the device around every task, so it is meant for
inspecting single steps, not for use in every one.
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
    """A time span of a task, in seconds: its phase, `wait` for the message it reads, `send`, or `W` (deferred weight gradients)."""

    label: str
    task: StageTask
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Arrived(NamedTuple):
    """A message that has already been waited for."""

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
        """Time the body of this context."""
        start = self.now()
        yield
        self.laps.append(Lap(label, task, start, self.now()))

    def now(self) -> float:
        """The time at which the device has finished all work queued so far."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def seconds(self, *labels: str) -> float:
        """Total time of all laps with these labels, or of all laps if none is given."""
        return sum(lap.seconds for lap in self.laps if not labels or lap.label in labels)
