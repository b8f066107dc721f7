"""Times units on a GPU as recorded steps run them: captured as a CUDA graph, so that host overhead plays no part.

A single stage runs its window as one chunk. Stages run it as several, which share a window: kernels keep what they need between chunks, and
weight gradients are computed once, at its end. What a chunk takes there follows from graphs that stop at different points of one step.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from carrywave.measure.rig import Part, Rig, between, nothing, without_task
from carrywave.measure.timing import captured, gpu_seconds
from carrywave.plan.cost.profile import Sample
from carrywave.plan.cost.sample_requests import LARGEST, Ask

BLOCKS, LEAST_SECONDS = 5, 0.004
LONG_BLOCKS, LONG_SECONDS = 3, 0.02  # of replays that take this long, one makes a block, and few blocks are enough
LEAST = 1e-7  # seconds of any call
EMPTY_CHUNKS = 8  # of a window without any unit
LEAST_CHUNKS = 4  # of a window with a unit, if it has as many
Together = Callable[[], None]  # a barrier, so that all workers time the same call at once


class Chunks(NamedTuple):
    """Seconds of a chunk's forward and backward, and of the weight gradients of its window."""

    forward: float
    backward: float
    weights: float


def time_recorded(ask: Ask, device: torch.device, task_seconds: float, together: Together = lambda: None) -> Sample:
    """Time a request as a window of one chunk. Forward is timed alone; backward is the rest of forward plus backward, less the overhead of
    the two tasks.
    """
    if ask.kind in ("dropout", "norm"):
        forward, backward = (max(LEAST, seconds) for seconds in _between(ask, device))
        return ask.sample(forward, backward, 0.0)
    rig = Rig(ask, device)
    forward = replay_seconds(rig.forward, together)
    both = max(replay_seconds(lambda: rig.run(1, None), together) - 2 * task_seconds, 1.2 * forward)
    return ask.sample(forward, both - forward, 0.0)


def time_chunk(ask: Ask, device: torch.device, task_seconds: float, together: Together = lambda: None) -> Sample:
    """Time a request as one of several chunks of a window; what it defers is its part of the window's weight gradients."""
    chunks = enough_chunks(ask)
    rig = Rig(replace(ask, steps=chunks * ask.steps), device)

    def seconds(part: Part) -> float:
        return replay_seconds(lambda: rig.run(chunks, None, part), together)

    forward, backward, weights = chunks_of(chunks, seconds)
    forward, backward, put_off = max(LEAST, without_task(forward, task_seconds)), without_task(backward, task_seconds), weights / chunks
    return replace(ask.sample(forward, backward + put_off, put_off), piped="recorded")


def enough_chunks(ask: Ask) -> int:
    """How many chunks of a window are timed: all, or fewer if they would take long, as each takes the same."""
    return max(min(ask.chunks, LEAST_CHUNKS), min(ask.chunks, round(LARGEST["cuda"] / max(1.0, ask.work))))


def chunks_of(chunks: int, seconds: Callable[[Part], float]) -> Chunks:
    """The times of the tasks of a window of `chunks` chunks, from those of its parts. What is made once a pass counts as forward."""
    begun, returned, everything = seconds("begun"), seconds("returned"), seconds("all")
    backward = max(0.0, returned - begun) / (chunks - 1)
    return Chunks(max(0.0, begun - backward) / chunks, backward, max(0.0, everything - returned))


def recorded_task(device: torch.device, precision: str, together: Together = lambda: None) -> float:
    """Seconds of overhead per captured task: a task without any unit, in a window of several chunks."""
    rig = Rig(nothing(precision), device)

    def seconds(part: Part) -> float:
        return replay_seconds(lambda: rig.run(EMPTY_CHUNKS, None, part), together)

    found = chunks_of(EMPTY_CHUNKS, seconds)
    return (found.forward + found.backward) / 2


def _between(ask: Ask, device: torch.device) -> tuple[float, float]:
    """Forward and backward seconds of dropout or norm."""
    step = between(ask, device)
    forward = replay_seconds(lambda: step(False))
    return forward, replay_seconds(lambda: step(True)) - forward


def replay_seconds(work: Callable[[], object], together: Together = lambda: None, times: int | None = None) -> float:
    """Capture `work` as a CUDA graph and return the seconds per replay: the median over a few blocks of replays.

    `times`: the replays of a block. Work that waits for other workers needs the same number on all of them; otherwise it depends on the
    time of a replay.
    """
    graph, kept = captured(work)
    graph.replay()
    blocks = BLOCKS
    if times is None:
        first = gpu_seconds(graph.replay)
        times, blocks = (1, LONG_BLOCKS) if first > LONG_SECONDS else (max(3, round(LEAST_SECONDS / max(1e-6, first))), BLOCKS)
    together()
    seconds = statistics.median(gpu_seconds(graph.replay, times) for _ in range(blocks))
    del kept
    return seconds
