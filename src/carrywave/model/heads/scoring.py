"""What heads share: sums of losses and counts of targets, and the weights of single targets.

A batch has one weight for each lane, [B], or for each step, [T, B, …]: the first dimensions of the targets. A head with a result for each
step reads [T, B, …], where that of a lane holds for each of its steps; one that pools or reads whole sequences reads [B].
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from carrywave.data.sequences import UNSEEN
from carrywave.errors import UserError
from carrywave.kernels import cross_entropy
from carrywave.kernels.deferred_gradients import linear

IGNORED = -100  # an integer target that does not count


def at_least_float32(x: Tensor) -> Tensor:
    """x, upcast to float32 if its dtype is narrower, as under autocast."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def numbers(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Like torch's `linear`, but in the dtype of the weights under autocast too: a number that is an answer is not rounded to 8 bits."""
    with torch.autocast(x.device.type, enabled=False):
        return linear(x.to(weight.dtype), weight, bias)


def weighted(values: Tensor, weights: Tensor | None) -> Tensor:
    """Values times the weights of their targets; weights lack the last dimensions of values in which they do not differ."""
    return values if weights is None else values * weights.to(values.dtype).reshape(*weights.shape, *[1] * (values.dim() - weights.dim()))


def keyword(weights: Tensor | None) -> dict[str, Tensor]:
    """The weights by the name of an argument, and nothing if there are none: a score of a user's own then need not take them."""
    return {} if weights is None else {"weights": weights}


def weighted_targets(target: Tensor, weights: Tensor | None) -> Tensor:
    """Targets, missing where their weight is 0: whatever is computed there, even what is not finite, must not reach the loss."""
    if weights is None:
        return target
    none = (weights == 0).reshape(*weights.shape, *[1] * (target.dim() - weights.dim()))
    return torch.where(none, torch.nan if target.is_floating_point() else IGNORED, target)


def count_of(real: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The number of targets that are present, as the mask `real` has them, or the sum of their weights."""
    return real.sum().to(dtype) if weights is None else weighted(real.to(torch.promote_types(dtype, weights.dtype)), weights).sum()


def score_classes(
    logits: Tensor, target: Tensor, weights_V: Tensor | None, smoothing: float = 0.0, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Summed cross entropy, and the number of real targets or the sum of their weights: with those of classes, the quotient equals torch's
    mean. `weights` are those of each target.
    """
    target = weighted_targets(target, weights).reshape(-1)
    weights = None if weights is None else weights.reshape(-1)
    total = cross_entropy.summed(logits.reshape(-1, logits.shape[-1]), target, IGNORED, weights_V, smoothing, weights)
    real = target != IGNORED
    if weights_V is None:
        return total, count_of(real, weights, total.dtype)
    return total, weighted(torch.where(real, weights_V.to(total.dtype)[target.clamp(min=0)], 0.0), weights).sum()


def score_labels(
    logits: Tensor, target: Tensor, weights_V: Tensor | None, smoothing: float = 0.0, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Binary cross entropy, summed over all labels whose target is present, and the number of steps or sequences that have any, or the sum
    of their `weights`.

    `weights_V` are those of targets that are 1, torch's `pos_weight`. With `smoothing`, half of it is taken from ones and given to zeros.
    """
    logits = at_least_float32(logits)
    target = weighted_targets(target, weights)
    real = torch.isfinite(target)
    wanted = torch.where(real, target.to(logits.dtype), 0.0)
    wanted = wanted + smoothing * (0.5 - wanted) if smoothing else wanted
    positive = None if weights_V is None else weights_V.to(logits.dtype)
    errors = binary_cross_entropy_with_logits(logits, wanted, pos_weight=positive, reduction="none")
    return weighted(torch.where(real, errors, 0.0), weights).sum(), count_of(real.any(dim=-1), weights, logits.dtype)


def score_numbers(out: Tensor, target: Tensor, kind: str, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Element-wise error times its weight, 0 where the target is missing, and a mask of the targets that are present."""
    out = at_least_float32(out)
    target = weighted_targets(target, weights)
    real = torch.isfinite(target)
    # Masked before the square: masked after it, the gradient would be 0 · NaN.
    gap = torch.where(real, out - target.to(out.dtype), 0.0)
    return weighted(gap.square() if kind == "mse" else gap.abs(), weights), real


def check_loss(kind: str) -> str:
    """Return a loss for numbers if it is known, otherwise raise."""
    if kind not in ("mse", "mae"):
        raise UserError(f"loss={kind} is unknown; use mse or mae")
    return kind


def class_weights(weights: Tensor | None, classes: int) -> Tensor | None:
    """Check class weights against the number of classes, and copy them to float32."""
    if weights is not None and (weights.shape != (classes,) or not bool((torch.isfinite(weights) & (weights >= 0)).all())):
        raise UserError(f"class weights {weights.tolist()} do not match {classes} classes; pass one finite number >= 0 for each")
    return None if weights is None else weights.detach().clone().float()


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
