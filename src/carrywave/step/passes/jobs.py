"""What a pass is given, a `PassJob` for each batch, and what it gives back; its program; and batches and states cut into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from carrywave.data.batch import Batch
from carrywave.data.loader import Share
from carrywave.kernels.carry import changed
from carrywave.model.state import State
from carrywave.plan.plan import Plan
from carrywave.plan.schedule.messages import Program, with_messages
from carrywave.plan.schedule.schedule import Schedule, wavefront

# The head's output, the targets, the sequence in each lane, and the step of it with which the output begins.
Observer = Callable[[Tensor, Tensor | None, Tensor, Tensor], None]
FlatCarry = list[Tensor] | None  # the carry of some lanes as the tensors of `flatten`; None: lanes keep none
# (stages, chunks of each micro-batch, backward=, share_head=True if requested, defer_weights=False if none are deferred) -> Schedule
Scheduler = Callable[..., Schedule]


class PassJob(NamedTuple):
    """One batch to run: the lanes' state before it, and how to run it."""

    batch: Batch
    state: State | None  # None: continue from the previous job
    key: Tensor | None = None  # random key for dropout; None in evaluation
    scale: Tensor | None = None  # multiplies the loss before backward (fp16)
    alpha: float = 0.0
    beta: float = 0.0
    per_change: Tensor | None = None  # as in `regularize`
    precision: str = "fp32"  # of the forward pass; backward follows automatically
    observe: Observer | None = None  # called with every output of the head, in evaluation


@dataclass(frozen=True)
class BatchOutcome:
    """Sums over the part of the batch that this stage scored, and the state of every lane after it. Detached."""

    sums: Tensor  # [3]: loss over real targets, real targets, regularisation, which was differentiated with the loss
    state: State

    @property
    def loss_sum(self) -> Tensor:
        """The loss over real targets."""
        return self.sums[0]

    @property
    def count(self) -> Tensor:
        """Real targets."""
        return self.sums[1]


def program_for(
    plan: Plan, batches: Sequence[Batch], *, backward: bool, uncut_time: bool = False, scheduler: Scheduler = wavefront
) -> Program:
    """The program of a step over these batches, the same on every worker with nothing negotiated; cached because shapes recur. A batch with
    few lanes has fewer micro-batches.

    `uncut_time`: time is not cut, because bidirectional layers or the head need the whole window at once.
    """
    chunks: list[int] = []
    for batch in batches:
        count = 1 if uncut_time or plan.chunk_steps is None else plan.chunks(batch.steps)
        chunks += [count] * min(plan.micro_batches, batch.lanes.shape[0])
    # What weight gradients are computed from stays in memory if they are deferred, which recomputation is meant to avoid.
    return _program(plan.stages, tuple(chunks), backward, backward and plan.shares_head, not (backward and bool(plan.recompute)), scheduler)


@lru_cache(maxsize=1024)
def _program(stages: int, chunks: tuple[int, ...], backward: bool, share_head: bool, defer_weights: bool, scheduler: Scheduler) -> Program:
    options = ({"share_head": True} if share_head else {}) | ({} if defer_weights else {"defer_weights": False})
    return with_messages(scheduler(stages, chunks, backward=backward, **options))


def split_lanes(batch: Batch, micro_batches: int, *, pooled: bool) -> list[Batch]:
    """Cut a batch into micro-batches of its lanes, the way lanes are split among replicas."""
    return [batch.take(low, high, pooled=pooled) for low, high in _bounds(batch.lanes.shape[0], micro_batches)]


def split_state(state: State, micro_batches: int, lanes: int) -> list[State]:
    """The state of each micro-batch of the lanes."""
    return [
        State(
            tuple(changed(carry, lambda part, low=low, high=high: part[:, low:high]) for carry in state.carries),
            None if state.acc is None else tuple(tensor[low:high] for tensor in state.acc),
        )
        for low, high in _bounds(lanes, micro_batches)
    ]


def join_states(states: Sequence[State]) -> State:
    """The state of all lanes, from the states of their micro-batches."""
    if len(states) == 1:
        return states[0]
    carries = tuple(
        changed(first, lambda *parts: torch.cat(parts, dim=1), *others) for first, *others in zip(*(s.carries for s in states), strict=True)
    )
    accs = [s.acc for s in states if s.acc is not None]
    return State(carries, tuple(torch.cat(parts) for parts in zip(*accs, strict=True)) if accs else None)


def flatten(state: State) -> list[Tensor]:
    """The tensors of a state, in a fixed order."""
    tensors = [tensor for carry in state.carries for tensor in carry]
    return [*tensors, *(state.acc or ()), *([] if state.tail is None else [state.tail])]


def _bounds(lanes: int, micro_batches: int) -> list[tuple[int, int]]:
    """The half-open range of lanes of each micro-batch."""
    return [Share(part, micro_batches).bounds(lanes) for part in range(micro_batches)]
