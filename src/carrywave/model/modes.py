"""Switches a model to training or evaluation mode and restores each module's own mode after: a part kept in `eval` stays there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Put all modules into one mode inside this context; afterwards restore each module's own."""
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, own in before:
            module.training = own
