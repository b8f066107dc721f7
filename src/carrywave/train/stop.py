"""Signals that ask a run to end: the step in hand is finished and a snapshot written; a second signal leaves at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Literal, Self

Reason = Literal["interrupted", "terminated"]
_REASONS: dict[int, Reason] = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGUSR1: "terminated"}


class Stop:
    """Within its context, SIGINT, SIGTERM and SIGUSR1 are noted in `asked` instead of ending the process."""

    def __init__(self) -> None:
        self.asked: Reason | None = None
        self._before: dict[int, object] = {}

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
        self.asked = _REASONS[number]
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}
