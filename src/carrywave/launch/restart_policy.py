"""Decides what follows when workers die: another attempt, one with fewer workers, or giving up.

Restarts are counted, and a snapshot newer than at the previous death resets the count; an internal error that repeats without a newer
snapshot, or occurs before the first step, is not retried. If fewer workers are acceptable, a device whose worker dies twice before its
first step is dropped, and the remaining ones share the same global batch. Torch-free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from carrywave.launch.exit_reports import Ended

RESTARTS = 3  # without progress in between, unless the user sets another limit
DEATHS_AT_START = 2  # deaths of a device's worker before its first step, after which the device is dropped


class Place(NamedTuple):
    """A device: the host, by its number, and the index of the device on it."""

    node: int
    device: int


class RestartPolicy:
    """The devices in use, by rank, and what may still be tried."""

    def __init__(self, places: Iterable[Place], restarts: int, least: int | None) -> None:
        self.places = list(places)
        self.given_up = ""  # what to append to the final message
        self.devices = len(self.places)  # at the start
        self.least = least or self.devices
        self._restarts = restarts
        self._used = 0
        self._step = -1  # of the newest snapshot at the previous death
        self._message = ""
        self._at_start: Counter[Place] = Counter()  # deaths before the first step, by device

    @property
    def fewer(self) -> bool:
        """True if devices have been left out."""
        return len(self.places) < self.devices

    def keep(self, places: Iterable[Place]) -> None:
        """Continue with these devices only."""
        self.places = list(places)
        self._used = 0
        self._at_start.clear()

    def take_back(self, places: Iterable[Place]) -> None:
        """Continue with these devices too, in their order."""
        self.places = sorted({*self.places, *places})
        self.devices = max(self.devices, len(self.places))

    def after(self, ended: Ended, steps: int, step: int | None) -> str | None:
        """The line to print before the next attempt; None if there is no next attempt.

        `steps` is by how many steps the attempt advanced, `step` that of the newest snapshot.
        """
        if self._restarts == 0:
            return None
        place = None if ended.rank is None else self.places[ended.rank]
        reached = -1 if step is None else step
        progressed = reached > self._step
        again = ended.message == self._message
        repeated = bool(ended.trace) and not progressed and (steps == 0 or again)
        if progressed:
            self._used, self._step = 0, reached
        if progressed or steps:
            self._at_start.clear()
        elif place is not None:
            self._at_start[place] += 1
        self._used += 1
        self._message = ended.message
        what = ended.message.partition(";")[0]
        may_shrink = len(self.places) > self.least
        if may_shrink and place is not None and (self._at_start[place] >= DEATHS_AT_START or self._used > self._restarts):
            self.keep(each for each in self.places if each != place)
            return f"{what}; continuing with {len(self.places)} of {self.devices} workers {where_from(step)}"
        if repeated and not may_shrink:
            self.given_up = "; it failed again at the same point" if again else ""
            return None
        if self._used > self._restarts:
            self.given_up = f"; gave up after {self._restarts} restart{'s' * (self._restarts != 1)} without progress"
            return None
        return f"{what}; restarting {where_from(step)} (restart {self._used} of {self._restarts})"


def where_from(step: int | None) -> str:
    """From where a run goes on, in words."""
    return "from the beginning" if step is None else f"from step {step}"
