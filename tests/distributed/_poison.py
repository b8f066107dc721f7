"""Bad numbers on purpose: NaN in the loss, in its gradient, in the carry of a layer or in a weight, at chosen steps of a run."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from carrywave.data.batch import Batch
from carrywave.model.stage import Stage
from carrywave.model.state import Chunk, State
from carrywave.step.result import StepResult
from carrywave.step.trainer import Trainer


@contextmanager
def poisoned(how: str, at: Collection[int], *, rank: int = 0, epoch: int = 0, above: float = 0.0) -> Iterator[list[int]]:
    """Within it, steps that begin with these batches of an epoch go wrong on one worker, where the rate is above so much.

    `how`: loss; gradient (of what the head reads); `carry 1` (of layer 1, in lane 0); or the name of a weight, on every worker.
    Gives the list of batches with which steps began, poisoned or not.
    """
    seen: list[int] = []
    active = [False]
    update, loss = Trainer.update, Stage.loss

    def poisoned_update(self: Trainer, *batches: Batch) -> StepResult:
        seen.append(batches[0].step)
        wanted = batches[0].step in at and batches[0].epoch == epoch and float(self.optimizer.param_groups[0]["lr"]) > above
        if wanted and how in dict(self.named):
            with torch.no_grad():
                dict(self.named)[how].view(-1)[0] = math.inf
        if wanted and self.mesh.world.rank == rank:
            part, _, layer = how.partition(" ")
            if part == "carry" and int(layer) in self.stage.layers:
                assert self.state is not None
                self.state.carries[list(self.stage.layers).index(int(layer))].h[:, 0] = math.nan
            active[0] = part in ("loss", "gradient")
        try:
            return update(self, *batches)
        finally:
            active[0] = False

    def poisoned_loss(self: Stage, y: Tensor, state: State, target: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
        if active[0] and how == "gradient":
            y = y * 1.0
            y.register_hook(lambda grad: grad * math.nan)  # type: ignore[no-untyped-call]
        total, count = loss(self, y, state, target, chunk)
        return (total * math.nan if active[0] and how == "loss" else total), count

    Trainer.update, Stage.loss = poisoned_update, poisoned_loss  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        Trainer.update, Stage.loss = update, loss  # type: ignore[method-assign]
