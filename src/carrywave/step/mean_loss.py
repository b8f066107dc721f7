"""Computes the mean loss of a trainer's model over batches given by the user: a pass without gradients, with a separate carry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from carrywave.data.batch import Batch
from carrywave.errors import UserError
from carrywave.kernels import random
from carrywave.model.modes import mode
from carrywave.model.state import State
from carrywave.step.checks.arguments import Lanes, check_batches, check_continued
from carrywave.step.passes import executor
from carrywave.step.passes.job import BatchOutcome, Observer
from carrywave.step.passes.micro_batches import lanes_of
from carrywave.step.trainer_view import TrainerView
from carrywave.step.worker_setup import local_part


@torch.no_grad()
def mean_loss(trainer: TrainerView, batches: Iterable[Batch], observe: Callable[[Tensor, Tensor | None], None] | None) -> float:
    """The mean loss over the real targets of all batches; the same on every worker."""
    model, mesh = trainer.model, trainer.mesh
    see: Observer | None = None if observe is None else lambda out, target, *_: observe(out, target)
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    state: State | None = None
    lanes: Lanes | None = None
    with mode(model, training=False):
        for batch in _alike(trainer, [batches] if isinstance(batches, Batch) else batches):
            check_batches([batch], model, keep_state=trainer.keep_state, gradients=False)
            if trainer.keep_state:
                lanes = check_continued(batch, lanes)
            trainer.evaluation_trial.before([batch], [random.key(0)], training=False)
            local_batch = local_part(mesh, trainer.stage, batch, scores=trainer.stage.has_head, pooled=model.pooled)
            try:
                outcome = _forward(trainer, local_batch, state, see)
            except BaseException as error:
                trainer.broke_off(error)
                raise
            sums += torch.stack([outcome.loss_sum, outcome.count])
            state = outcome.state
    loss_sum, count = mesh.sum_(sums).tolist()
    if not count:
        raise UserError("the batches contain no targets; pass batches with targets")
    return float(loss_sum / count)


def _forward(trainer: TrainerView, batch: Batch, state: State | None, observe: Observer | None) -> BatchOutcome:
    stage, mesh, lanes = trainer.stage, trainer.mesh, batch.lanes.shape[0]
    if state is None or not trainer.keep_state or lanes_of(state, lanes) != lanes:
        state = stage.start(lanes, mesh.device).detach()
    uncut_time, precision = trainer.model.reads_whole, trainer.spec.precision
    return executor.forward(stage, mesh, batch, state, uncut_time=uncut_time, precision=precision, observe=observe)


def _alike(trainer: TrainerView, batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield each batch once all workers are known to have the same one; they must also run out of batches together."""
    for batch in batches:
        trainer.agreement.same_batch(batch)
        yield batch
    trainer.agreement.same_batch(None)
