"""What heads share: sums of losses and counts of targets."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

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


def score_classes(logits: Tensor, target: Tensor, weights_V: Tensor | None, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Summed cross entropy, and the number of real targets or the sum of their class weights: the quotient equals torch's mean."""
    target = target.reshape(-1)
    total = cross_entropy.summed(logits.reshape(-1, logits.shape[-1]), target, IGNORED, weights_V, smoothing)
    real = target != IGNORED
    if weights_V is None:
        return total, real.sum().to(total.dtype)
    return total, torch.where(real, weights_V.to(total.dtype)[target.clamp(min=0)], 0.0).sum()


def score_labels(logits: Tensor, target: Tensor, weights_V: Tensor | None, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Binary cross entropy, summed over all labels whose target is present, and the number of steps or sequences that have any.

    `weights_V` are those of targets that are 1, torch's `pos_weight`. With `smoothing`, half of it is taken from ones and given to zeros.
    """
    logits = at_least_float32(logits)
    real = torch.isfinite(target)
    wanted = torch.where(real, target.to(logits.dtype), 0.0)
    wanted = wanted + smoothing * (0.5 - wanted) if smoothing else wanted
    positive = None if weights_V is None else weights_V.to(logits.dtype)
    errors = binary_cross_entropy_with_logits(logits, wanted, pos_weight=positive, reduction="none")
    return torch.where(real, errors, 0.0).sum(), real.any(dim=-1).sum().to(logits.dtype)


def score_numbers(out: Tensor, target: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Element-wise error, 0 where the target is missing, and a mask of the targets that are present."""
    out = at_least_float32(out)
    real = torch.isfinite(target)
    # Masked before the square: masked after it, the gradient would be 0 · NaN.
    gap = torch.where(real, out - target.to(out.dtype), 0.0)
    return (gap.square() if kind == "mse" else gap.abs()), real


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
