"""Handles signals that ask a run to stop: the current step is finished and a snapshot written; a second signal exits immediately.

SIGHUP (a closed terminal) is a request like SIGTERM, but never counts as the second one, because systemd sends both. If it is ignored, as
under nohup, it stays ignored.

A launcher forwards signals, and a cluster may also send them to every process, so the same signal repeated within a moment is one request.
"""

from __future__ import annotations

import errno
import os
import signal
import termios
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType, TracebackType
from typing import Literal, Self

Reason = Literal["interrupted", "terminated"]
_REASONS: dict[int, Reason] = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "terminated",
    signal.SIGUSR1: "terminated",
    signal.SIGHUP: "terminated",
}


REQUESTS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)  # signals that ask a run to stop, besides Ctrl-C


def wanted(numbers: Iterable[int]) -> list[int]:
    """The given signals without those this process ignores; only SIGHUP is checked, which is often ignored on purpose."""
    return [number for number in numbers if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN]


def let_go_of_terminal() -> None:
    """After SIGHUP, redirect standard streams whose terminal is gone to /dev/null: a failing write would abort the orderly shutdown."""
    for handle in (0, 1, 2):
        try:
            termios.tcgetattr(handle)
        except termios.error as error:
            if error.args[0] != errno.EIO:
                continue  # not a terminal
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, handle)
            os.close(nowhere)


ECHO_SECONDS = 0.5  # a repeat within this time is not a second request, except SIGINT: a person who presses Ctrl-C twice means it


class SignalContext:
    """Context in which `_note` is called at SIGINT, SIGTERM, SIGUSR1 and SIGHUP, which do not end the process."""

    def __init__(self) -> None:
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        # Python allows signal handlers in the main thread only; in any other thread the caller's handlers stay in place.
        if threading.current_thread() is threading.main_thread():
            for number in wanted(_REASONS):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        raise NotImplementedError

    def _restore(self, *numbers: int) -> None:
        """Put back the handlers of these signals; of all of them if none is named."""
        for number in [each for each in self._before if not numbers or each in numbers]:
            signal.signal(number, self._before.pop(number))  # type: ignore[arg-type]


class Stop(SignalContext):
    """Context in which signals that ask a run to stop are recorded in `asked`."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Reason | None = None
        self._first: tuple[int, float] | None = None  # signal and time

    @property
    def votes(self) -> tuple[float, float]:
        """The request this worker received, as numbers to be summed over all workers."""
        return float(self.asked == "interrupted"), float(self.asked == "terminated")

    @staticmethod
    def decided(votes: Sequence[float]) -> Reason | None:
        """The reason to stop, from the summed votes of all workers; None if nobody was asked."""
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
                # A second Ctrl-C leaves at once; a terminal that closes afterwards does not.
                self._restore(signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        elif number != signal.SIGHUP and (number != self._first[0] or now - self._first[1] > ECHO_SECONDS):
            self._restore()
            signal.raise_signal(number)


class Forwarded(SignalContext):
    """Context in which signals that ask for an end are recorded, to be forwarded to workers."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[int] = []
        self.asked: int | None = None  # the first one that was taken
        self._last = 0, 0.0  # signal and time; a repeat within ECHO_SECONDS is the same request, except SIGINT

    def note(self, number: int) -> None:
        """Record a request."""
        self.noted.append(number)

    def take(self) -> Iterator[int | None]:
        """What came since the last call: a signal to forward, and None if the workers are to be killed."""
        while self.noted:
            number = self.noted.pop(0)
            if self.asked is None:
                self.asked = number
                yield number
            elif number != signal.SIGHUP:
                yield None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            let_go_of_terminal()
        before, now = self._last, time.monotonic()
        self._last = number, now
        if number == signal.SIGINT or number != before[0] or now - before[1] > ECHO_SECONDS:
            self.note(number)
