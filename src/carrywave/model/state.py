"""What passes between the chunks of a batch (`State`), and what is known of a chunk besides its inputs (`Chunk`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from carrywave.kernels.carry import Carries


class State(NamedTuple):
    """Passed in and out of every chunk: a carry for each layer, and a pooled head's accumulator (a tuple of tensors [B, …])."""

    carries: Carries
    acc: Any = None

    def detach(self) -> State:
        """The same values without history: where back-propagation through time ends."""
        carries = tuple(type(carry)(carry.h.detach(), carry.c.detach()) for carry in self.carries)
        return State(carries, None if self.acc is None else tuple(part.detach() for part in self.acc))


@dataclass(frozen=True)
class Chunk:
    """One time chunk of one slice of lanes."""

    lengths: Tensor | None = None  # [B] real steps of each lane in this chunk; None: all of them
    fresh: Tensor | None = None  # [B] bool, lanes that start a new sequence with this chunk; None: none does
    lanes: Tensor | None = None  # [B] global lane numbers; None: 0, 1, …
    start: int = 0  # first step of the chunk within its window
    key: Tensor | None = None  # the batch's key, int32[2] on the device; None where nothing is random
    full: bool = False  # the host knows that every step is real
