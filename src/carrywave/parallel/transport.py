"""Messages between stages: activations one way, their gradients the other.

`GroupLinks`, for gloo: each direction of an edge is a channel of its own (a process group of two), and messages on it match by order
alone. A receive is posted before it is needed and waited for when it is; a send does not hold up the next task, but only so many may be
under way, so that memory stays bounded. `plan.messages.prove` shows that programs run even where every send waits for its receive, so no
bound on sends can block them.

`OrderedLinks`, for NCCL: all stages of a replica share one communicator, and what a stage has to say between two tasks is one batch of
sends and receives. So the device carries out messages in the order of the program, one batch after the other, and nothing else of NCCL's
runs meanwhile: sums over workers begin when all messages are through. `plan.in_order` proves programs under these rules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from carrywave.parallel import process_groups
from carrywave.plan.schedule.messages import Channel

# Under way at once, or two to each stage where that is more. gloo does not tell when one is through, so that each is kept until then.
MOST_SENDS = 4


def takes_order(backend: str) -> bool:
    """Whether a backend carries out messages on the device, where those that are posted ahead hold up others."""
    return backend == "nccl"


class Pending(Protocol):
    """A receive that was posted."""

    def wait(self) -> Tensor:
        """The message, ready for use on the device."""


class Links(Protocol):
    """What one stage can say to others, each over its own line."""

    @property
    def in_order(self) -> bool:
        """Whether messages are carried out one after the other, so that programs must be in order too."""

    def receive(self, line: Channel, shape: tuple[int, ...], dtype: torch.dtype) -> Pending:
        """Post the receive of the next message of a line."""

    def send(self, line: Channel, tensor: Tensor) -> None:
        """Send the next message of a line; the tensor must not change afterwards."""

    def flush(self) -> None:
        """What was posted and sent so far goes its way, before the next task."""

    def drain(self) -> None:
        """Wait until everything that was sent has been received."""

    def close(self) -> None:
        """Close the connections, so that nobody waits for messages that will not come."""


class PeerLink:
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

    in_order = False

    def __init__(self, channels: dict[Channel, PeerLink], device: torch.device, *, staged: bool) -> None:
        self.channels, self.device, self.staged = channels, device, staged
        self._most = max(MOST_SENDS, len(channels))  # half of them go out
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()

    def receive(self, line: Channel, shape: tuple[int, ...], dtype: torch.dtype) -> Pending:
        """Post the receive of the next message of a line."""
        channel = self.channels[line]
        where = torch.device("cpu") if self.staged else self.device
        buffer = torch.empty(shape, dtype=dtype, device=where, pin_memory=self.staged)
        work = _work(dist.irecv(buffer, channel.peer, group=channel.group))
        return _Receive(work, buffer, self.device)

    def send(self, line: Channel, tensor: Tensor) -> None:
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

    def flush(self) -> None:
        """Each goes its way by itself."""

    def drain(self) -> None:
        """Wait until everything that was sent has been received."""
        while self._sent:
            self._sent.popleft()[0].wait()

    def close(self) -> None:
        """Close the connections, so that nobody waits for messages that will not come."""
        self._sent.clear()
        for channel in self.channels.values():
            process_groups.drop(channel.group)
        self.channels = {}


class _Receive:
    def __init__(self, work: dist.Work, buffer: Tensor, device: torch.device) -> None:
        self.work, self.buffer, self.device = work, buffer, device

    def wait(self) -> Tensor:
        """The message, on the device."""
        self.work.wait()
        return self.buffer.to(self.device, non_blocking=True)


class OrderedLinks:
    """Messages in batches over one communicator. `ranks` are those of the stages, in their order."""

    in_order = True

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], device: torch.device) -> None:
        self.group, self.ranks, self.device = group, ranks, device
        self._next = _Batch()
        self._under_way: deque[_Batch] = deque()

    def greet(self, own: int, known: Sequence[Channel]) -> None:
        """Make the communicator, and the connection of each pair of stages: NCCL makes them at the first message, and waits meanwhile."""
        word = torch.zeros(1, device=self.device)
        dist.all_reduce(word, group=self.group)
        # In one order on every worker, both ways at once.
        for low, high in sorted({(min(line[1:]), max(line[1:])) for line in known}):
            if own in (low, high):
                other = high if own == low else low
                self._add(dist.isend, word, other)
                self._add(dist.irecv, torch.empty_like(word), other)
                self.drain()

    def receive(self, line: Channel, shape: tuple[int, ...], dtype: torch.dtype) -> Pending:
        """Post the receive of the next message of a line."""
        buffer = torch.empty(shape, dtype=dtype, device=self.device)
        return _InBatch(self, self._add(dist.irecv, buffer, line.sender), buffer)

    def send(self, line: Channel, tensor: Tensor) -> None:
        """Send the next message of a line."""
        self._add(dist.isend, tensor, line.receiver)

    def flush(self) -> None:
        """Hand over the batch. It keeps its tensors until it is through; nobody waits for that here, which would hold up the device."""
        if self._next.operations:
            self._next.works = dist.batch_isend_irecv(self._next.operations)
            self._under_way.append(self._next)
            self._next = _Batch()
        while self._under_way and all(work.is_completed() for work in self._under_way[0].works):
            self._under_way.popleft()

    def drain(self) -> None:
        """Wait until everything that was sent has been received: what the device is given after this comes after it."""
        self.flush()
        while self._under_way:
            self._under_way.popleft().wait()

    def close(self) -> None:
        """Close the connections, so that nobody waits for messages that will not come."""
        self._next, self._under_way = _Batch(), deque()
        process_groups.drop(self.group)

    def _add(self, kind: Callable[..., dist.Work | None], tensor: Tensor, stage: int) -> _Batch:
        self._next.operations.append(dist.P2POp(kind, tensor, self.ranks[stage], self.group))
        return self._next


@dataclass
class _Batch:
    """Sends and receives that go their way together."""

    operations: list[dist.P2POp] = field(default_factory=list)
    works: list[dist.Work] = field(default_factory=list)

    def wait(self) -> None:
        """Until all of them are through; once is enough."""
        for work in self.works:
            work.wait()
        self.works = []


class _InBatch:
    def __init__(self, links: OrderedLinks, batch: _Batch, buffer: Tensor) -> None:
        self.links, self.batch, self.buffer = links, batch, buffer

    def wait(self) -> Tensor:
        """The message."""
        self.links.flush()
        self.batch.wait()
        return self.buffer


def _work(work: dist.Work | None) -> dist.Work:
    """torch answers None to a process outside the group, which no end of a channel is."""
    assert work is not None
    return work
