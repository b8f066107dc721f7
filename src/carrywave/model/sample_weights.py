"""Weights of single targets: what a loss is given of them, and losses that take none.

A batch has one weight for each lane, [B], or for each step, [T, B, …]: the first dimensions of the targets. A head with a result for each
step reads [T, B, …], where that of a lane holds for each of its steps; one that pools or reads whole sequences reads [B].
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from carrywave.data.sequences import UNSEEN
from carrywave.errors import UserError
from carrywave.model.heads.scoring import IGNORED, weighted_targets


def check_weights(weights: Tensor, loss: Any, whose: str, *, by_lane: bool) -> None:
    """Refuse weights beside a loss that takes none, and those of steps where it has a target for each lane (`by_lane`)."""
    parameters = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).parameters
    if "weights" not in parameters and all(each.kind is not inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        raise UserError(
            f"the batch has weights, but the loss of {whose} takes none; give it a keyword weights=None, which multiply the losses of the "
            "targets and are what is counted, or remove the weights"
        )
    if by_lane and weights.dim() != 1:
        fact = f"the weights are {list(weights.shape)}, but {whose} scores each lane as a whole"
        raise UserError(f"{fact}; pass one for each, [lane], or in files a number for each row instead of a list")


def for_each_target(weights: Tensor, targets: Tensor, *, pooled: bool) -> Tensor:
    """Weights [B] or [T, B, …] as those of targets: [B] if there is one for each lane (`pooled`), [T, B, …] otherwise."""
    return weights if pooled or weights.dim() > 1 else weights.expand(targets.shape[:2])


def known(targets: Tensor) -> Tensor:
    """The targets that have a loss: labels that train does not have are missing."""
    return targets if targets.is_floating_point() else torch.where(targets <= UNSEEN, IGNORED, targets)


def seen(targets: Tensor | None, weights: Tensor | None, *, pooled: bool) -> Tensor | None:
    """The targets that metrics are to see: those of weight 0 are missing."""
    if targets is None or weights is None:
        return targets
    with torch.no_grad():
        return weighted_targets(targets, for_each_target(weights, targets, pooled=pooled))
