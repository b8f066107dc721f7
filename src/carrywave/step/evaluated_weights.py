"""The weights with which a trainer evaluates, where these are not the parameters that it trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from carrywave.errors import UserError
from carrywave.parallel.world import raise_on_all
from carrywave.step.optim import weight_average
from carrywave.step.worker_setup import tensors_of

if TYPE_CHECKING:
    from carrywave.step.trainer import Trainer


def evaluation_weights(trainer: Trainer, of: nn.Module | None) -> AbstractContextManager[None]:
    """A context inside which the parameters have the values to be evaluated, as `Trainer.evaluation_weights` describes."""
    if of is not None:
        return _lent(trainer, _taken_from(of, trainer))
    if trainer.sync is not None:
        return _lent(trainer, trainer.sync.swapped())
    if trainer.user_optimizer or not weight_average.averaged(trainer.optimizer):
        return nullcontext()  # torch's ASGD has averages in its state that are the user's business
    return _lent(trainer, weight_average.swapped(trainer.optimizer))


@contextmanager
def _lent(trainer: Trainer, weights: AbstractContextManager[None]) -> Iterator[None]:
    """Use these weights, and have the trainer know that they are not those that it trains."""
    with weights:
        outer, trainer.user_gradients.lent = trainer.user_gradients.lent, True
        try:
            yield
        finally:
            trainer.user_gradients.lent = outer


@contextmanager
def _taken_from(other: nn.Module, trainer: Trainer) -> Iterator[None]:
    """Use the parameters and buffers of a copy of the model. Collective: every rank must enter it."""
    held = trainer.parameters()
    with raise_on_all(trainer.mesh.world):
        if trainer.sync is not None or (not trainer.user_optimizer and weight_average.averaged(trainer.optimizer)):
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


def _given(other: nn.Module, held: dict[str, Tensor]) -> dict[str, Tensor]:
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
