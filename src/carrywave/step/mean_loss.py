"""The mean loss of a model over batches given by the user: a pass without gradients, with a carry of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from carrywave.data.batch import Batch
from carrywave.errors import UserError
from carrywave.kernels import random
from carrywave.model.model import Model
from carrywave.model.modes import mode
from carrywave.model.opaque_model import OpaqueModel
from carrywave.model.stage import Stage
from carrywave.model.state import State
from carrywave.parallel.mesh import Mesh
from carrywave.step.checks.agreement import Agreement
from carrywave.step.checks.arguments import Lanes, check_batches, check_continued
from carrywave.step.checks.trial import SplitTrial
from carrywave.step.passes import executor
from carrywave.step.passes.job import Observer
from carrywave.step.passes.micro_batches import lanes_of
from carrywave.step.worker_setup import local_part


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
        with mode(model, training=False):
            for batch in self._alike([batches] if isinstance(batches, Batch) else batches):
                check_batches([batch], model, keep_state=self.keep_state, gradients=False)
                if self.keep_state:
                    lanes = check_continued(batch, lanes)
                self.trial.before([batch], [random.key(0)], training=False)
                part = local_part(mesh, self.stage, batch, scores=self.stage.has_head, pooled=model.pooled)
                count = part.lanes.shape[0]
                if state is None or not self.keep_state or lanes_of(state, count) != count:
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
