"""The state passed between the chunks of a batch (`State`), and the metadata of a chunk (`Chunk`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from carrywave.kernels.carry import AnyCarries, changed
from carrywave.kernels.window import WindowChunk


class State(NamedTuple):
    """Passed in and out of every chunk: one carry per layer, a pooled head's accumulator (a tuple of tensors [B, …]) and, if changes from
    step to step are penalised, the last output of the stack [B, W]."""

    carries: AnyCarries
    acc: Any = None
    tail: Tensor | None = None

    def detach(self) -> State:
        """The same values without history: where back-propagation through time is truncated."""
        return self.map(Tensor.detach)

    def leaves(self) -> State:
        """The same values, whose gradients are collected: cut off from the graph of the chunk before, and passed back explicitly."""
        return self.map(lambda tensor: tensor.detach().requires_grad_(tensor.is_floating_point()))

    def compact(self) -> State:
        """The same values in memory of their own: a carry may be a view of all outputs of its chunk."""
        return self.map(lambda tensor: tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor)

    def map(self, change: Callable[[Tensor], Tensor]) -> State:
        """Apply a function to every tensor."""
        carries = tuple(changed(carry, change) for carry in self.carries)
        acc = None if self.acc is None else tuple(change(tensor) for tensor in self.acc)
        return State(carries, acc, None if self.tail is None else change(self.tail))


class Chunk(NamedTuple):
    """One time chunk of one micro-batch of lanes."""

    lengths: Tensor | None = None  # [B] real steps of each lane in this chunk; None: every step is real
    fresh: Tensor | None = None  # [B] bool, lanes that start a new sequence with this chunk; None: no lane does
    lanes: Tensor | None = None  # [B] global lane numbers; None: 0, 1, …
    start: int = 0  # first step of the chunk within its window
    key: Tensor | None = None  # the batch's key, int32[2] on the device; None if nothing is random
    full: bool = False  # True if the host knows that every step is real
    window: WindowChunk | None = None  # if kernels may keep buffers and carries from chunk to chunk
    whole: bool = False  # True if this is the full batch
    history: Tensor | None = None  # [N - 1 + T, B, C] past values for a head that reads N up to each step
    resets: Tensor | None = None  # [T, B] bool, steps with which a lane starts a new sequence; None: none of this chunk's
    weights: Tensor | None = None  # of the targets of this chunk: [B], or [T, B, …]; None: all are 1
    linear: Tensor | None = None  # [B, answers + 1] what a linear part says of each lane, and how much the network weighs beside it
