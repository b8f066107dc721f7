"""Every way to make a schedule, by name: (stages, chunks of each micro-batch, whether it goes backward)."""

from __future__ import annotations

from collections.abc import Callable

from carrywave.plan.schedule.schedule import Schedule, gpipe, sequential, serial, wavefront

Generator = Callable[[int, list[int], bool], Schedule]

GENERATORS: dict[str, Generator] = {
    "serial": lambda stages, counts, backward: serial(counts, backward=backward),
    # Forward only, the stages take one micro-batch after the other.
    "sequential": lambda stages, counts, backward: sequential(stages, counts if backward else counts[:1], backward=backward),
    "gpipe": lambda stages, counts, backward: gpipe(stages, len(counts), backward=backward),
    "wavefront": lambda stages, counts, backward: wavefront(stages, counts, backward=backward),
    "whole backwards": lambda stages, counts, backward: wavefront(stages, counts, backward=backward, weights=False),
    "head shared": lambda stages, counts, backward: wavefront(stages, counts, backward=backward, share_head=True),
}
