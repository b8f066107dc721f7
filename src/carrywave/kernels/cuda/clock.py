"""Time stamps taken by the device itself: `stamp` can be captured in a CUDA graph, and every replay writes anew (`clock.cu`).

All processes on a GPU read one clock, so their stamps can be compared; CUDA events of two processes cannot. Elsewhere the host's clock is
used.
"""

from __future__ import annotations

import time

from torch import Tensor

from carrywave.kernels.cuda import nvrtc

_SOURCE = "clock.cu"


def stamp(at: Tensor) -> None:
    """Write the time in nanoseconds to a tensor of one int64, when the device has finished all work queued before."""
    if not at.is_cuda:
        at.fill_(time.perf_counter_ns())
        return
    nvrtc.kernel(_SOURCE, "stamp", (), 0, at.get_device())((1, 1, 1), (1, 1), at)
