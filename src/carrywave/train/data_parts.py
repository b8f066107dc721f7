"""The parts of the data that a run reads: train, and valid and test if there are any."""

from __future__ import annotations

from dataclasses import dataclass

from carrywave.tasks.task import Part


@dataclass(frozen=True)
class DataParts:
    """The parts of the data that a run reads."""

    train: Part
    valid: Part | None
    test: Part | None
