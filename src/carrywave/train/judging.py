"""The mean loss of a trainer's model over batches that a user gives: a pass without gradients, with a carry of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from carrywave.data.batch import Batch
from carrywave.errors import UserError
from carrywave.model.modes import mode
from carrywave.model.state import State
from carrywave.parallel import pipeline
from carrywave.train.given import check_batches

if TYPE_CHECKING:
    from carrywave.train.trainer import Trainer


@torch.no_grad()
def mean_loss(trainer: Trainer, batches: Iterable[Batch], observe: pipeline.Observer | None) -> float:
    """Over the real targets of all batches, the same on every worker."""
    model, stage, mesh = trainer.model, trainer.stage, trainer.mesh
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    state: State | None = None
    with mode(model, training=False):
        for batch in _alike(trainer, [batches] if isinstance(batches, Batch) else batches):
            check_batches([batch], model, keep_state=trainer.keep_state)
            own = trainer.own_part(batch, scores=stage.has_head)
            lanes = own.lanes.shape[0]
            if state is None or not trainer.keep_state or (state.carries and state.carries[0].h.shape[1] != lanes):
                state = stage.start(lanes, mesh.device).detach()
            program = pipeline.program_for(mesh.plan, [own], backward=False, whole=model.reads_whole)
            job = pipeline.Job(own, state, precision=trainer.spec.precision, observe=observe)
            [outcome] = pipeline.run(stage, mesh.plan, program, [job], mesh.links, place=mesh.stage)
            sums += torch.stack([outcome.loss_sum, outcome.count])
            state = outcome.state
    loss_sum, count = mesh.sum_(sums).tolist()
    if not count:
        raise UserError("the batches hold no target to judge by; give some with targets")
    return float(loss_sum / count)


def _alike(trainer: Trainer, batches: Iterable[Batch]) -> Iterator[Batch]:
    """The batches, each as soon as all workers are seen to have the same; they must also end together."""
    for batch in batches:
        trainer.agreement.same_batch(batch)
        yield batch
    trainer.agreement.same_batch(None)
