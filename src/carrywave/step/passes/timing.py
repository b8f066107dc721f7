"""When the tasks of a step run: as named ranges in a trace of torch.profiler, or timed one by one by a `TaskClock`.

Without a profiler a range costs the reading of a flag. In a step that is replayed from a CUDA graph there are none, because no Python runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.profiler import record_function

from carrywave.plan.schedule.schedule import StageTask

PREFIX = "carrywave "
_NOTHING: AbstractContextManager[None] = nullcontext()


def span(name: str) -> AbstractContextManager[object]:
    """A range, if a profiler records it."""
    return record_function(PREFIX + name) if profiler._is_profiler_enabled else _NOTHING


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
    """Collects laps. It synchronizes with the device around every task, so it is meant for inspecting single steps."""

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
