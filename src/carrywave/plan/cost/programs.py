"""Caches programs, and what follows from them without any times, per number of stages and chunks; and finds critical paths."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from carrywave.plan.cost.memory import Load, loads, one_micro_batch
from carrywave.plan.cost.simulation import Compiled
from carrywave.plan.schedule.buffers import places
from carrywave.plan.schedule.messages import with_messages
from carrywave.plan.schedule.schedule import wavefront


@lru_cache(maxsize=256)
def program_of(stages: int, chunks: tuple[int, ...], share_head: bool, defer_weights: bool) -> Compiled:
    """The program that the runtime would execute, compiled for simulation."""
    return Compiled(with_messages(wavefront(stages, chunks, share_head=share_head, defer_weights=defer_weights)))


@lru_cache(maxsize=1024)
def loads_of(stages: int, chunks: tuple[int, ...], share_head: bool, defer_weights: bool) -> tuple[Load, ...]:
    """The chunks that each stage holds at once."""
    if len(chunks) == 1:
        return (one_micro_batch(chunks[0], defer_weights=defer_weights),) * stages
    return loads(wavefront(stages, chunks, share_head=share_head, defer_weights=defer_weights))


@lru_cache(maxsize=1024)
def slots_of(stages: int, chunks: tuple[int, ...], share_head: bool, defer_weights: bool) -> int:
    """The most micro-batches whose messages a channel holds at once, in device memory."""
    if stages == 1 or len(chunks) == 1:
        return 1
    return max(room.slots for room in places(program_of(stages, chunks, share_head, defer_weights).program).values())


@lru_cache(maxsize=1024)
def scored_by(stages: int, chunks: tuple[int, ...], defer_weights: bool) -> tuple[int, ...]:
    """The number of chunks that each stage scores when the head is shared."""
    counts = Counter(wavefront(stages, chunks, share_head=True, defer_weights=defer_weights).scorers.values())
    return tuple(counts[stage] for stage in range(stages))


def through(whole: list[float], short: list[float], hop: list[float], short_hop: list[float], before: int, sends: list[float]) -> float:
    """Seconds of the critical path of `before` whole chunks and a short one through the stages; `sends` delay each stage's next chunk."""
    if not before:
        return sum(short) + sum(short_hop)
    rest = sum(short) + sum(short_hop)
    sofar = slowest = longest = 0.0
    for stage, seconds in enumerate(whole):
        sofar += seconds + (hop[stage - 1] if stage else 0.0)
        rest -= short_hop[stage - 1] if stage else 0.0
        slowest = max(slowest, seconds + sends[stage])
        longest = max(longest, sofar + (before - 1) * slowest + sends[stage] + rest)
        rest -= short[stage]
    return longest
