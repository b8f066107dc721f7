"""Stops the allocators from returning freed memory to the system after every step, only to fault it back in page by page.

A step frees the activations it saved for backward, tens of megabytes at once, and the next step needs as much again.
"""

from __future__ import annotations

import ctypes
import os
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD in glibc's malloc.h
_DECIDED = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
_MOST = (1 << 31) - 1
_LARGEST = (1 << 30, 1 << 25)  # bytes above which a block is mmapped; older versions of glibc accept at most the second value


def keep() -> None:
    """Keep freed memory in this process and, where torch uses mimalloc (ARM), in its children.

    Call this before importing torch: mimalloc reads the environment only once, at load time. glibc's settings are per process, so every
    process that trains calls this itself. Allocator variables set by the user take precedence.
    """
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "-1")
    decided = any(name in os.environ for name in _DECIDED) or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
    if decided or not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc: there is no mallopt to call
        return
    if any(mallopt(_MMAP_THRESHOLD, size) for size in _LARGEST):
        mallopt(_TRIM_THRESHOLD, _MOST)
