"""Arithmetic on gradients between backward and update: norms, the factor that divides and clips, and scaling.

Nothing here reads a value on the host, so a step can run ahead of the device or be captured. Gradients are sums over targets. The norm is
computed as a sum of squares and a root, so that stages can add up their squares. Division by the global count and clipping are combined
into one factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T", bound=Tensor)


@torch.no_grad()
def norms(tensors: Sequence[Tensor]) -> Tensor:
    """The norm of each tensor, ordered by dtype as in `by_dtype`; in float64, so that squares do not overflow."""
    by_group = [
        torch.stack(list(torch._foreach_norm(part, 2, torch.promote_types(part[0].dtype, torch.float32)))).to(torch.float64)
        for part in by_dtype(tensors)
    ]
    return by_group[0] if len(by_group) == 1 else torch.cat(by_group) if by_group else torch.zeros(0, dtype=torch.float64)


@torch.no_grad()
def norm_of_each(tensors: Sequence[Tensor]) -> Tensor:
    """The norm of each tensor, in the given order; finite if all of its elements are."""
    all_norms, groups = norms(tensors), by_dtype(tensors)
    if len(groups) <= 1:
        return all_norms
    by_id = dict(zip((id(tensor) for group in groups for tensor in group), all_norms.unbind(), strict=True))
    return torch.stack([by_id[id(tensor)] for tensor in tensors])


def norm_of_mean(squared: Tensor, count: Tensor) -> Tensor:
    """The gradient norm of the mean loss, from the squared gradient norm of the summed loss; zero if there are no targets."""
    return squared.sqrt() / torch.where(count > 0, count, torch.inf)


def factor(norm: Tensor, count: Tensor, limit: float | None) -> Tensor:
    """The factor for a summed gradient: one over the count, reduced further if the norm of the mean exceeds the limit."""
    # Dividing by infinity turns a finite gradient into zero and a non-finite one into NaN, so that it still shows.
    mean = 1.0 / torch.where(count > 0, count, torch.inf)
    # The epsilon is that of torch.nn.utils.clip_grad_norm_, so that both clip by the same factor.
    return mean if limit is None else mean * (limit / (norm + 1e-6)).clamp(max=1.0)


@torch.no_grad()
def scale_(grads: Sequence[Tensor], by: Tensor) -> None:
    """Multiply all gradients by one factor."""
    for part in by_dtype(grads):
        torch._foreach_mul_(part, by.to(part[0].device, part[0].dtype))


def by_dtype(tensors: Sequence[T]) -> list[list[T]]:
    """Group tensors by dtype, as foreach operations need it to fuse them; keeps the order within a group."""
    groups: dict[torch.dtype, list[T]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())
