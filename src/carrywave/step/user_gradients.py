"""Gradients without an update, for a user who looks at them or changes them: `Trainer.backward`, then `Trainer.apply`.

Between the two, `.grad` of every parameter that a worker holds is the gradient that a single device would have: of the mean loss over the
real targets of the whole batch, summed over workers, chunks and micro-batches and divided once, neither scaled nor clipped. Several
backwards add up; each is divided by its own number of targets and multiplied by its `weight`.

The tensors in `.grad` are the user's: no later pass overwrites them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from carrywave.errors import UserError
from carrywave.step.result import StepResult
from carrywave.step.trainer_state import Position

Kept = dict[int, Tensor | None]  # what was in `.grad`, by the parameter's id


@dataclass(frozen=True)
class Unapplied:
    """What backwards have left to be applied, besides what is in `.grad`; as in `StepResult`."""

    finite: Tensor  # all of them are
    codes: Tensor  # the first non-finite number in any of them


@dataclass
class UserGradients:
    """Where one trainer is between backward and apply. `held`: every parameter of its worker."""

    held: Collection[nn.Parameter]
    unapplied: Unapplied | None = None
    last: Position | None = None  # before the last backward, since the last update
    lent: bool = False  # True inside `Trainer.evaluation_weights`, where the model has other weights than those that are trained
    _recorded: Kept = field(default_factory=dict)  # what recorded steps keep in `.grad`

    def start(self, now: Position, *, again: bool) -> Position:
        """Where a backward starts from: `again`, from where the last one did."""
        self.check_trained()
        if again and self.last is None:
            raise UserError("again=True repeats the last trainer.backward, but there was none since the last update; remove again")
        return self.last if again and self.last is not None else now

    @contextmanager
    def adding(self, *, recorded: bool) -> Iterator[Kept]:
        """Around a backward: keep what earlier ones left, and put it back if this one fails. `recorded`: there may be recorded steps."""
        if self.unapplied is None and self.last is None and recorded:
            self._recorded = {id(p): p.grad for p in self.held}
        kept: Kept = {} if self.unapplied is None else {id(p): p.grad for p in self.held}
        try:
            yield kept
        except BaseException:
            for parameter in self.held:
                parameter.grad = kept.get(id(parameter))
            raise

    @torch.no_grad()
    def add(self, trained: Iterable[nn.Parameter], kept: Kept, weight: float, result: StepResult, start: Position) -> None:
        """Multiply new gradients by their weight, in tensors of their own, and add those from before."""
        for parameter in trained:
            old = kept.get(id(parameter))
            if parameter.grad is None:
                parameter.grad = old
            else:
                new = parameter.grad * weight
                parameter.grad = new if old is None else new.add_(old)
        for parameter in self.held:
            if not parameter.requires_grad:  # it may be trained again when the gradients are applied
                parameter.grad = kept.get(id(parameter))
        finite, codes = result.finite.clone(), result.codes.clone()
        if self.unapplied is not None:
            finite, codes = finite & self.unapplied.finite, torch.maximum(codes, self.unapplied.codes)
        self.unapplied, self.last = Unapplied(finite, codes), start

    def taken(self) -> tuple[Unapplied, Kept]:
        """What is to be applied now, and the gradients."""
        if self.unapplied is None:
            raise UserError("there is no gradient to apply; call trainer.backward(batch) before trainer.apply()")
        unapplied, self.unapplied, self.last = self.unapplied, None, None
        return unapplied, {id(p): p.grad for p in self.held}

    def drop(self) -> None:
        """Forget the gradients."""
        self.unapplied = None
        for parameter in self.held:
            parameter.grad = None

    def check_applied(self) -> None:
        """Refuse what would lose gradients that wait to be applied, or the weights that are trained."""
        self.check_trained()
        if self.unapplied is not None:
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

    def end(self) -> None:
        """Before a step that is no backward: recorded steps find their gradients where they left them."""
        if self.lent or self.unapplied is not None:
            self.check_applied()
        self.last = None
        if self._recorded:
            for parameter in self.held:
                parameter.grad = self._recorded.get(id(parameter))
            self._recorded = {}

    @contextmanager
    def lending(self, weights: AbstractContextManager[None]) -> Iterator[None]:
        """Use these weights, which are not those that are trained."""
        with weights:
            outer, self.lent = self.lent, True
            try:
                yield
            finally:
                self.lent = outer
