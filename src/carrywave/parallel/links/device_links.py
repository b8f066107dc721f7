"""Messages between the stages of one host, in device memory: a stage writes its output straight into the neighbour's buffer.

A message is a copy and a signal on the sender's stream, and a wait for that signal on the receiver's, which reads the buffer in place. The
host takes no part in it, so a whole step, messages included, can be captured as one CUDA graph. Within a pass, buffers are reused as
`plan.schedule.buffers` counts them; a pass starts to write a channel when the receiver has finished the previous one.

Each pair of stages that exchange messages shares memory of its own, so that only those two need to know its size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from carrywave.errors import PlanError
from carrywave.parallel.links.links import Message, Messages, Pending
from carrywave.parallel.memory.symmetric import GrowingMemory, SharedMemory, padded, signals_of, write
from carrywave.plan.schedule.buffers import Places, places
from carrywave.plan.schedule.messages import Channel, Pair, Program

LEAST_BYTES = 1 << 20  # of memory that two stages share
CHANNELS = 4  # most channels between two stages: activations, gradients, and the same for a shared head
SLOTS = 15  # most slots of a channel that are reused within a pass; with more, every micro-batch has its own
SIGNALS = signals_of(2) // CHANNELS - SLOTS - 1  # of a channel that tell of arrivals
_SIGNALS_OF_CHANNEL = signals_of(2) // CHANNELS  # signals of a channel: for arrivals, one for "all free", one for each slot
_ALL_FREE = SIGNALS

Make = Callable[[Pair, int], SharedMemory]  # shared memory of two stages, of a given size


@dataclass(frozen=True)
class _Layout:
    """Where the messages of a channel lie, from the start of its part of the buffer."""

    slots: int
    places: Sequence[int]
    sizes: Sequence[int]
    parts: Mapping[int, int]  # the ordinal of each micro-batch, by first message
    firsts: Mapping[int, int]  # that of the micro-batch which begins with this message
    signalled: Mapping[int, int]  # the ordinal of each message among those whose arrival is signalled
    size: int


def _laid(messages: Sequence[Message], room: Places) -> _Layout:
    """Lay out one slot after another, and the messages of a micro-batch next to each other, as parts of one window."""
    parts: dict[int, int] = {}
    firsts: dict[int, int] = {}
    ends: dict[int, int] = {}  # of each micro-batch's messages so far, within its slot
    within: list[int] = []
    for number, message in enumerate(messages):
        if message.micro_batch not in parts:
            firsts[number] = parts[message.micro_batch] = len(parts)
        within.append(ends.get(message.micro_batch, 0))
        ends[message.micro_batch] = within[-1] + message.size
    slots = room.slots if room.slots <= SLOTS else len(parts)
    slot = padded(max(ends.values()))
    places = [parts[message.micro_batch] % slots * slot + at for message, at in zip(messages, within, strict=True)]
    signalled = {number: ordinal for ordinal, number in enumerate(room.signalled)}
    return _Layout(slots, places, [message.size for message in messages], parts, firsts, signalled, slots * slot)


@dataclass
class _ChannelMemory:
    """A channel during one pass."""

    memory: SharedMemory
    peer: int  # the other stage's number in the pair
    signal: int  # the first of its signals
    layout: _Layout
    begin: int  # of its part of the receiver's buffer
    next: int = 0  # message

    @property
    def all_free(self) -> int:
        return self.signal + _ALL_FREE

    def free(self, ordinal: int) -> int:
        return self.signal + _ALL_FREE + 1 + ordinal % self.layout.slots

    def arrived(self, message: int) -> int | None:
        """The signal that a message has arrived; None: one that is sent later is read before it."""
        ordinal = self.layout.signalled.get(message)
        return None if ordinal is None else self.signal + ordinal % SIGNALS

    def take(self) -> int:
        """The number of the next message."""
        self.next += 1
        return self.next - 1

    def piece(self, receiver: int, message: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A message's part of the receiver's buffer."""
        begin = self.begin + self.layout.places[message]
        return self.memory.of(receiver)[begin : begin + self.layout.sizes[message]].view(dtype).view(tuple(shape))


class DeviceLinks:
    """One stage's channels. `make` creates shared memory with another stage; both must call it in the same order."""

    on_device = True
    in_place = True
    exclusive = False

    def __init__(self, stage: int, make: Make) -> None:
        self.stage, self.make = stage, make
        self.memories: dict[Pair, GrowingMemory] = {}
        self._incoming: dict[Channel, _ChannelMemory] = {}
        self._outgoing: dict[Channel, _ChannelMemory] = {}

    def arranged(self, program: Program) -> Program:
        return program

    def begin(self, program: Program, messages: Callable[[], Messages]) -> None:
        """Lay out a pass in which these messages are sent and received on this stage's channels, in this order on each."""
        by_channel = messages()
        self._incoming, self._outgoing = {}, {}
        pairs: dict[Pair, list[Channel]] = {}
        for channel in sorted(by_channel, key=_number):
            pairs.setdefault(channel.pair, []).append(channel)
        rooms = _rooms(program)
        for pair in sorted(pairs):
            laid = [(channel, _laid(by_channel[channel], rooms[channel])) for channel in pairs[pair]]
            begins = {
                channel: sum(each.size for other, each in laid[:n] if other.receiver == channel.receiver)
                for n, (channel, _) in enumerate(laid)
            }
            memory = self._memory(pair, max(begins[channel] + each.size for channel, each in laid))
            for channel, each in laid:
                ends = _ChannelMemory(memory, 1 - memory.rank, _number(channel) * _SIGNALS_OF_CHANNEL, each, begins[channel])
                (self._outgoing if channel.sender == self.stage else self._incoming)[channel] = ends

    def receive(self, channel: Channel, shape: tuple[int, ...], dtype: torch.dtype) -> Pending:
        """The next message on a channel."""
        inbox = self._incoming[channel]
        return _Arrival(inbox, inbox.take(), shape, dtype)

    def send(self, channel: Channel, tensor: Tensor) -> None:
        """Write the next message on a channel into the receiver's buffer, and signal it."""
        outbox = self._outgoing[channel]
        number = outbox.take()
        if number == 0:
            outbox.memory.wait(outbox.peer, outbox.all_free)
        ordinal = outbox.layout.firsts.get(number, 0)
        if ordinal >= outbox.layout.slots:
            outbox.memory.wait(outbox.peer, outbox.free(ordinal))
        write(outbox.piece(outbox.peer, number, tensor.shape, tensor.dtype), tensor)
        arrived = outbox.arrived(number)
        if arrived is not None:
            outbox.memory.signal(outbox.peer, arrived)

    def finished(self, micro_batch: int) -> None:
        """This stage has finished a micro-batch: where another one waits for its slots, they are free."""
        for inbox in self._incoming.values():
            ordinal = inbox.layout.parts.get(micro_batch)
            if ordinal is not None and ordinal + inbox.layout.slots < len(inbox.layout.parts):
                inbox.memory.signal(inbox.peer, inbox.free(ordinal))

    def end(self) -> None:
        """This stage has finished the pass: all its buffers are free."""
        for inbox in self._incoming.values():
            inbox.memory.signal(inbox.peer, inbox.all_free)
        self._incoming, self._outgoing = {}, {}

    def flush(self) -> None:
        """Do nothing: each message is issued on its own."""

    def _memory(self, pair: Pair, size: int) -> SharedMemory:
        """Shared memory of a pair, the same one at both ends."""
        if pair not in self.memories:
            self.memories[pair] = GrowingMemory(partial(_all_free, self.make, pair), LEAST_BYTES)
        return self.memories[pair].of(size)


def _all_free(make: Make, pair: Pair, size: int) -> SharedMemory:
    """New shared memory of a pair, in which this stage has signalled that everything is free."""
    memory = make(pair, size)
    for number in range(CHANNELS):  # on channels that this stage sends on, nobody asks
        memory.signal(1 - memory.rank, number * _SIGNALS_OF_CHANNEL + _ALL_FREE)
    return memory


class _Arrival:
    def __init__(self, channel: _ChannelMemory, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.channel, self.number, self.shape, self.dtype = channel, number, shape, dtype

    def wait(self) -> Tensor:
        """The message, in place: valid until this stage has finished its micro-batch."""
        channel, arrived = self.channel, self.channel.arrived(self.number)
        if arrived is not None:
            channel.memory.wait(channel.peer, arrived)
        return channel.piece(channel.memory.rank, self.number, self.shape, self.dtype)


def _number(channel: Channel) -> int:
    """The number of a channel among those of its pair, the same in every pass."""
    return {"F": 0, "H": 2}.get(channel.phase, 1 if channel.sender > channel.receiver else 3)


@lru_cache(maxsize=1024)
def _rooms(program: Program) -> dict[Channel, Places]:
    rooms = places(program)
    most = max((room.signals for room in rooms.values()), default=0)
    if most > SIGNALS:
        raise PlanError(f"the schedule has {most} messages on their way between two stages, more than {SIGNALS}; use longer chunks")
    return rooms
