"""How calls are timed: in turns, so that a disturbance meets all of them; by the host's clock, or by a GPU's; launched, or as a CUDA graph.

Nothing here but torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

T = TypeVar("T")
Call = Callable[[], object]

WARM_UP = 2  # calls, in which libraries initialise and select algorithms
SMALL_BYTES, LARGE_BYTES = 4096, 1 << 20  # of the two messages that tell a link's latency and rate


def take_turns(blocks: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """What each block returned, round by round; in a round every block runs once."""
    results: dict[str, list[T]] = {name: [] for name in blocks}
    for _ in range(rounds):
        for name, block in blocks.items():
            results[name].append(block())
    return results


def settle(device: torch.device) -> None:
    """Wait until a device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def call_seconds(call: Call, repeats: int, device: torch.device) -> float:
    """Seconds per call by the host's clock, over back-to-back calls from an idle device until they are done."""
    settle(device)
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    settle(device)
    return (time.perf_counter() - begin) / repeats


def gpu_seconds(call: Call, repeats: int = 1) -> float:
    """Seconds per call by the clock of the current GPU, over back-to-back calls from when it is idle."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / repeats


def captured(call: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """A call as a CUDA graph of the current GPU, after a warm-up; and its result, to be kept as long as the graph is replayed."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # capture needs a warm-up on a stream of its own
        for _ in range(WARM_UP):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Thread-local: NCCL has a thread that asks for the state of earlier work meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        kept = call()
    return graph, kept


def rate_between(small_seconds: float, large_seconds: float) -> float:
    """Bytes per second of a link, from what a small and a large message take: their difference is free of latency.

    On a busy machine either may take longer by chance, and the large one even less than the small one. So the bytes themselves are taken to
    need at least a twentieth of the large message's time: less cannot be told from noise, and would make the link look infinitely fast.
    """
    return (LARGE_BYTES - SMALL_BYTES) / max(1e-9, large_seconds - small_seconds, large_seconds / 20)
