"""Measures how long somebody has been silent, by a counter that they keep changing. Torch-free."""

from __future__ import annotations


class Silence:
    """How long a value has not changed, counting only time during which this process ran."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._said: object = None

    def after(self, said: object, passed: float) -> float:
        """The seconds of silence, after what was said now and the time that has passed."""
        self.seconds = 0.0 if said != self._said else self.seconds + passed
        self._said = said
        return self.seconds
