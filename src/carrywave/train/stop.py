"""Signals that ask a run to end: the step in hand is finished and a snapshot written; a second signal leaves at once.

A launcher passes signals on, and a cluster may send them to every process: the same one again in the same moment is the same request.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Literal, Self

Reason = Literal["interrupted", "terminated"]
_REASONS: dict[int, Reason] = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGUSR1: "terminated"}


ECHO_SECONDS = 0.5  # within which SIGTERM or SIGUSR1 again is no second request; a person who presses Ctrl-C twice means it


class Stop:
    """Within its context, SIGINT, SIGTERM and SIGUSR1 are noted in `asked` instead of ending the process."""

    def __init__(self) -> None:
        self.asked: Reason | None = None
        self._before: dict[int, object] = {}
        self._first: tuple[int, float] | None = None  # signal, and when

    def __enter__(self) -> Self:
        # Python allows handlers in the main thread only; elsewhere the caller's own handling stays.
        if threading.current_thread() is threading.main_thread():
            for number in _REASONS:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._restore()

    @property
    def votes(self) -> tuple[float, float]:
        """What this worker was asked, as numbers to be added up over workers."""
        return float(self.asked == "interrupted"), float(self.asked == "terminated")

    @staticmethod
    def decided(votes: Sequence[float]) -> Reason | None:
        """Why to stop, from the votes of all workers; None where nobody was asked."""
        interrupted, terminated = votes
        return "interrupted" if interrupted else "terminated" if terminated else None

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = number, now
            self.asked = _REASONS[number]
            if number == signal.SIGINT:
                self._restore()
        elif number != self._first[0] or now - self._first[1] > ECHO_SECONDS:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}
