"""Carries messages between stages over a communicator for each pair of them, for NCCL.

NCCL carries out messages on the device, those of a communicator one after the other; a message that waits for its other end occupies
multiprocessors and may hold up what was issued after it. So all messages of a replica have one order, that of `Program.in_order`, and every
stage issues its own in that order. Consecutive messages with one stage, up to the first receive, form a batch (`batch_isend_irecv`), and a
task waits for the batch of its own message alone. Pairs are thus independent of each other where the device has room for them, and
where it has not, nothing hangs even if the device does one thing at a time: tests/plan proves it for every schedule.

No other NCCL operation runs meanwhile: all-reduces start once all messages of a step have completed (`drain`). Over NCCL all of this is
work of the device and can be captured in a CUDA graph, whose order is then that of the messages issued.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from carrywave.kernels.hopper import chip
from carrywave.parallel import process_groups
from carrywave.parallel.links.transport import PeerLink, Pending
from carrywave.parallel.startup import nccl
from carrywave.parallel.world import World
from carrywave.plan.plan import Plan
from carrywave.plan.schedule.messages import Channel, channels_of, pairs_of


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


def connect(world: World, plan: Plan, ranks_by_position: Sequence[int] | None = None) -> PairLinks:
    """This worker's links to the other stages of its replica. Collective: every worker of the world calls it.

    Without the rank at each position, ranks are positions.
    """
    over_nccl = world.backend == "nccl"
    peers: dict[int, PeerLink] = {}
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
                peers[low if world.rank == ranks[1] else high] = PeerLink(group, sum(ranks) - world.rank)
    if over_nccl:
        # A posted receive occupies multiprocessors until its message arrives, which may be after a persistent kernel has run. Messages of a
        # pair follow each other, so that there are at most as many receives on the device as pairs.
        chip.keep_free(nccl.MESSAGE_BLOCKS * len(peers))
    links = PairLinks(peers, world.device, over_nccl=over_nccl, on_device=world.records_nccl)
    links.greet()
    return links


class PairLinks:
    """Messages in batches. `pairs` holds the communicator with each stage that this one exchanges messages with."""

    in_order = True

    def __init__(self, pairs: dict[int, PeerLink], device: torch.device, *, over_nccl: bool = False, on_device: bool = False) -> None:
        self.pairs, self.device, self.over_nccl, self.on_device = pairs, device, over_nccl, on_device
        self._next: list[_Batch] = []  # to be issued before the next task
        self._under_way: dict[int, deque[_Batch]] = {stage: deque() for stage in pairs}
        for pair in pairs.values():
            process_groups.use(pair.group, self.close)

    @property
    def closed(self) -> bool:
        return not self.pairs

    def greet(self) -> None:
        """Exchange a dummy message with each stage now, because NCCL connects at the first message and blocks meanwhile."""
        # In the order of the stages: the first pair, in that of `pairs_of`, that has not connected is the next one of both of its ends.
        for stage in sorted(self.pairs):
            word = torch.zeros(1, device=self.device)
            self._add(dist.isend, word, stage)
            self._add(dist.irecv, torch.empty_like(word), stage)
            self.drain()

    def receive(self, channel: Channel, shape: tuple[int, ...], dtype: torch.dtype) -> Pending:
        """Post the receive of the next message on a channel."""
        buffer = torch.empty(shape, dtype=dtype, device=self.device)
        return _InBatch(self, self._add(dist.irecv, buffer, channel.sender), buffer)

    def send(self, channel: Channel, tensor: Tensor) -> None:
        """Send the next message on a channel."""
        self._add(dist.isend, tensor, channel.receiver)

    def flush(self) -> None:
        """Issue the batches, in order. Each keeps its tensors alive until it has completed; do not wait for that here, which would stall
        the device. Those of a capture are kept until its end: whether they have completed cannot be asked.
        """
        for batch in self._next:
            batch.works = dist.batch_isend_irecv(batch.operations)
            self._under_way[batch.last.peer].append(batch)
        self._next = []
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        for issued in self._under_way.values():
            while issued and issued[0].completed:
                issued.popleft()

    def drain(self) -> None:
        """Wait until everything that was sent has been received: device work issued after this runs after it."""
        self.flush()
        for issued in self._under_way.values():
            while issued:
                issued.popleft().wait()

    def close(self) -> None:
        """Close the connections, so that nobody waits for messages that will never come."""
        # Those who share the groups close theirs too, and these once more.
        pairs, self.pairs = self.pairs, {}
        self._next = []
        for issued in self._under_way.values():
            issued.clear()
        for pair in pairs.values():
            # Destroying one of NCCL would wait for messages that are on the device, which is what nobody should do.
            if not self.over_nccl:
                process_groups.drop(pair.group)

    def _add(self, kind: Callable[..., dist.Work | None], tensor: Tensor, stage: int) -> _Batch:
        end = MessageEnd(stage, receives=kind is dist.irecv)
        if not self._next or not joins(self._next[-1].last, end):
            self._next.append(_Batch(end))
        batch, pair = self._next[-1], self.pairs[stage]
        batch.operations.append(dist.P2POp(kind, tensor, pair.peer, pair.group))
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


class _InBatch:
    def __init__(self, links: PairLinks, batch: _Batch, buffer: Tensor) -> None:
        self.links, self.batch, self.buffer = links, batch, buffer

    def wait(self) -> Tensor:
        """The message."""
        self.links.flush()
        self.batch.wait()
        return self.buffer
