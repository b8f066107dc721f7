"""Builds the order of a wavefront's tasks on each stage, by a greedy simulation with assumed durations."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Literal

# Task durations assumed when a schedule is built, for one chunk. They need not be measured: an order made for a head of 2 ends within a few
# percent of the optimum for any head from 0.5 to 6. BACKWARD is the whole backward, which has twice the multiplications of a forward. The
# weight gradients are half of those, but one large product instead of many small ones, so they take less than half of the time.
FORWARD, BACKWARD, HEAD, WEIGHTS = 1, 2, 2, 0.5
# What weight gradients are computed from stays in memory until then. A stage of a pipeline computes those of its oldest micro-batch at the
# latest when this many micro-batches are waiting for theirs.
MOST_WAITING = 2

Placed = tuple[Literal["F", "B", "H", "W"], int, int]  # a task of a stage: phase, chunk, micro-batch


def wavefront_order(stages: int, counts: tuple[int, ...], head: float | None, *, defer_weights: bool) -> list[list[Placed]]:
    """Each stage's task order from a greedy simulation with the durations assumed above. A stage prefers a backward if one is ready, then a
    forward unless that would exceed its limit of chunks in flight, then a head (None: not shared), then the weight gradients of a
    micro-batch whose backward it has finished. If MOST_WAITING micro-batches wait for these, it computes the oldest before anything else; a
    single stage, which never waits for others, as soon as there are any.

    Among heads, it takes the one whose gradient is needed first. The last stage chooses first, so that the head all backwards wait
    for needs no message; then the stages from the first on, as the earliest ones wait longest for a backward.
    """
    forwards = forwards_of(counts)
    backwards = [(chunk, part) for part, count in enumerate(counts) for chunk in reversed(range(count))]
    # The last stage may start the n-th backward once whole[n] forwards are done: all those up to the end of its micro-batch.
    whole = [end for end, count in zip(accumulate(counts), counts, strict=True) for _ in range(count)]
    last, total = stages - 1, len(forwards)
    limits = [max(counts) + extra(max(counts), last - stage) for stage in range(stages)]
    deferred = frozenset(part for part, count in enumerate(counts) if defer_weights and count > 1)
    most = min(stages, MOST_WAITING)
    waiting: list[list[int]] = [[] for _ in range(stages)]  # micro-batches whose weight gradients can be computed, oldest first
    rows: list[list[Placed]] = [[] for _ in range(stages)]
    begun = [[0, 0] for _ in range(stages)]  # counts of forwards, backwards
    done = [[0, 0] for _ in range(stages)]
    ends: list[float] = [0] * stages  # end time of each stage's current task
    turns = {position: turn for turn, position in enumerate(backwards)}  # the order in which the heads' gradients are needed
    unscored: set[int] = set()  # turns of heads that are ready and not started
    scored: dict[int, float] = {}  # end time of each turn's head
    now: float = 0
    while done[0][1] < total or any(waiting):
        for stage in range(stages):
            if ends[stage] <= now:
                if stage == last and head is not None:
                    unscored |= {turns[position] for position in forwards[done[last][0] : begun[last][0]]}
                done[stage] = begun[stage].copy()
        for stage in (last, *range(last)):
            if ends[stage] > now:
                continue
            forward, back = begun[stage]
            if stage == last:
                returns = back < total and done[last][0] >= whole[back] and (head is None or scored.get(back, math.inf) <= now)
            else:
                returns = back < total and done[stage + 1][1] > back
            overdue = len(waiting[stage]) >= most
            if returns and not overdue:
                chunk, part = backwards[back]
                rows[stage].append(("B", chunk, part))
                begun[stage][1] += 1
                ends[stage] = now + BACKWARD - (WEIGHTS if part in deferred else 0)
                waiting[stage] += [part] if chunk == 0 and part in deferred else []
            elif not overdue and forward < total and forward - back < limits[stage] and (stage == 0 or done[stage - 1][0] > forward):
                rows[stage].append(("F", *forwards[forward]))
                begun[stage][0] += 1
                ends[stage] = now + FORWARD
            elif not overdue and unscored and head is not None:
                turn = min(unscored)
                unscored.remove(turn)
                rows[stage].append(("H", *backwards[turn]))
                scored[turn] = ends[stage] = now + head
            elif waiting[stage]:
                part = waiting[stage].pop(0)
                rows[stage].append(("W", 0, part))
                ends[stage] = now + WEIGHTS * counts[part]
        now = min((end for end in ends if end > now), default=now)
    return rows


def extra(chunks: int, distance: int) -> int:
    """How many chunks beyond one micro-batch a stage may hold when it is `distance` stages before the last.

    Between the last forward of a micro-batch and its first backward, such a stage has 3 * distance units of time to fill: for each
    later stage, one on the way forward and two on the way back. Forwards of later micro-batches fill them. If these are shorter than
    that, their backwards take part of the time: with one chunk each, 3 units hold one forward and one backward. With these
    limits, equal micro-batches finish 3 * (stages - 1) units after the time one stage needs for its own tasks, which is optimal if
    backwards include the weight gradients. If not, the way back takes less: one micro-batch finishes after 2.5 * (stages - 1) units,
    which is optimal, and several no later, since weight gradients fill the time before and after the last backwards.
    """
    return min(3, chunks) * distance


def forwards_of(counts: tuple[int, ...]) -> list[tuple[int, int]]:
    """The (chunk, micro-batch) of every forward, in order."""
    return [(chunk, part) for part, count in enumerate(counts) for chunk in range(count)]
