"""What a step frees is there for the next one: no page is fetched from the system again."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

STEPS = """
import resource, time
from carrywave import heap
{keep}
import torch

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [torch.ones(16_000) for _ in range(1000)]
    del held
    time.sleep(0.15)  # some allocators wait a while before they give memory back
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

found = [faults() for _ in range(6)]
print(max(found[2:]))
"""


def faults(keep: str) -> int:
    """Pages that a step of 64 MB had to fetch, at most. Without keeping there were 800 to 1,500 on ARM with large pages."""
    given = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "MIMALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", STEPS.format(keep=keep)], capture_output=True, text=True, check=True, env=given, timeout=120
    )
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems' allocators do as they like")
def test_freed_memory_is_kept() -> None:
    assert faults("heap.keep()") < 100  # the interpreter has a few of its own


def test_who_has_set_an_allocator_keeps_that(monkeypatch: pytest.MonkeyPatch) -> None:
    from carrywave import heap

    asked: list[tuple[int, int]] = []

    class Library:
        def mallopt(self, what: int, value: int) -> int:
            asked.append((what, value))
            return 1

    monkeypatch.setattr(heap.ctypes, "CDLL", lambda _: Library())
    monkeypatch.setattr(heap.sys, "platform", "linux")
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "MIMALLOC_", "GLIBC_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MIMALLOC_PURGE_DELAY", "7")
    heap.keep()
    assert os.environ["MIMALLOC_PURGE_DELAY"] == "7"
    assert [what for what, _ in asked] == [-3, -1]
    monkeypatch.setenv("MALLOC_ARENA_MAX", "4")  # another matter
    heap.keep()
    assert len(asked) == 4
    for name, value in (("MALLOC_TRIM_THRESHOLD_", "1000"), ("GLIBC_TUNABLES", "glibc.cpu.x=1:glibc.malloc.trim_threshold=1000")):
        monkeypatch.setenv(name, value)
        heap.keep()
        monkeypatch.delenv(name)
    assert len(asked) == 4


def test_an_old_library_takes_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    from carrywave import heap

    asked: list[tuple[int, int]] = []

    class Library:
        def mallopt(self, what: int, value: int) -> int:
            asked.append((what, value))
            return int(what == -1 or value <= 1 << 25)

    monkeypatch.setattr(heap.ctypes, "CDLL", lambda _: Library())
    monkeypatch.setattr(heap.sys, "platform", "linux")
    monkeypatch.setenv("MIMALLOC_PURGE_DELAY", "-1")
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_"))]:
        monkeypatch.delenv(name)
    heap.keep()
    assert asked == [(-3, 1 << 30), (-3, 1 << 25), (-1, (1 << 31) - 1)]
