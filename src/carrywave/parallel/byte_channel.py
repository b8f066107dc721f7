"""A `Channel` carries files and small JSON values between two workers over gloo, in pieces of bounded size.

It needs a process group of its own, so that a background thread can use it while training exchanges messages in others. Both ends follow
the same order of calls; nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from carrywave.parallel import process_groups

PIECE_BYTES = 1 << 20  # small enough that rank 0 can hold one for each worker it hears from


class Channel:
    """One end of a connection; the other end is the worker `peer`."""

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self._group, self._peer = group, peer
        self._piece: Tensor | None = None  # made at the first use, then used again
        self._filled = 0

    def send_json(self, value: Any) -> None:
        """Send a JSON value."""
        text = bytearray(json.dumps(value).encode())
        self._send(torch.tensor([len(text)], dtype=torch.int64))
        self._send(torch.frombuffer(text, dtype=torch.uint8))

    def receive_json(self) -> Any:
        """Receive a JSON value."""
        length = torch.zeros(1, dtype=torch.int64)
        self._receive(length)
        text = torch.zeros(int(length), dtype=torch.uint8)
        self._receive(text)
        return json.loads(text.numpy().tobytes())

    def write(self, data: bytes | memoryview) -> int:
        """Send bytes, which are collected until a piece is full; so a channel can take the place of a file that is written."""
        piece, view = self._room(), memoryview(data).cast("B")
        for start in range(0, len(view), PIECE_BYTES):
            block = view[start : start + PIECE_BYTES]
            fits = min(len(block), PIECE_BYTES - self._filled)
            self._collect(piece, block[:fits])
            self._collect(piece, block[fits:])
        return len(view)

    def flush(self) -> None:
        """Send what has been collected; the receiver must know how many bytes there are in all."""
        if self._filled:
            self._send(self._room()[: self._filled])
            self._filled = 0

    def read(self, num_bytes: int) -> Iterator[memoryview]:
        """Receive this many bytes, up to the sender's `flush`; each piece is valid until the next one."""
        piece = self._room()
        while num_bytes:
            part = piece[: min(num_bytes, PIECE_BYTES)]
            self._receive(part)
            num_bytes -= part.numel()
            yield part.numpy().data

    def _room(self) -> Tensor:
        if self._piece is None:
            self._piece = torch.empty(PIECE_BYTES, dtype=torch.uint8)
        return self._piece

    def _collect(self, piece: Tensor, block: memoryview) -> None:
        if len(block):
            piece.numpy().data[self._filled : self._filled + len(block)] = block
            self._filled += len(block)
        if self._filled == PIECE_BYTES:
            self.flush()

    def _send(self, tensor: Tensor) -> None:
        dist.send(tensor, self._peer, group=self._group)

    def _receive(self, tensor: Tensor) -> None:
        dist.recv(tensor, self._peer, group=self._group)


class Star:
    """Channels between rank 0 and some of the others. Collective to make and to renew: every rank does both."""

    _group: ClassVar[dist.ProcessGroup | None] = None  # one in a process: what an earlier run left in flight must not reach the next one

    def __init__(self, others: Sequence[int]) -> None:
        self.others = tuple(others)
        self.renew()

    def renew(self) -> None:
        """Connect again, after a failure: messages that nobody received may be in flight in the old connections."""
        if Star._group is not None:
            process_groups.drop(Star._group)
            Star._group = None
        if self.others:
            Star._group = process_groups.group((0, *self.others), "files", backend="gloo")

    def channel(self, peer: int) -> Channel:
        """The channel to a worker: on rank 0 to one of the others, on these to rank 0."""
        assert self._group is not None
        return Channel(self._group, peer)
