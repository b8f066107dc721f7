"""Checks, while a step runs, that its loss depends on no parameters outside the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from carrywave.model.foreign_parameters import Audit
from carrywave.model.model import Model
from carrywave.model.opaque_model import OpaqueModel
from carrywave.model.stage import Stage


@contextmanager
def audited(stage: Stage | OpaqueModel, model: Model | OpaqueModel) -> Iterator[None]:
    """Look at everything that is computed inside this context."""
    loss: Any = model.given_loss if isinstance(model, OpaqueModel) else getattr(model.head, "loss", None)
    stage.audit = Audit(model, lambda: loss)
    try:
        yield
    finally:
        stage.audit = None
