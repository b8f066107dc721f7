"""The program of a step, from its plan and the shapes of its batches: the same on every worker, with nothing negotiated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from carrywave.data.batch import Batch
from carrywave.plan.plan import Plan
from carrywave.plan.schedule.messages import Program, with_messages
from carrywave.plan.schedule.schedule import Schedule, wavefront

# (stages, chunks of each micro-batch, backward=, share_head=True if requested, defer_weights=False if none are deferred) -> Schedule
Scheduler = Callable[..., Schedule]


@lru_cache(maxsize=1024)
def _program(stages: int, chunks: tuple[int, ...], backward: bool, share_head: bool, defer_weights: bool, scheduler: Scheduler) -> Program:
    options = ({"share_head": True} if share_head else {}) | ({} if defer_weights else {"defer_weights": False})
    return with_messages(scheduler(stages, chunks, backward=backward, **options))


def program_for(
    plan: Plan, batches: Sequence[Batch], *, backward: bool, uncut_time: bool = False, scheduler: Scheduler = wavefront
) -> Program:
    """The program of a step over these batches, cached because shapes recur. A batch with few lanes has fewer micro-batches.

    `uncut_time`: time is not cut, because bidirectional layers or the head need the whole window at once.
    """
    chunks: list[int] = []
    for batch in batches:
        count = 1 if uncut_time or plan.chunk_steps is None else plan.chunks(batch.steps)
        chunks += [count] * min(plan.micro_batches, batch.lanes.shape[0])
    # What weight gradients are computed from stays in memory if they are deferred, which recomputation is meant to avoid.
    return _program(plan.stages, tuple(chunks), backward, backward and plan.shares_head, not (backward and bool(plan.recompute)), scheduler)
