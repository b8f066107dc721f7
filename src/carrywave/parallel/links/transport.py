"""Carries messages between stages: activations one way, their gradients the other.

`GroupLinks`, for gloo: each direction of an edge is a separate channel (a process group of two), and messages on it match by order alone. A
receive is posted before it is needed, and waited for when it is. A send does not block the next task, but the number in flight is limited,
so that memory stays bounded. The tests prove that programs run even if every send blocks until its receive is posted, so no limit on sends
can cause a deadlock.

`pair_links.PairLinks` is for NCCL, which carries out messages on the device, in order.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from carrywave.parallel import process_groups
from carrywave.plan.schedule.messages import Channel

# Most sends in flight, or two per outgoing channel if that is more. gloo does not report when a send has completed, so each tensor is kept
# until its send has been waited for.
MOST_SENDS = 4


class Pending(Protocol):
    """A posted receive."""

    def wait(self) -> Tensor:
        """The message, ready for use on the device."""


class Links(Protocol):
    """One stage's connections to others, with a channel for each kind of message."""

    @property
    def in_order(self) -> bool:
        """True if messages are carried out one after another, so that programs must be in order too."""

    @property
    def on_device(self) -> bool:
        """True if the host takes no part: messages are work of the device that can be captured."""

    @property
    def closed(self) -> bool:
        """True if nothing can be sent any more: they, or others over the same process groups, were closed."""

    def receive(self, channel: Channel, shape: tuple[int, ...], dtype: torch.dtype) -> Pending:
        """Post the receive of the next message on a channel."""

    def send(self, channel: Channel, tensor: Tensor) -> None:
        """Send the next message on a channel; the tensor must not change afterwards."""

    def flush(self) -> None:
        """Issue what was posted and sent so far, before the next task."""

    def drain(self) -> None:
        """Wait until everything that was sent has been received."""

    def close(self) -> None:
        """Close the connections, so that nobody waits for messages that will never come. Later calls do nothing."""


class PeerLink:
    """One direction of an edge, seen from one of its ends."""

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self.group, self.peer = group, peer

    def greet(self, *, sends: bool, device: torch.device) -> None:
        """Exchange a dummy message, so that the connection exists before receives are posted ahead: creating it blocks for the peer."""
        word = torch.zeros(1, device=device)
        if sends:
            dist.send(word, self.peer, group=self.group)
        else:
            dist.recv(word, self.peer, group=self.group)


class GroupLinks:
    """Messages over torch.distributed. `staged`: through host memory, for CUDA tensors when only gloo is available."""

    in_order = False
    on_device = False

    def __init__(self, channels: dict[Channel, PeerLink], device: torch.device, *, staged: bool) -> None:
        self.channels, self.device, self.staged = channels, device, staged
        self._most = max(MOST_SENDS, len(channels))  # half of the channels are outgoing
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()
        for channel in channels.values():
            process_groups.use(channel.group, self.close)

    @property
    def closed(self) -> bool:
        return not self.channels

    def receive(self, channel: Channel, shape: tuple[int, ...], dtype: torch.dtype) -> Pending:
        """Post the receive of the next message on a channel."""
        link = self.channels[channel]
        where = torch.device("cpu") if self.staged else self.device
        buffer = torch.empty(shape, dtype=dtype, device=where, pin_memory=self.staged)
        work = _work(dist.irecv(buffer, link.peer, group=link.group))
        return _Receive(work, buffer, self.device)

    def send(self, channel: Channel, tensor: Tensor) -> None:
        """Send the next message on a channel; blocks only if too many are in flight."""
        link = self.channels[channel]
        if self.staged:
            # gloo reads host memory immediately, so the copy must have completed.
            tensor = tensor.to("cpu")
        work = _work(dist.isend(tensor, link.peer, group=link.group))
        # Keep the tensor alive: gloo reads it until the message has been sent.
        self._sent.append((work, tensor))
        while len(self._sent) > self._most:
            self._sent.popleft()[0].wait()

    def flush(self) -> None:
        """Do nothing: each message is issued on its own."""

    def drain(self) -> None:
        """Wait until everything that was sent has been received."""
        while self._sent:
            self._sent.popleft()[0].wait()

    def close(self) -> None:
        """Close the connections, so that nobody waits for messages that will never come."""
        # Those who share the groups close theirs too, and these once more.
        channels, self.channels = self.channels, {}
        self._sent.clear()
        for channel in channels.values():
            process_groups.drop(channel.group)


class _Receive:
    def __init__(self, work: dist.Work, buffer: Tensor, device: torch.device) -> None:
        self.work, self.buffer, self.device = work, buffer, device

    def wait(self) -> Tensor:
        """The message, on the device."""
        self.work.wait()
        return self.buffer.to(self.device, non_blocking=True)


def _work(work: dist.Work | None) -> dist.Work:
    """torch returns None to a process outside the group, which neither end of a channel is."""
    assert work is not None
    return work
