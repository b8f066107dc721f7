"""Training and evaluation mode of a model, and of each module in it: a part that the user keeps in `eval` stays there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """All modules in one mode inside this context; afterwards each is in its own again."""
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, own in before:
            module.training = own
