"""Gradients without an update, for a user who looks at them or changes them: `Trainer.backward`, then `Trainer.apply`.

Between the two, `.grad` of every parameter that a worker holds is the gradient that a single device would have: of the mean loss over the
real targets of the whole batch, summed over workers, chunks and micro-batches and divided once, neither scaled nor clipped. Several
backwards add up; each is divided by its own number of targets and multiplied by its `weight`.

The tensors in `.grad` are the user's: no later pass overwrites them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from carrywave.data.batch import Batch
from carrywave.errors import UserError
from carrywave.model.state import State
from carrywave.parallel.world import raise_on_all
from carrywave.step.passes.profiler_ranges import span
from carrywave.step.update import StepResult

if TYPE_CHECKING:
    from carrywave.step.trainer import Trainer


@dataclass(frozen=True)
class Pending:
    """What backwards have left to be applied, besides what is in `.grad`. Both as in `StepResult`."""

    sound: Tensor  # of all of them
    codes: Tensor  # the first non-finite number in any of them


@dataclass(frozen=True)
class Position:
    """Where a trainer stood before a pass: what decides its carry and its random keys."""

    state: State | None
    lanes: tuple[int, ...] | None
    uncounted: int


@dataclass
class UserGradients:
    """Where one trainer is between backward and apply."""

    pending: Pending | None = None
    last: Position | None = None  # before the last backward, since the last update
    lent: bool = False  # True inside `Trainer.evaluation_weights`, where the model has other weights than those that are trained
    _captured: dict[int, Tensor | None] = field(default_factory=dict)  # what captured steps keep in `.grad`, by the parameter's id

    def backward(self, trainer: Trainer, batches: Sequence[Batch], weight: float, *, again: bool) -> StepResult:
        """One pass over these batches; its gradient is added to what earlier ones left in `.grad`."""
        self.check_trained()
        if trainer.sync is not None:
            raise UserError(f"train.sync={trainer.spec.sync} exchanges weights after whole steps; use trainer.step, or train.sync=step")
        if again and self.last is None:
            raise UserError("again=True repeats the last trainer.backward, but there was none since the last update; remove again")
        if self.last is not None and again:
            trainer.state, trainer.lanes, trainer.uncounted = self.last.state, self.last.lanes, self.last.uncounted
        before = Position(trainer.state, trainer.lanes, trainer.uncounted)
        held = list(trainer.held.parameters.values())
        if self.pending is None and self.last is None and trainer.capture is not None:
            self._captured = {id(p): p.grad for p in held}
        kept = {id(p): p.grad for p in held if p.grad is not None} if self.pending is not None else {}
        try:
            result = trainer.run(batches, applies=False)
        except BaseException:
            for parameter in held:
                parameter.grad = kept.get(id(parameter))
            raise
        _add([p for _, p in trainer.named], kept, weight)
        for parameter in held:
            if not parameter.requires_grad:  # it may be trained again when the gradients are applied
                parameter.grad = kept.get(id(parameter))
        sound, codes = result.sound.clone(), result.codes.clone()
        if self.pending is not None:
            sound, codes = sound & self.pending.sound, torch.maximum(codes, self.pending.codes)
        self.pending, self.last = Pending(sound, codes), before
        return result

    def apply(self, trainer: Trainer) -> StepResult:
        """Clip what is in `.grad`, and update."""
        self.check_trained()
        with raise_on_all(trainer.mesh.world):
            if self.pending is None:
                raise UserError("there is no gradient to apply; call trainer.backward(batch) before trainer.apply()")
        pending = self.pending
        self.pending = self.last = None
        kept = {id(p): p.grad for p in trainer.held.parameters.values()}
        trainer.follow()
        for parameter in trainer.held.parameters.values():
            parameter.grad = kept[id(parameter)] if parameter.requires_grad else None
        with span("update"), trainer.hooks.put_off():
            return trainer.engine.update.apply(pending.sound, pending.codes)

    def drop(self, trainer: Trainer) -> None:
        """Forget the gradients."""
        self.pending = None
        for parameter in trainer.held.parameters.values():
            parameter.grad = None

    def check_applied(self) -> None:
        """Refuse what would lose gradients that wait to be applied, or the weights that are trained."""
        self.check_trained()
        if self.pending is not None:
            raise UserError(
                "gradients of trainer.backward have not been applied; call trainer.apply(), or trainer.zero_grad() to drop them"
            )

    def check_trained(self) -> None:
        """Refuse to train or save weights that are only there to be evaluated."""
        if self.lent:
            raise UserError(
                "inside trainer.evaluation_weights() the model has other weights than those that are trained; step, backward, apply, "
                "state_dict and load_state_dict belong outside of it, and trainer.gathered() gives the weights that it has"
            )

    def end(self, trainer: Trainer) -> None:
        """Before a step that is no backward: captured steps find their gradients where they left them."""
        self.check_applied()
        self.last = None
        if self._captured:
            for parameter in trainer.held.parameters.values():
                parameter.grad = self._captured.get(id(parameter))
            self._captured = {}


@torch.no_grad()
def _add(parameters: Sequence[nn.Parameter], kept: dict[int, Tensor], weight: float) -> None:
    """Multiply new gradients by their weight, in tensors of their own, and add those from before."""
    for parameter in parameters:
        old = kept.get(id(parameter))
        if parameter.grad is None:
            parameter.grad = old
        else:
            new = parameter.grad * weight
            parameter.grad = new if old is None else new.add_(old)
