"""What one stage sends and receives: activations one way, their gradients the other, on a channel for each kind of message.

The i-th send on a channel meets its i-th receive; shapes follow from the batch, so that nothing is negotiated. A pass begins with the
program and its messages, and ends when this stage has done its part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from carrywave.plan.schedule.messages import Channel, Program


@dataclass(frozen=True)
class Message:
    """A message as both of its ends know it."""

    micro_batch: int
    size: int  # in bytes


Messages = Mapping[Channel, Sequence[Message]]  # of a pass, in order


class Pending(Protocol):
    """A message that was asked for."""

    def wait(self) -> Tensor:
        """The message, ready for use on the device."""


class Links(Protocol):
    """One stage's connections to the others of its replica."""

    @property
    def on_device(self) -> bool:
        """True if the host takes no part: messages are work of the device that can be captured."""

    @property
    def exclusive(self) -> bool:
        """True if no sums may run while messages are in flight."""

    @property
    def in_place(self) -> bool:
        """True if messages are read where the sender wrote them, so that it must learn when a micro-batch is finished."""

    def arranged(self, program: Program) -> Program:
        """The program in the order in which these links carry out its messages."""

    def begin(self, program: Program, messages: Callable[[], Messages]) -> None:
        """Start a pass in which these messages are sent and received."""

    def receive(self, channel: Channel, shape: tuple[int, ...], dtype: torch.dtype) -> Pending:
        """Post the receive of the next message on a channel."""

    def send(self, channel: Channel, tensor: Tensor) -> None:
        """Send the next message on a channel; the tensor must not change afterwards."""

    def flush(self) -> None:
        """Issue what was posted and sent so far, before the next task."""

    def finished(self, micro_batch: int) -> None:
        """This stage has finished a micro-batch."""

    def end(self) -> None:
        """This stage has finished the pass."""
