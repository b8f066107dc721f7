"""What happens to gradients between backward and update: one division, the global norm, clipping.

Nothing here reads a value on the host, so a step can run ahead of the device or be captured. The norm is split into its
square and the root: replicas reduce gradients before `divide_`, stages add up their squares before the root.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def divide_(grads: Sequence[Tensor], count: Tensor) -> None:
    """Divide summed gradients once by the global number of real targets; no target at all gives zero."""
    if not grads:
        return
    # A finite gradient divided by infinity is zero, and one that is not finite still shows as NaN.
    divisor = torch.where(count > 0, count.to(torch.float64), torch.inf)
    for part in by_dtype(grads):
        torch._foreach_div_(part, divisor.to(part[0].device, part[0].dtype))


@torch.no_grad()
def norm_squared(grads: Sequence[Tensor]) -> Tensor:
    """Sum of the squares of all elements, a float64 scalar: additive over stages, and safe from overflow in the sum."""
    norms = [
        norm.to(torch.float64)
        for part in by_dtype(grads)
        for norm in torch._foreach_norm(part, 2, torch.promote_types(part[0].dtype, torch.float32))
    ]
    return torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64)


def global_norm(grads: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all gradients taken as one vector, a float64 scalar."""
    return norm_squared(grads).sqrt()


@torch.no_grad()
def clip_(grads: Sequence[Tensor], norm: Tensor, limit: float) -> None:
    """Scale gradients down where their global norm is over the limit."""
    if not grads:
        return
    # The small term is torch.nn.utils.clip_grad_norm_'s, so that both clip by the same factor.
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    for part in by_dtype(grads):
        torch._foreach_mul_(part, factor.to(part[0].device, part[0].dtype))


def by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Tensors in groups of one dtype, which the foreach operations fuse; the order within a group is kept."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())
