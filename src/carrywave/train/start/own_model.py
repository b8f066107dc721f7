"""The user's own model: given, or built by a function from the facts of the data; checked before anything is trained."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from carrywave.errors import SpecError, UserError
from carrywave.model.model import Model
from carrywave.model.opaque_model import Loss, OpaqueModel
from carrywave.spec.facts import DataFacts
from carrywave.spec.spec import Spec
from carrywave.step.checks.arguments import check_loss
from carrywave.step.worker_setup import check_saved_whole, check_uncut

Own = nn.Module | Callable[[DataFacts], nn.Module]  # a model of the user's own, or a function that builds one once the data is known


def own_model(user_model: Own | OpaqueModel, spec: Spec, facts: DataFacts, loss: Loss | None) -> Model | OpaqueModel:
    """The user's own model, built if a function builds it, and checked."""
    model: object = user_model
    if not isinstance(user_model, Model | OpaqueModel):
        # Seeded, and isolated from the caller's random state: equal calls give equal weights.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(spec.train.seed)
            model = user_model(facts)
            check_loss(loss, model)
    if isinstance(model, nn.Module) and not isinstance(model, Model | OpaqueModel):
        model = OpaqueModel(model, loss, pooled=spec.pooled)
    if not isinstance(model, Model | OpaqueModel):
        raise UserError(f"the function that builds the model returned a {type(model).__name__}; return a cw.Model(encoder, lstm, head)")
    check_saved_whole(model)
    if isinstance(model, Model) and model.lstm.bidirectional and spec.streams:
        raise SpecError(
            "the model is bidirectional, but a stream cannot be read backwards; set batch.tokens to train on separate sequences"
        )
    check_uncut(model, spec.plan_spec.chunk_steps)
    if isinstance(model, Model) and model.has_front and spec.streams:
        raise SpecError("the front reads whole sequences, but a stream is read in windows; set batch.tokens to train on sequences")
    if isinstance(model, Model) and model.whole_head and spec.streams:
        name = type(model.head).__name__
        raise SpecError(f"the head {name} reads whole sequences, but a stream is read in windows; set batch.tokens to train on sequences")
    return model
