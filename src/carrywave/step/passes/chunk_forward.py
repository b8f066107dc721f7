"""The forward of one chunk on one stage: what goes to the next stage, the state after it, and, where the head is, what to differentiate.

Knows nothing of schedules and messages; `executor` calls it when a chunk's turn has come.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from carrywave.data.batch import Batch
from carrywave.model import sample_weights
from carrywave.model.opaque_model import OpaqueModel
from carrywave.model.over_time.front import shorter
from carrywave.model.stage import Stage, regularize
from carrywave.model.state import Chunk, State
from carrywave.step.passes.job import Job, Observer


@dataclass(frozen=True)
class ChunkOutcome:
    """What the forward of a chunk came to."""

    y: Tensor  # the output, for the next stage or for whoever scores it
    left: State  # the state after the chunk
    root: Tensor | None = None  # what to differentiate; None: nothing here
    sums: Tensor | None = None  # loss, count and penalty; None without a head: there is nothing to add


@dataclass(frozen=True)
class ChunkForward:
    """The forward of any chunk of a pass."""

    stage: Stage | OpaqueModel
    dtype: torch.dtype  # of messages between stages
    share_head: bool  # the outputs are scored in tasks of their own

    def __call__(
        self, job: Job, batch: Batch, chunk: Chunk, x: Tensor, entered: State, step_range: tuple[int, int], *, last: bool
    ) -> ChunkOutcome:
        """Run the chunk that covers the steps `step_range` of a micro-batch; `last`: it is the last of them."""
        idle = batch.part_of is not None and batch.idle
        if idle and isinstance(self.stage, OpaqueModel) and not self.stage.has_norms:
            # Nothing depends on a placeholder, and a user's module need not be able to read a sequence of no steps.
            return ChunkOutcome(x, entered, sums=torch.zeros(3, dtype=torch.float64, device=batch.lengths.device))
        y, raw, left = self.stage(x, entered, chunk)
        if not self.stage.has_head:
            # The next layer computes in this dtype anyway, so sending a wider one would gain nothing.
            return ChunkOutcome(y.to(self.dtype), left)
        loss_sum = count = penalty = torch.zeros((), dtype=torch.float64, device=batch.lengths.device)
        root: Tensor | None = None
        pooled = self.stage.pooled and batch.resets is None  # with resets, sequences end in any chunk, at any step
        if (last or not pooled) and not self.share_head:
            first, end = step_range
            targets = batch.targets if pooled or batch.targets is None else batch.targets[first:end]
            if job.observe is not None:
                root, count = self._observed(job.observe, y, left, targets, chunk, count, batch)
            elif targets is not None and not idle:
                known = targets if torch.is_grad_enabled() else sample_weights.known(targets)
                root, count = self.stage.loss(y, left, known, chunk)
            if root is not None:
                loss_sum = root.detach()
        if idle and self.stage.has_norms and torch.is_grad_enabled():  # norms of other workers wait for this one in backward, too
            root = torch.stack([0.0 * tensor.sum() for tensor in tree_leaves(y)]).sum()
        if job.alpha or job.beta:
            lengths = None if chunk.lengths is None else shorter(chunk.lengths, self.stage.stride)
            extra = regularize(raw, y, entered.tail, job.alpha, job.beta, lengths, job.per_change, chunk.resets)
            left = self.with_tail(job, raw, left)
            penalty = extra.detach()
            root = extra if root is None else root + extra
        y = y.to(self.dtype) if self.share_head else y
        return ChunkOutcome(y, left, root, torch.stack([loss_sum.double(), count.detach().double(), penalty.double()]))

    def with_tail(self, job: Job, raw: Tensor, left: State) -> State:
        """The state after a chunk, with its last output where the penalty on changes of the output needs it."""
        if not self.stage.has_head or not (job.alpha or job.beta):
            return left
        return left._replace(tail=raw[-1] if job.beta else None)

    def _observed(
        self, observe: Observer, y: Tensor, left: State, targets: Tensor | None, chunk: Chunk, count: Tensor, batch: Batch
    ) -> tuple[Tensor | None, Tensor]:
        """Pass the head's output to the observer, and return its loss and count if there are targets."""
        out = self.stage.output(y, left, chunk)
        pooled = self.stage.pooled and batch.resets is None
        observe(out, sample_weights.seen(targets, chunk.weights, pooled=pooled), batch.sequence, batch.offset + chunk.start)
        return (None, count) if targets is None or batch.idle else self.stage.score(out, y, left, sample_weights.known(targets), chunk)
