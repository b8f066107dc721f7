"""Whether this worker is training, and for how long something has shown no sign of life. `peer_watchdog` asks both."""

from __future__ import annotations

from carrywave.parallel.startup.environment import seconds_of

BEAT_SECONDS = 1.0
SILENT_SECONDS = 10.0


class _Progress:
    """What this process does."""

    training = False


def silent_seconds() -> float:
    """How long a worker may go without a sign of life; infinite if the check is off."""
    return seconds_of("CARRYWAVE_HEARTBEAT_SECONDS", SILENT_SECONDS, or_off=True)


def mark() -> None:
    """Record that training has advanced by a step."""
    _Progress.training = True


def rest() -> None:
    """Record that training has paused: what follows may take a long time."""
    _Progress.training = False


def is_training() -> bool:
    """True while training steps follow each other."""
    return _Progress.training


class Silence:
    """How long a value has not changed, counting only time during which this process ran."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last: object = None

    def after(self, value: object, passed: float) -> float:
        """The seconds of silence, given the current value and the time that has passed since the last one."""
        self.seconds = 0.0 if value != self._last else self.seconds + passed
        self._last = value
        return self.seconds
