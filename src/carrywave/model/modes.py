"""Switches a model between training and evaluation mode without losing each module's own: a part that is kept in `eval` stays there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from carrywave.model.dropout import refuse_batch_norm


@contextmanager
def mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Put all modules into one mode inside this context; afterwards restore each module's own."""
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, was_training in before:
            module.training = was_training


class TrainingModes:
    """The mode of every module in training, which is the user's choice, and outlasts `model.eval()` for an evaluation of the user's own.

    `train` and `eval` of the whole model set all of its parts, so `model.eval()` forgets which of them were in evaluation mode before. The
    next step needs to know it. If the whole model is in evaluation mode from the start, nothing is known: all parts are trained.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._modules = list(model.modules())  # listed once: a step should not have to walk through the model
        self._norms = [(name, each) for name, each in model.named_modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)]
        self._kept: list[nn.Module] = self._in_eval() if model.training else []  # in evaluation mode at the last step

    def resume(self) -> None:
        """Put the model into training mode, except for the parts that were kept in evaluation mode at the last step."""
        if self.model.training:
            self._kept = self._in_eval()
        else:
            self.model.train()
            for module in self._kept:
                module.training = False
        for name, norm in self._norms:
            refuse_batch_norm(norm, name or "the model")

    def _in_eval(self) -> list[nn.Module]:
        return [module for module in self._modules if not module.training]
