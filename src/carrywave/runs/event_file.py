"""TensorBoard's event files, written without TensorBoard, whose own packages take a second to import.

A file is a sequence of records, each with two masked CRC-32C, of an `Event` message of protocol buffers.
"""

from __future__ import annotations

import struct
import time
from array import array
from collections.abc import Mapping
from functools import cache
from pathlib import Path

START = b"\x3a\x02\x08\x01"  # session_log { status: START }: what an earlier file has from this step on is to be discarded


class EventFile:
    """An event file, each record of which is on its way to the disk at once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._record(_bytes(3, b"brain.Event:2"))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write some numbers of a step, by name."""
        parts = (_bytes(1, _bytes(1, tag.encode()) + b"\x15" + array("f", [value]).tobytes()) for tag, value in values.items())
        self._record(_step(step) + _bytes(5, b"".join(parts)))

    def restart(self, step: int) -> None:
        """Say that what other files have from this step on comes again."""
        self._record(_step(step) + START)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _record(self, event: bytes) -> None:
        data = b"\x09" + struct.pack("<d", time.time()) + event
        length = struct.pack("<Q", len(data))
        self._file.write(length + _masked_crc(length) + data + _masked_crc(data))


def _step(step: int) -> bytes:
    return b"\x10" + _varint(step)


def _bytes(number: int, content: bytes) -> bytes:
    """A field of a message that is text or a message itself."""
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out) + bytes([value])


@cache
def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


def _masked_crc(data: bytes) -> bytes:
    crc, table = 0xFFFFFFFF, _crc_table()
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
