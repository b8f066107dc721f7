"""Evaluating with the weights of a copy of the model, such as torch's `AveragedModel`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from carrywave.errors import UserError
from carrywave.parallel.world import World, raise_on_all
from carrywave.step.worker_setup import tensors_of


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
