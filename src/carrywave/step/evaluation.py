"""Evaluation in a user's own loop: the mean loss over batches, a pass without gradients with a carry of its own; and evaluating with the
weights of a copy of the model, such as torch's `AveragedModel`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from carrywave.data.batch import Batch
from carrywave.errors import UserError
from carrywave.kernels import random
from carrywave.model.model import Model
from carrywave.model.modes import mode
from carrywave.model.opaque_model import OpaqueModel
from carrywave.model.stage import Stage
from carrywave.model.state import State
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.world import World, raise_on_all
from carrywave.step.checks.agreement import Agreement
from carrywave.step.checks.batches import BatchChecks, Lanes, check_continued
from carrywave.step.checks.trial import SplitTrial
from carrywave.step.passes import executor
from carrywave.step.passes.jobs import Observer
from carrywave.step.worker_setup import local_part, tensors_of


@dataclass(frozen=True)
class MeanLoss:
    """The evaluation of one worker's stage."""

    model: Model | OpaqueModel
    stage: Stage | OpaqueModel
    mesh: Mesh
    precision: str
    keep_state: bool
    agreement: Agreement
    trial: SplitTrial

    @torch.no_grad()
    def __call__(
        self,
        batches: Iterable[Batch],
        observe: Callable[[Tensor, Tensor | None], None] | None,
        broke_off: Callable[[BaseException], None],
    ) -> float:
        """The mean loss over the real targets of all batches; the same on every worker. `broke_off`: told of an error in the middle of what
        other workers wait for.
        """
        model, mesh = self.model, self.mesh
        see: Observer | None = None if observe is None else lambda out, target, *_: observe(out, target)
        sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
        state: State | None = None
        lanes: Lanes | None = None
        check = BatchChecks(model, keep_state=self.keep_state, gradients=False)
        with mode(model, training=False):
            for batch in self._alike([batches] if isinstance(batches, Batch) else batches):
                check([batch])
                if self.keep_state:
                    lanes = check_continued([batch], lanes)
                self.trial.before([batch], [random.key(0)], training=False)
                part = local_part(mesh, self.stage, batch, scores=self.stage.has_head, pooled=model.pooled)
                count = part.lanes.shape[0]
                if state is None or not self.keep_state or (state.carries and state.carries[0][0].shape[1] != count):
                    state = self.stage.start(count, mesh.device).detach()
                uncut_time, precision = model.reads_whole, self.precision
                try:
                    outcome = executor.forward(self.stage, mesh, part, state, uncut_time=uncut_time, precision=precision, observe=see)
                except BaseException as error:
                    broke_off(error)
                    raise
                sums += outcome.sums[:2]
                state = outcome.state
        loss_sum, number = mesh.sum_(sums).tolist()
        if not number:
            raise UserError("the batches contain no targets; pass batches with targets")
        return float(loss_sum / number)

    def _alike(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield each batch once all workers are known to have the same one; they must also run out of batches together."""
        for batch in batches:
            self.agreement.same_batch(batch)
            yield batch
        self.agreement.same_batch(None)


@contextmanager
def taken_from(other: nn.Module, held: Mapping[str, Tensor], world: World, *, has_average: bool) -> Iterator[None]:
    """Use the parameters and buffers of a copy of the model. `has_average`: the trainer has weights of its own to evaluate. Collective:
    every rank must enter it.
    """
    with raise_on_all(world):
        if has_average:
            raise UserError("this trainer evaluates with weights of its own (train.ema, ntasgd or train.sync); use these, without a copy")
        given = _given(other, held)
    with torch.no_grad():
        kept = {name: tensor.clone() for name, tensor in held.items()}
        for name, tensor in held.items():
            tensor.copy_(given[name])
    try:
        yield
    finally:
        with torch.no_grad():
            for name, tensor in held.items():
                tensor.copy_(kept[name])


def _given(other: nn.Module, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of another module, which must be those that this worker holds of the model."""
    given = tensors_of(other.module if isinstance(other, AveragedModel) else other)
    for name, tensor in held.items():
        theirs = given.get(name)
        if theirs is None or theirs.shape != tensor.shape:
            problem = f"no {name}" if theirs is None else f"{name} of shape {list(theirs.shape)}, expected {list(tensor.shape)}"
            raise UserError(f"the module whose weights are to be used has {problem}; pass a copy of trainer.model made after the Trainer")
        if theirs.is_meta:
            raise UserError(f"the copy of the model has no values for {name}; make it from trainer.model on the same worker")
    return given
