"""Interprets a `Schedule` on one batch: forward and backward of each time chunk of each slice of lanes.

Every chunk is an autograd graph of its own. What a chunk hands to the next one (the carry, and what a pooled head has
gathered) is detached on the way forward; its gradient is handed back by hand on the way backward. So what a chunk saved is
freed as soon as its backward is done, and one device runs the code that a stage of a pipeline runs.

Shapes: T time, B lane.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor

from carrywave.data.batch import Batch
from carrywave.kernels.carry import Carry
from carrywave.model.stage import Stage
from carrywave.model.state import Chunk, State
from carrywave.parallel.precision import autocast
from carrywave.plan.plan import Plan
from carrywave.plan.schedule import Schedule, Task, serial

Observer = Callable[[Tensor, Tensor | None], None]  # what the head put out, and the targets


@dataclass(frozen=True)
class Job:
    """One batch to run: where the lanes stand before it, and what is asked of it."""

    batch: Batch
    state: State
    key: Tensor | None = None  # keys dropout; None in evaluation
    scale: Tensor | None = None  # multiplies the loss before backward (fp16)
    alpha: float = 0.0
    beta: float = 0.0
    precision: str = "fp32"  # of the forward pass; backward follows it by itself
    observe: Observer | None = None  # sees every output of the head, in evaluation


@dataclass(frozen=True)
class Outcome:
    """Sums over the batch, and the state of every lane after it. Detached."""

    loss_sum: Tensor  # over real targets
    count: Tensor  # real targets
    penalty: Tensor  # regularisation, already part of what was differentiated but not of loss_sum
    state: State


@dataclass
class _Kept:
    """What the backward of a chunk needs of its forward."""

    entered: State
    left: State
    root: Tensor | None


@lru_cache(maxsize=256)
def schedule_for(plan: Plan, steps: int, lanes: int, *, backward: bool) -> Schedule:
    """The schedule of a batch of this shape; cached, since shapes repeat. A batch of few lanes has fewer slices."""
    return serial(plan.chunks(steps), min(plan.slices, lanes), backward=backward)


def run(stage: Stage, plan: Plan, schedule: Schedule, job: Job) -> Outcome:
    """Carry out one stage's tasks; gradients are added to the parameters' `.grad`."""
    return _Run(stage, plan, schedule, job).carry_out()


class _Run:
    def __init__(self, stage: Stage, plan: Plan, schedule: Schedule, job: Job) -> None:
        self.stage, self.plan, self.schedule, self.job = stage, plan, schedule, job
        self.batches = split_lanes(job.batch, schedule.slices, pooled=stage.pooled)
        self.states = split_state(job.state, schedule.slices)
        self.kept: dict[tuple[int, int], _Kept] = {}
        device = job.batch.lengths.device
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, count, penalty
        self.handed_back: dict[int, list[Tensor | None]] = {}
        # Only a step that goes backward needs graphs.
        self.backward = any(task.phase == "B" for task in schedule.stages[0])

    def carry_out(self) -> Outcome:
        for task in self.schedule.stages[0]:
            if task.phase == "F":
                self._forward(task)
            else:
                self._backward(task)
        loss_sum, count, penalty = self.sums.unbind()
        return Outcome(loss_sum, count, penalty, join_states(self.states))

    def _forward(self, task: Task) -> None:
        entered = self.states[task.slice]
        keep_graph = self.backward and not self.plan.recompute
        if self.backward and task.chunk > 0:
            entered = map_state(entered, lambda t: t.detach().requires_grad_(t.is_floating_point()))
        with torch.set_grad_enabled(keep_graph), self._cast():
            left, root, sums = self._compute(task, entered)
        self.sums += sums
        self.states[task.slice] = left.detach()
        if self.backward:
            self.kept[task.chunk, task.slice] = _Kept(entered, left, root)

    def _backward(self, task: Task) -> None:
        kept = self.kept.pop((task.chunk, task.slice))
        if self.plan.recompute:
            with torch.enable_grad(), self._cast():
                left, root, _ = self._compute(task, kept.entered)
            kept = _Kept(kept.entered, left, root)
        roots: list[Tensor] = []
        gradients: list[Tensor | None] = []
        if kept.root is not None and kept.root.requires_grad:
            roots.append(kept.root)
            gradients.append(self.job.scale.to(kept.root.dtype) if self.job.scale is not None else None)
        handed = self.handed_back.pop(task.slice, None)
        if handed is not None:
            for tensor, gradient in zip(flatten(kept.left), handed, strict=True):
                if gradient is not None and tensor.requires_grad:
                    roots.append(tensor)
                    gradients.append(gradient)
        if roots:
            torch.autograd.backward(roots, gradients)
        if task.chunk > 0:
            self.handed_back[task.slice] = [tensor.grad for tensor in flatten(kept.entered)]

    def _cast(self) -> AbstractContextManager[object]:
        return autocast(self.job.precision, self.job.batch.lengths.device)

    def _compute(self, task: Task, entered: State) -> tuple[State, Tensor | None, Tensor]:
        """Forward of one chunk: the state it leaves, what its backward starts from, and its sums."""
        batch, job = self.batches[task.slice], self.job
        size = self.plan.chunk_steps or batch.steps
        first, end = task.chunk * size, min((task.chunk + 1) * size, batch.steps)
        lengths = (batch.lengths - first).clamp(0, end - first)
        fresh = batch.fresh if task.chunk == 0 else torch.zeros_like(batch.fresh)
        full = batch.real == batch.steps * batch.inputs.shape[1]
        chunk = Chunk(lengths, fresh, batch.lanes, first, job.key, full)
        y, raw, left = self.stage(batch.inputs[first:end], entered, chunk)
        pooled, last = self.stage.pooled, task.chunk == self.schedule.chunks - 1
        loss_sum = count = penalty = torch.zeros((), dtype=torch.float64, device=batch.lengths.device)
        root: Tensor | None = None
        if last or not pooled:
            targets = batch.targets if pooled or batch.targets is None else batch.targets[first:end]
            if job.observe is not None:
                root, count = self._observed(y, left, targets, chunk, count)
            elif targets is not None:
                root, count = self.stage.loss(y, left, targets, chunk)
            if root is not None:
                loss_sum = root.detach()
        if job.alpha or job.beta:
            previous = entered.carries[-1].h[0] if task.chunk > 0 else None
            extra = self.stage.regularize(raw, y, previous, job.alpha, job.beta, lengths)
            penalty = extra.detach()
            root = extra if root is None else root + extra
        return left, root, torch.stack([loss_sum.double(), count.detach().double(), penalty.double()])

    def _observed(self, y: Tensor, left: State, targets: Tensor | None, chunk: Chunk, count: Tensor) -> tuple[Tensor | None, Tensor]:
        """The head's output, shown to the observer, and its loss where there are targets."""
        head = self.stage.head
        with self.stage.scope(chunk):
            out = head(left.acc if self.stage.pooled else y)
        cast(Observer, self.job.observe)(out, targets)
        if targets is None:
            return None, count
        # A user's head may have no `score`: then its loss runs once more from y.
        scored: tuple[Tensor, Tensor] = head.score(out, targets) if hasattr(head, "score") else self.stage.loss(y, left, targets, chunk)
        return scored


def flatten(state: State) -> list[Tensor]:
    """The tensors of a state, in a fixed order."""
    tensors = [tensor for carry in state.carries for tensor in carry]
    return tensors + list(state.acc or ())


def unflatten(tensors: list[Tensor]) -> State:
    """The state of lanes from the tensors of its carries, as `flatten` gives them; without what a pooled head gathers."""
    pairs = zip(tensors[0::2], tensors[1::2], strict=True)
    return State(tuple(Carry(h, c) for h, c in pairs))


def map_state(state: State, change: Callable[[Tensor], Tensor]) -> State:
    """The state with every tensor changed."""
    carries = tuple(type(carry)(change(carry.h), change(carry.c)) for carry in state.carries)
    return State(carries, None if state.acc is None else tuple(change(tensor) for tensor in state.acc))


def split_lanes(batch: Batch, slices: int, *, pooled: bool) -> list[Batch]:
    """Slices of the lanes, as even as can be."""
    if slices == 1:
        return [batch]
    total = batch.lanes.shape[0]
    full = batch.real == batch.steps * total
    parts = []
    for part in range(slices):
        low, high = total * part // slices, total * (part + 1) // slices
        targets = batch.targets
        if targets is not None:
            targets = targets[low:high] if pooled else targets[:, low:high]
        parts.append(
            replace(
                batch,
                inputs=batch.inputs[:, low:high],
                targets=targets,
                lengths=batch.lengths[low:high],
                fresh=batch.fresh[low:high],
                lanes=batch.lanes[low:high],
                sequence=batch.sequence[low:high],
                offset=batch.offset[low:high],
                # Real steps of a slice are not known on the host; -1 makes every lane's length count.
                real=batch.steps * (high - low) if full else -1,
            )
        )
    return parts


def split_state(state: State, slices: int) -> list[State]:
    """The state of each slice of lanes."""
    if slices == 1:
        return [state]
    total = state.carries[0].h.shape[1]
    bounds = [(total * part // slices, total * (part + 1) // slices) for part in range(slices)]
    return [
        State(
            tuple(type(carry)(carry.h[:, low:high], carry.c[:, low:high]) for carry in state.carries),
            None if state.acc is None else tuple(tensor[low:high] for tensor in state.acc),
        )
        for low, high in bounds
    ]


def join_states(states: list[State]) -> State:
    """The state of all lanes, from that of their slices."""
    if len(states) == 1:
        return states[0]
    first = states[0]
    carries = tuple(
        type(carry)(torch.cat([s.carries[i].h for s in states], dim=1), torch.cat([s.carries[i].c for s in states], dim=1))
        for i, carry in enumerate(first.carries)
    )
    accs = [s.acc for s in states if s.acc is not None]
    return State(carries, tuple(torch.cat(parts) for parts in zip(*accs, strict=True)) if accs else None)
