"""The wall clock of a run: throughput and time remaining. None of it reaches metrics.jsonl."""

from __future__ import annotations

import math
import time

TICK_SECONDS = 0.25  # between two updates of the watcher, for which a CUDA device is synchronized


class RunClock:
    """Throughput and time remaining, with evaluations excluded."""

    def __init__(self) -> None:
        now = time.monotonic()
        self.started = self.lap_start = self.last_tick = now
        self.tokens = self.lap_tokens = 0
        self.steps = 0
        self.rate = 0.0

    def count(self, tokens: int) -> None:
        """Count one more step, of `tokens` real tokens."""
        self.tokens += tokens
        self.lap_tokens += tokens
        self.steps += 1

    def due(self) -> bool:
        """True if it is time to update the watcher."""
        return time.monotonic() - self.last_tick >= TICK_SECONDS

    def ticked(self) -> None:
        """Record that the watcher has just been shown a step, and update the rate."""
        self.shown()
        self.rate = self.tokens / max(self.last_tick - self.started, 1e-9)

    def shown(self) -> None:
        """Record that the watcher was shown something else; the rate of steps is unchanged."""
        self.last_tick = time.monotonic()

    def skip(self, seconds: float) -> None:
        """Exclude time spent on other work from the rates."""
        self.started += seconds
        self.lap_start += seconds

    def lap(self) -> tuple[float, float]:
        """Seconds since the last lap, and tokens per second in it."""
        now = time.monotonic()
        seconds, tokens = now - self.lap_start, self.lap_tokens
        self.lap_start, self.lap_tokens = now, 0
        return seconds, tokens / max(seconds, 1e-9)

    def eta(self, step: int, total: float) -> float | None:
        """Seconds that the remaining steps will take at the average pace so far; None if that is not known."""
        if not self.steps or not math.isfinite(total):
            return None
        return (time.monotonic() - self.started) / self.steps * max(0.0, total - step)
