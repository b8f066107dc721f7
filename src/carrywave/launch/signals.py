"""Signals that ask a run to end: the step in hand is finished and a snapshot written; a second signal leaves at once.

A terminal that is closed (SIGHUP) asks for it like SIGTERM, but is never a second request: systemd sends both. Where that signal is
ignored, as under nohup, it stays so.

A launcher passes signals on, and a cluster may send them to every process: the same one again in the same moment is the same request.
"""

from __future__ import annotations

import errno
import os
import signal
import termios
import threading
import time
from collections.abc import Iterable, Sequence
from types import FrameType, TracebackType
from typing import Literal, Self

Reason = Literal["interrupted", "terminated"]
_REASONS: dict[int, Reason] = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "terminated",
    signal.SIGUSR1: "terminated",
    signal.SIGHUP: "terminated",
}


def wanted(numbers: Iterable[int]) -> list[int]:
    """Of these signals, those that reach this process: SIGHUP is often ignored on purpose."""
    return [number for number in numbers if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN]


def let_go_of_terminal() -> None:
    """After SIGHUP: where the terminal is gone, what is written to it would fail, and with it the run that is being brought to an end."""
    for handle in (0, 1, 2):
        try:
            termios.tcgetattr(handle)
        except termios.error as error:
            if error.args[0] != errno.EIO:
                continue  # no terminal at all
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, handle)
            os.close(nowhere)


ECHO_SECONDS = 0.5  # within which any but SIGINT again is no second request; a person who presses Ctrl-C twice means it


class Stop:
    """Within its context, SIGINT, SIGTERM, SIGUSR1 and SIGHUP are noted in `asked` instead of ending the process."""

    def __init__(self) -> None:
        self.asked: Reason | None = None
        self._before: dict[int, object] = {}
        self._first: tuple[int, float] | None = None  # signal, and when

    def __enter__(self) -> Self:
        # Python allows handlers in the main thread only; elsewhere the caller's own handling stays.
        if threading.current_thread() is threading.main_thread():
            for number in wanted(_REASONS):
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
        if number == signal.SIGHUP:
            let_go_of_terminal()
        now = time.monotonic()
        if self._first is None:
            self._first = number, now
            self.asked = _REASONS[number]
            if number == signal.SIGINT:
                self._restore()
        elif number != signal.SIGHUP and (number != self._first[0] or now - self._first[1] > ECHO_SECONDS):
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}
