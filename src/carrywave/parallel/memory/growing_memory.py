"""Shared memory of one group of workers, as large as their work needs it.

Work that needs more gets a larger one; smaller ones are kept, because captured work uses them.
"""

from __future__ import annotations

from collections.abc import Callable

from carrywave.parallel.memory.symmetric import SharedMemory
from carrywave.plan.schedule.buffers import shared_bytes

_ALIGNED = 256  # bytes


class GrowingMemory:
    """`make` creates memory of a given size, at least `least` bytes. Every worker must ask for the same sizes in the same order."""

    def __init__(self, make: Callable[[int], SharedMemory], least: int) -> None:
        self.make, self.least = make, least
        self.known: list[SharedMemory] = []

    def of(self, size: int) -> SharedMemory:
        """The first that is large enough, the same one on every worker. Sizes are powers of two, so that there are few."""
        for memory in self.known:
            if memory.size >= size:
                return memory
        self.known.append(self.make(shared_bytes(size, least=self.least)))
        return self.known[-1]


def padded(size: int) -> int:
    """A size in bytes after which numbers of any kind may follow."""
    return -(-size // _ALIGNED) * _ALIGNED
