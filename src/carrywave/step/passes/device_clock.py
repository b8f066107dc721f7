"""A `DeviceClock` is a `TaskClock` whose times the device takes itself, so a step can be captured with it and every replay is timed.

It does not wait for the device around tasks, which would change what is measured: a lap is two stores of the device's clock, a few
microseconds. All workers on one GPU read one clock, so their laps can be laid side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from carrywave.errors import PlanError
from carrywave.kernels.cuda import clock
from carrywave.plan.schedule.schedule import StageTask
from carrywave.step.passes.task_clock import Lap, TaskClock

MOST_LAPS = 8192  # in one step


class DeviceClock(TaskClock):
    """Collects laps in memory of the device; `read` fetches those of the last step. Set it before the first step that is captured."""

    recordable = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        # A lap has its own place, the same in every step: a captured graph writes to fixed addresses.
        self._places: dict[tuple[str, StageTask], int] = {}
        self._stamps = torch.zeros(MOST_LAPS, 2, dtype=torch.int64, device=device)

    @contextmanager
    def lap(self, label: str, task: StageTask) -> Iterator[None]:
        """Time the body of this context; a task has at most one lap of a label in a step."""
        slot = self._places.setdefault((label, task), len(self._places))
        if slot >= MOST_LAPS:
            raise PlanError(f"a step has more than {MOST_LAPS} laps to time; use fewer chunks")
        start, end = self._stamps[slot]
        clock.stamp(start)
        yield
        clock.stamp(end)

    def read(self) -> list[Lap]:
        """The laps of the last step, in the order in which they began; waits for the device."""
        times = self._stamps[: len(self._places)].tolist()
        laps = [Lap(label, task, start / 1e9, end / 1e9) for (label, task), (start, end) in zip(self._places, times, strict=True)]
        self.laps = sorted(laps, key=lambda lap: lap.start)
        return self.laps
