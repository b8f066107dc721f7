"""The shape of what benchmarks time: a stack of equal layers, and a batch for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StackShape:
    """A stack of layers as wide as their input, and the lanes and steps of its batch."""

    layers: int
    hidden: int
    lanes: int
    steps: int

    @property
    def name(self) -> str:
        """As shown in tables; short, because rows are long."""
        return f"{self.layers}x{self.hidden} B{self.lanes} T{self.steps}"
