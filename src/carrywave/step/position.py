"""Where a trainer stands between two steps: all that a step goes on from besides weights and optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from carrywave.model.state import State


@dataclass(frozen=True)
class Position:
    """A value: passed into a step and returned by it. A step that fails has not moved it, so that it can be taken again."""

    carry: State | None = None  # of this worker's lanes and layers; None: there is nothing to go on from
    lanes: tuple[int, ...] | None = None  # those whose carry is kept, over all workers
    counted: int = 0  # batches so far without a step number of their own: every batch needs its own dropout masks
