"""Messages between stages: activations one way, their gradients the other.

Each direction of an edge is a channel of its own (a process group of two), and messages on it match by order alone, as NCCL
wants it. A receive is posted before it is needed and waited for when it is; a send does not hold up the next task, but only
so many may be under way, so that memory stays bounded. `plan.messages.prove` shows that programs run even where every
send waits for its receive, so no bound on sends can block them.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from carrywave.plan.messages import Line

# Under way at once, or two to each stage where that is more. gloo does not tell when one is through, so that each is kept until then.
MOST_SENDS = 4


class Pending(Protocol):
    """A receive that was posted."""

    def wait(self) -> Tensor:
        """The message, ready for use on the device."""


class Links(Protocol):
    """What one stage can say to others, each over its own line."""

    def receive(self, line: Line, shape: tuple[int, ...], dtype: torch.dtype) -> Pending:
        """Post the receive of the next message of a line."""

    def send(self, line: Line, tensor: Tensor) -> None:
        """Send the next message of a line; the tensor must not change afterwards."""

    def drain(self) -> None:
        """Wait until everything that was sent has been received."""


class Channel:
    """One direction of an edge, seen from one of its ends."""

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self.group, self.peer = group, peer

    def greet(self, *, sends: bool, device: torch.device) -> None:
        """One empty message, so that the connection stands before receives are posted ahead: making it waits for the other end."""
        word = torch.zeros(1, device=device)
        if sends:
            dist.send(word, self.peer, group=self.group)
        else:
            dist.recv(word, self.peer, group=self.group)


class GroupLinks:
    """Messages over torch.distributed. `staged`: by way of host memory, for CUDA tensors where only gloo can carry them."""

    def __init__(self, channels: dict[Line, Channel], device: torch.device, *, staged: bool) -> None:
        self.channels, self.device, self.staged = channels, device, staged
        self._most = max(MOST_SENDS, len(channels))  # half of them go out
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()

    def receive(self, line: Line, shape: tuple[int, ...], dtype: torch.dtype) -> Pending:
        """Post the receive of the next message of a line."""
        channel = self.channels[line]
        where = torch.device("cpu") if self.staged else self.device
        buffer = torch.empty(shape, dtype=dtype, device=where, pin_memory=self.staged)
        work = _work(dist.irecv(buffer, channel.peer, group=channel.group))
        return _Receive(work, buffer, self.device)

    def send(self, line: Line, tensor: Tensor) -> None:
        """Send the next message of a line; waits only where too many are under way."""
        channel = self.channels[line]
        if self.staged:
            # gloo reads host memory as soon as it is told to, so the copy must have arrived there.
            tensor = tensor.to("cpu")
        work = _work(dist.isend(tensor, channel.peer, group=channel.group))
        # The tensor is kept: gloo reads it until the message is through.
        self._sent.append((work, tensor))
        while len(self._sent) > self._most:
            self._sent.popleft()[0].wait()

    def drain(self) -> None:
        """Wait until everything that was sent has been received."""
        while self._sent:
            self._sent.popleft()[0].wait()


class _Receive:
    def __init__(self, work: dist.Work, buffer: Tensor, device: torch.device) -> None:
        self.work, self.buffer, self.device = work, buffer, device

    def wait(self) -> Tensor:
        """The message, on the device."""
        self.work.wait()
        return self.buffer.to(self.device, non_blocking=True)


def _work(work: dist.Work | None) -> dist.Work:
    """torch answers None to a process outside the group, which no end of a channel is."""
    assert work is not None
    return work
