"""Memory that workers of one host share: a file that cannot be filled is closed. How they share it: tests/distributed/test_host_sums.py."""

from __future__ import annotations

import errno
import os
import sys

import pytest

from carrywave.parallel.memory import host_memory


@pytest.mark.skipif(sys.platform != "linux", reason="needs memfd_create and /proc")
@pytest.mark.parametrize("fails", ["ftruncate", "pwrite"])
def test_a_file_without_room_is_closed(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(os, fails, refuse)
    assert host_memory._made(64, 7) == (None, None)
    assert os.listdir("/proc/self/fd") == before
