"""Messages through process groups of torch.distributed, one for each pair of stages that exchange any.

gloo matches messages of a pair by channel. A receive is posted before it is needed, and waited for when it is. A send does not block the
next task, but the number in flight is limited, so that memory stays bounded; the tests prove that programs run even if every send blocks
until its receive is posted, so no limit can cause a deadlock.

NCCL carries out messages on the device, those of a communicator one after the other; a message that waits for its other end occupies
multiprocessors and may hold up what was issued after it. So all messages of a replica have one order there, that of `Program.in_order`, and
every stage issues its own in that order. Consecutive messages with one stage, up to the first receive, form a batch (`batch_isend_irecv`),
and a task waits for the batch of its own message alone. Pairs are thus independent of each other where the device has room for them, and
where it has not, nothing hangs even if the device does one thing at a time: tests/plan proves it for every schedule. No other NCCL
operation runs meanwhile: all-reduces start once all messages of a pass have completed. All of this is work of the device and can be
captured in a CUDA graph, whose order is then that of the messages issued.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from carrywave.kernels.hopper import chip
from carrywave.parallel import process_groups
from carrywave.parallel.links.links import Messages, Pending
from carrywave.parallel.startup import nccl
from carrywave.parallel.world import World
from carrywave.plan.plan import Plan
from carrywave.plan.schedule.messages import Channel, Program, channels_of, pairs_of

# Most sends in flight to one stage over gloo, which does not report when one has completed: each tensor is kept until its send has been
# waited for.
MOST_SENDS = 4


class Peer(NamedTuple):
    """Another stage: the group shared with it, and its rank."""

    group: dist.ProcessGroup
    rank: int


class MessageEnd(NamedTuple):
    """A message as one of its ends sees it."""

    peer: int  # the stage, or rank, at the other end
    receives: bool


def joins(before: MessageEnd, after: MessageEnd) -> bool:
    """True if a message goes into the batch of the one issued right before it, with no task between them."""
    return before.peer == after.peer and not before.receives


def takes_order(backend: str) -> bool:
    """True if a backend carries out messages on the device in order, so that a receive posted early blocks those behind it."""
    return backend == "nccl"


def connect(world: World, plan: Plan, ranks_by_position: Sequence[int] | None = None) -> GroupLinks:
    """This worker's links to the other stages of its replica. Collective: every worker of the world calls it.

    Without the rank at each position, ranks are positions.
    """
    over_nccl = world.backend == "nccl"
    peers: dict[int, Peer] = {}
    at = range(world.size) if ranks_by_position is None else ranks_by_position
    # Every worker creates every group, in the same order.
    for first in range(0, world.size, plan.stages):
        for low, high in pairs_of(channels_of(plan.stages, share_head=plan.shares_head)):
            ranks = at[first + low], at[first + high]
            group = (
                process_groups.group(ranks, "messages", "nccl", nccl.message_options)
                if over_nccl
                else process_groups.group(ranks, "messages")
            )
            if world.rank in ranks:
                peers[low if world.rank == ranks[1] else high] = Peer(group, sum(ranks) - world.rank)
    if over_nccl:
        # A posted receive occupies multiprocessors until its message arrives, which may be after a persistent kernel has run. Messages of a
        # pair follow each other, so that there are at most as many receives on the device as pairs.
        chip.keep_free(nccl.MESSAGE_BLOCKS * len(peers))
    # gloo's messages are in host memory.
    where = torch.device("cpu") if world.backend == "gloo" else world.device
    channels = channels_of(plan.stages, share_head=plan.shares_head)
    links = GroupLinks(peers, channels, world.device, where=where, exclusive=takes_order(world.backend), on_device=world.records_nccl)
    links.greet()
    return links


class GroupLinks:
    """Messages with some other stages, `peers`; `channels` are numbered alike at both ends.

    `exclusive`: in order, in batches, as work of a device on which nothing else may run meanwhile; otherwise each message on its own.
    """

    in_place = False

    def __init__(
        self,
        peers: Mapping[int, Peer],
        channels: Sequence[Channel],
        device: torch.device,
        *,
        where: torch.device,
        exclusive: bool,
        on_device: bool = False,
    ) -> None:
        self.peers, self.device, self.where, self.exclusive, self.on_device = peers, device, where, exclusive, on_device
        self._tags = {channel: number for number, channel in enumerate(channels)}
        self._next: list[_Batch] = []  # to be issued before the next task
        self._under_way: dict[int, deque[_Batch]] = {stage: deque() for stage in peers}

    def greet(self) -> None:
        """Exchange a dummy message with each stage now, because the first message makes the connection, and blocks meanwhile."""
        # In the order of the stages: the first pair, in that of `pairs_of`, that has not connected is the next one of both of its ends.
        for stage in sorted(self.peers):
            word = torch.zeros(1, device=self.where)
            self._add(dist.isend, word, stage, 0)
            self._add(dist.irecv, torch.empty_like(word), stage, 0)
            batches = self._next
            self.drain()
            for batch in batches:
                batch.wait()

    def arranged(self, program: Program) -> Program:
        return program.in_order if self.exclusive else program

    def begin(self, program: Program, messages: Callable[[], Messages]) -> None:
        """Do nothing: messages need no room that is known before."""

    def receive(self, channel: Channel, shape: tuple[int, ...], dtype: torch.dtype) -> Pending:
        """Post the receive of the next message on a channel."""
        buffer = torch.empty(shape, dtype=dtype, device=self.where, pin_memory=self.where != self.device)
        batch = self._add(dist.irecv, buffer, channel.sender, self._tags[channel])
        return _Arrival(self, batch, buffer)

    def send(self, channel: Channel, tensor: Tensor) -> None:
        """Send the next message on a channel. gloo reads host memory at once, so a copy from a GPU must have completed."""
        self._add(dist.isend, tensor.to(self.where), channel.receiver, self._tags[channel])

    def flush(self) -> None:
        """Issue the batches, in order. Each keeps its tensors alive until it has completed. On the device, do not wait for that here, which
        would stall it. Those of a capture are kept until its end: whether they have completed cannot be asked.
        """
        for batch in self._next:
            batch.works = dist.batch_isend_irecv(batch.operations)
            if self.exclusive or not batch.last.receives:
                self._under_way[batch.last.peer].append(batch)
        self._next = []
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        for issued in self._under_way.values():
            while issued and (issued[0].completed or (not self.exclusive and len(issued) > MOST_SENDS)):
                issued.popleft().wait()

    def drain(self) -> None:
        """Wait until everything that was sent has been received: device work issued after this runs after it."""
        self.flush()
        for issued in self._under_way.values():
            while issued:
                issued.popleft().wait()

    def finished(self, micro_batch: int) -> None:
        """Do nothing: nobody waits for it."""

    def end(self) -> None:
        """Issue what is left; if nothing else may run meanwhile, wait for it, because sums follow."""
        if self.exclusive:
            self.drain()
        else:
            self.flush()

    def _add(self, kind: Callable[..., dist.Work | None], tensor: Tensor, stage: int, tag: int) -> _Batch:
        end = MessageEnd(stage, receives=kind is dist.irecv)
        if not self._next or not self.exclusive or not joins(self._next[-1].last, end):
            self._next.append(_Batch(end))
        batch, peer = self._next[-1], self.peers[stage]
        batch.operations.append(dist.P2POp(kind, tensor, peer.rank, peer.group, tag))
        batch.last = end
        return batch


@dataclass
class _Batch:
    """Sends and receives with one stage that are issued together."""

    last: MessageEnd
    operations: list[dist.P2POp] = field(default_factory=list)
    works: list[dist.Work] = field(default_factory=list)

    @property
    def completed(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        """Wait until all of them have completed; later calls do nothing."""
        for work in self.works:
            work.wait()
        self.works = []


class _Arrival:
    """A message under way in a batch."""

    def __init__(self, links: GroupLinks, batch: _Batch, buffer: Tensor) -> None:
        self.links, self.batch, self.buffer = links, batch, buffer

    def wait(self) -> Tensor:
        """The message, on the device."""
        self.links.flush()
        self.batch.wait()
        return self.buffer.to(self.links.device, non_blocking=True)
