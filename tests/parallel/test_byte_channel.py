"""Bytes and values that pass through a channel arrive as they were sent, in pieces of bounded size."""

from __future__ import annotations

import queue
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from carrywave.parallel import byte_channel
from carrywave.parallel.byte_channel import Channel

PIECE = 64


class Wire(Channel):
    """A channel to itself: what is sent is received in the same order, and messages must match in size, as gloo's do."""

    def __init__(self) -> None:
        super().__init__(None, 0)  # type: ignore[arg-type]
        self.messages: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        self.longest = 0

    def _send(self, tensor: Tensor) -> None:
        self.longest = max(self.longest, tensor.nbytes)
        self.messages.put(tensor.clone())

    def _receive(self, tensor: Tensor) -> None:
        message = self.messages.get_nowait()
        assert message.nbytes == tensor.nbytes
        tensor.copy_(message)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    monkeypatch.setattr(byte_channel, "PIECE_BYTES", PIECE)
    return Wire()


@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, 3 * PIECE + 5])
@pytest.mark.parametrize("longest_write", [1, 7, PIECE, 5 * PIECE])
def test_bytes_arrive_whatever_they_are_written_in(wire: Wire, size: int, longest_write: int) -> None:
    draw = random.Random(size)
    data = draw.randbytes(size)
    sent = 0
    while sent < size:
        sent += wire.write(memoryview(data)[sent : sent + draw.randint(1, longest_write)])
    wire.flush()
    wire.write(b"next")
    wire.flush()
    assert b"".join(bytes(piece) for piece in wire.read(size)) == data
    assert b"".join(bytes(piece) for piece in wire.read(4)) == b"next"
    assert wire.messages.empty()
    assert wire.longest <= PIECE


@pytest.mark.parametrize("value", [None, 1.5, "text", {"files": ["ä" * 100]}, []])
def test_values_arrive(wire: Wire, value: Any) -> None:
    wire.send_json(value)
    assert wire.receive_json() == value
    assert wire.messages.empty()


def test_numbers_of_tensors_can_be_written(wire: Wire) -> None:
    numbers = torch.arange(50, dtype=torch.float64)
    wire.write(numbers.view(torch.uint8).numpy().data)
    wire.flush()
    got = b"".join(bytes(piece) for piece in wire.read(numbers.nbytes))
    assert torch.equal(torch.frombuffer(bytearray(got), dtype=torch.float64), numbers)
