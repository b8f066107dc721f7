"""CUDA errors of a worker whose neighbours write to its GPU's memory, and how such a worker ends.

Where messages and sums are in device memory, no connection closes when a neighbour dies: the stream waits for its signal, and gives up with
a CUDA error when the time is over; under MPS the error comes at once. After a CUDA error the process can do no more work on its GPU.

Such a process must not tear down its GPU's memory either. Freeing shared memory waits for all work of the device, which may wait for a
neighbour that waits for this process to end; and after a CUDA error, destroying tensors aborts the process. So it ends at once. Torch-free.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from typing import NoReturn

# What torch and CUDA's libraries call an error of the device; running out of memory is an error of its own.
FAULTS = ("CUDA error", "CUDA driver error", "cuDNN error", "CUDNN_STATUS_", "CUBLAS_STATUS_", "CUDA_ERROR_")
NO_FAULTS = ("out of memory", "CUDA_ERROR_OUT_OF_MEMORY", "CUBLAS_STATUS_ALLOC_FAILED")
# How a kernel ends that gives up waiting for a signal. Its message, with ranks and channel, goes to the process's output, not to the error.
TRAPS = ("unspecified launch failure", "an illegal instruction was encountered")
NEARLY = 0.9  # of the timeout: the host starts to wait a little later than the device


class _Exchanges:
    """What this process exchanges with others."""

    in_use = False
    began_seconds: float | None = None  # when collective work last began here, on the monotonic clock


def use() -> None:
    """Note that other workers write to this one's device memory from now on."""
    _Exchanges.in_use = True


def in_use() -> bool:
    """True if other workers write to this one's device memory."""
    return _Exchanges.in_use


def begin() -> None:
    """Note that this worker begins work in which others take part."""
    _Exchanges.began_seconds = time.monotonic()


def is_fault(error: BaseException) -> bool:
    """True if an error says that the device failed."""
    text = str(error)
    return isinstance(error, RuntimeError) and any(part in text for part in FAULTS) and not any(part in text for part in NO_FAULTS)


def is_timeout(error: BaseException, timeout_seconds: float) -> bool:
    """True if a device error is that of a kernel that waited in vain: it looks like one, and there was time for it."""
    waited = 0.0 if _Exchanges.began_seconds is None else time.monotonic() - _Exchanges.began_seconds
    return waited >= NEARLY * timeout_seconds and any(part in str(error) for part in TRAPS)


def leave_if_in_use(code: int) -> None:
    """After a failure has been reported: if other workers write to this one's device memory, end the process without any cleanup."""
    if _Exchanges.in_use:
        _leave(code)


def _leave(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or nobody reads it any more
            stream.flush()
    os._exit(code)
