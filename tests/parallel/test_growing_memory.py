"""Which shared memory work is given, and when a new one is made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from carrywave.parallel.memory.symmetric import GrowingMemory, SharedMemory, padded


def test_the_first_that_is_large_enough_is_used_and_smaller_ones_are_kept() -> None:
    made: list[int] = []

    def make(size: int) -> SharedMemory:
        made.append(size)
        return cast(SharedMemory, SimpleNamespace(size=size))

    memory = GrowingMemory(make, least=64)
    given = [memory.of(size) for size in (1, 64, 65, 129, 2, 128, 256)]
    assert made == [64, 128, 256]
    assert [each.size for each in given] == [64, 64, 128, 256, 64, 128, 256]
    assert given[4] is given[0]  # what was captured with it is still valid


@pytest.mark.parametrize(("size", "room"), [(0, 0), (1, 256), (256, 256), (257, 512)])
def test_room_is_a_multiple_of_256_bytes(size: int, room: int) -> None:
    assert padded(size) == room
