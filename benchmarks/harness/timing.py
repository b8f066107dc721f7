"""How calls are timed: in turns, so that a disturbance meets all of them; by the host's clock, or by a GPU's; launched, or as a CUDA graph.

On a GPU, calls are timed in blocks of back-to-back calls. Each block starts with an idle GPU, so that time spent waiting for the host
counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch

from carrywave.errors import UserError

T = TypeVar("T")
Call = Callable[[], object]

WARM_UP = 2  # calls, in which libraries initialise and select algorithms


def take_turns(blocks: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """What each block returned, round by round; in a round every block runs once."""
    results: dict[str, list[T]] = {name: [] for name in blocks}
    for _ in range(rounds):
        for name, block in blocks.items():
            results[name].append(block())
    return results


def spread(values: list[float]) -> float:
    """The range of the values (max - min), relative to their median."""
    return (max(values) - min(values)) / statistics.median(values)


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


@contextmanager
def one_thread() -> Iterator[None]:
    """torch with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def cuda_device() -> torch.device:
    """The GPU to benchmark on; a user error if there is none."""
    if not torch.cuda.is_available():
        raise UserError("this benchmark needs a GPU, but torch found none that it can use; run it on a machine with an NVIDIA GPU")
    return torch.device("cuda", torch.cuda.current_device())


def elapsed_ms(call: Call, repeats: int = 1) -> float:
    """Milliseconds per call by the clock of the current GPU, over back-to-back calls from when it is idle."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / repeats


def time_calls(
    calls: Mapping[str, Call],
    *,
    block_ms: float,
    budget_ms: float,
    rounds: tuple[int, int],
    clock: Callable[[Call, int], float] = elapsed_ms,
) -> dict[str, list[float]]:
    """Milliseconds of each call in every round. A round gives each call a block of about `block_ms`; all rounds take about `budget_ms`."""
    first_ms = {name: clock(call, 1) for name, call in calls.items()}
    repeats = {name: max(1, round(block_ms / max(ms, 1e-3))) for name, ms in first_ms.items()}
    round_ms = sum(ms * repeats[name] for name, ms in first_ms.items())
    least, most = rounds
    blocks = {name: partial(clock, call, repeats[name]) for name, call in calls.items()}
    return take_turns(blocks, max(least, min(most, int(budget_ms / max(round_ms, 1e-3)))))


def warmed_up(call: Call) -> Call:
    """The call itself, after warming it up."""
    for _ in range(WARM_UP):
        call()
    return call


def captured(call: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """A call as a CUDA graph of the current GPU, after a warm-up; and its result, to be kept as long as the graph is replayed."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # capture needs a warm-up on a stream of its own
        warmed_up(call)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Thread-local: NCCL has a thread that asks for the state of earlier work meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        kept = call()
    return graph, kept


def graphed(call: Call) -> Call:
    """The call captured as a CUDA graph; its return value is dropped."""
    return captured(call)[0].replay


def one_line(error: BaseException) -> str:
    """An error, shortened to a note in a table."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
