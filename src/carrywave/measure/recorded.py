"""Times units on a GPU as a single stage runs them: captured as a CUDA graph, so that host overhead plays no part."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from carrywave.measure.rig import Rig, between, nothing
from carrywave.plan.cost.profile import Sample
from carrywave.plan.cost.sample_requests import Ask

BLOCKS, LEAST_SECONDS = 5, 0.02


def time_recorded(ask: Ask, device: torch.device, task_seconds: float) -> Sample:
    """Time a request. Forward is timed alone; backward is the rest of forward plus backward, less the overhead of the two tasks."""
    if ask.kind in ("dropout", "norm"):
        forward, backward = (max(1e-7, seconds) for seconds in _between(ask, device))
        return ask.sample(forward, backward, 0.0)
    rig = Rig(ask, device)
    forward = replay_seconds(rig.forward, device)
    both = max(replay_seconds(lambda: rig.run(1, None), device) - 2 * task_seconds, 1.2 * forward)
    return ask.sample(forward, both - forward, 0.0)


def recorded_task(device: torch.device, precision: str) -> float:
    """Seconds of overhead per captured task: a task without any unit."""
    rig = Rig(nothing(precision), device)
    return replay_seconds(lambda: rig.run(1, None), device) / 2


def _between(ask: Ask, device: torch.device) -> tuple[float, float]:
    """Forward and backward seconds of dropout or norm."""
    step = between(ask, device)
    forward = replay_seconds(lambda: step(False), device)
    return forward, replay_seconds(lambda: step(True), device) - forward


def replay_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Capture `work` as a CUDA graph and return the seconds per replay: the median over a few blocks of replays."""
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = work()
    graph.replay()
    times = max(3, round(LEAST_SECONDS / max(1e-6, _block(graph, 3, device))))
    found = statistics.median(_block(graph, times, device) for _ in range(BLOCKS))
    del kept
    return found


def _block(graph: torch.cuda.CUDAGraph, times: int, device: torch.device) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(times):
        graph.replay()
    end.record()
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end)) / 1e3 / times
