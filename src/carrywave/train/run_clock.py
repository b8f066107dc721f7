"""The clock of a run: rates and the time left. Nothing that it says reaches metrics.jsonl."""

from __future__ import annotations

import math
import time

TICK_SECONDS = 0.25  # how often the watcher is told, and a CUDA device asked for its numbers


class RunClock:
    """Rates and the time left. Evaluation is left out of the rate."""

    def __init__(self) -> None:
        now = time.monotonic()
        self.started = self.lap_start = self.last_tick = now
        self.tokens = self.lap_tokens = 0
        self.steps = 0
        self.rate = 0.0

    def count(self, tokens: int) -> None:
        """One more step, of so many real tokens."""
        self.tokens += tokens
        self.lap_tokens += tokens
        self.steps += 1

    def due(self) -> bool:
        """Whether it is time to tell the watcher."""
        return time.monotonic() - self.last_tick >= TICK_SECONDS

    def ticked(self) -> None:
        """The watcher was told of a step just now."""
        self.told()
        self.rate = self.tokens / max(self.last_tick - self.started, 1e-9)

    def told(self) -> None:
        """The watcher was told of something else: the rate of steps is as it was."""
        self.last_tick = time.monotonic()

    def skip(self, seconds: float) -> None:
        """Leave so many seconds of other work out of the rates."""
        self.started += seconds
        self.lap_start += seconds

    def lap(self) -> tuple[float, float]:
        """Seconds since the last lap, and tokens a second in it."""
        now = time.monotonic()
        seconds, tokens = now - self.lap_start, self.lap_tokens
        self.lap_start, self.lap_tokens = now, 0
        return seconds, tokens / max(seconds, 1e-9)

    def eta(self, step: int, total: float) -> float | None:
        """Seconds that the remaining steps will take at the pace so far."""
        if not self.steps or not math.isfinite(total):
            return None
        return (time.monotonic() - self.started) / self.steps * max(0.0, total - step)
