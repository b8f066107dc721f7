"""Hides log output of torch's C++ code about connections, because we report what matters in our own messages.

`TORCH_CPP_LOG_LEVEL` does the same, but torch reads it when it is loaded, which in a user's program may be before our import. If the user
has set it, it is left alone.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

WARNING, ERROR, FATAL = 1, 2, 3


def _level() -> ctypes.c_int | None:
    """torch's own log-level variable; None if this build has none, or the user has set the level."""
    if "TORCH_CPP_LOG_LEVEL" in os.environ:
        return None
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None


def hush() -> None:
    """Hide warnings from here on, but not errors: some precede an abort, and nothing else says why."""
    level = _level()
    if level is not None:
        level.value = max(level.value, ERROR)


@contextmanager
def silent() -> Iterator[None]:
    """Inside this context, hide errors too: they are also raised as exceptions."""
    level = _level()
    before = None if level is None else level.value
    try:
        if level is not None:
            level.value = FATAL
        yield
    finally:
        if level is not None and before is not None:
            level.value = before
