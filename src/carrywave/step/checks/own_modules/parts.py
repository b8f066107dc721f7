"""The modules of a stage that may be a user's own: how to run each by itself, and what is known of it from its class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import nn

from carrywave.model.opaque_model import OpaqueModel
from carrywave.model.recurrent import Recurrent
from carrywave.model.stage import Stage
from carrywave.step.checks.own_modules.module_runs import Run, encoder, head, layers, piecewise
from carrywave.step.checks.own_modules.stepwise import stepwise

VOUCHED = "splittable"  # an attribute that a user sets on an encoder, a head or a module in one piece: it is not tried


class Part(NamedTuple):
    """A module that may be a user's own: its path, a way to run it by itself, and what runs with it, by name."""

    path: str
    root: nn.Module
    run: Run
    beside: Mapping[str, object]


def parts_of(stage: Stage | OpaqueModel) -> Iterator[Part]:
    """The modules that may be a user's own and that this worker runs."""
    if isinstance(stage, OpaqueModel):
        yield Part("module", stage.module, piecewise(stage, "module"), stage.separate_loss)
        return
    if stage.encoder is not None:
        yield Part("encoder", stage.encoder, encoder(stage.encoder, "encoder"), {})
    if stage.layers:
        yield Part("lstm", stage.lstm, layers(stage.lstm, "lstm", stage.layers, stage.width_in or stage.lstm.input_size), {})
    if stage.has_head:  # other stages may share its work, with the same module
        before = None if stage.encoder is None or is_safe(stage, stage.encoder) else stage.encoder
        run = head(stage.head, "head", pooled=stage.pooled, whole=stage.whole_head, before=before)
        yield Part("head", stage.head, run, {} if before is None else {"encoder": before})


def is_safe(stage: Stage | OpaqueModel, module: nn.Module) -> bool:
    """True if a module need not be tried: its owner vouches for it, or it is known."""
    return getattr(module, VOUCHED, False) is True or is_known(stage, module)


def is_known(stage: Stage | OpaqueModel, module: nn.Module) -> bool:
    """True for a module that treats every step of every lane independently. The loss of a `OpaqueModel` may be any function."""
    own_cell = isinstance(module, Recurrent) and not module.cell.step.__module__.startswith("carrywave.")
    return stepwise(module) and not isinstance(stage, OpaqueModel) and not own_cell


def known(root: nn.Module, path: str) -> Iterator[tuple[str, bool]]:
    """Yield faults known from the module's class and options: the message, and whether it is an error even on one device."""
    for name, module in root.named_modules(prefix=path):
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        what = f"{name} is an {type(module).__name__} with"
        if module.sparse:
            yield f"{what} sparse=True, but gradients are summed as dense tensors here; remove it", True
        if module.max_norm is not None:
            yield f"{what} max_norm={module.max_norm:g}, which shortens only the rows that a worker happens to read; remove it", False
        if module.scale_grad_by_freq:
            yield f"{what} scale_grad_by_freq, which counts words only in the part that a worker happens to hold; remove it", False
