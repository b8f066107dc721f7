"""Keeps freed memory in the process, where the system's allocators would hand it back after every step and fetch it again, page by page.

A step frees what it kept for backward, tens of megabytes at once, and the next one needs it again. `carrywave bench heap` shows what that
costs on the CPU.
"""

from __future__ import annotations

import ctypes
import os
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # numbers of glibc's malloc.h
_DECIDED = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
_MOST = (1 << 31) - 1
_LARGEST = (1 << 30, 1 << 25)  # bytes from which a block is the system's own; older versions of glibc take no more than the second


def keep() -> None:
    """For this process and those it starts. To be called before torch is loaded: its allocator on ARM reads the environment only then.

    Whoever has set an allocator's own variables for it keeps what they say.
    """
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "-1")
    decided = any(name in os.environ for name in _DECIDED) or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
    if decided or not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library, which does as it likes
        return
    if any(mallopt(_MMAP_THRESHOLD, size) for size in _LARGEST):
        mallopt(_TRIM_THRESHOLD, _MOST)
