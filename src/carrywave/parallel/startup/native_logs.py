"""What torch's own C++ parts log of connections is kept from the user: what there is to say of them is said in words of ours.

`TORCH_CPP_LOG_LEVEL` does the same, but torch reads it when it is loaded, which in a program of the user's own was before us. Where the
user has set it, it is left alone.
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
    """Torch's own variable; None: this build has none, or the user has chosen."""
    if "TORCH_CPP_LOG_LEVEL" in os.environ:
        return None
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None


def hush() -> None:
    """From here on warnings are not shown; errors are, since some of them come before an abort and nothing else says why."""
    level = _level()
    if level is not None:
        level.value = max(level.value, ERROR)


@contextmanager
def silent() -> Iterator[None]:
    """Within it errors are not shown either: they are raised as well."""
    level = _level()
    before = None if level is None else level.value
    try:
        if level is not None:
            level.value = FATAL
        yield
    finally:
        if level is not None and before is not None:
            level.value = before
