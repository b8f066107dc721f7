"""The CUDA stream on which copies between host and device run beside the computation."""

from __future__ import annotations

from functools import cache

import torch


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The same stream on every call.

    torch hands out streams from a pool of 32, in turns. A new stream for every pass over the data would, after 32 of them, be the stream on
    which CUDA graphs are captured, and a copy made there during a capture would become part of the graph instead of being carried out.
    Streams of high priority come from a pool of their own.
    """
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
