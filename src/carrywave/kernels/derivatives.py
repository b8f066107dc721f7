"""Higher-order, forward-mode and batched derivatives: decides when a handwritten backward gives way to plain torch operations.

A handwritten backward returns numbers without a graph to differentiate through: higher derivatives would silently be zero. So when the
gradient of a gradient (`create_graph`) or many gradients at once are requested, forward is recomputed with plain operations and
autograd differentiates those. torch.func, forward mode and tracers inspect the operations of forward, so they get plain ones from
the start.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from carrywave.errors import UserError

P = ParamSpec("P")
R = TypeVar("R")
Plain = Callable[..., Tensor | tuple[Tensor, ...]]


def transformed() -> bool:
    """True if forward runs inside torch.func (grad, jvp, vmap and the like) or in forward mode."""
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0


def traced() -> bool:
    """True if a compiler or tracer records the operations of forward."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def plain_only() -> bool:
    """True if forward's operations are recorded or transformed by something that only understands torch's own."""
    return traced() or transformed()


def beyond_numbers(*grads: Tensor | None) -> bool:
    """Called in a backward with its gradients: True if its result is differentiated again, or is batched over many gradients."""
    if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return True
    return any(grad is not None and torch._C._functorch.is_legacy_batchedtensor(grad) for grad in grads)


def through(plain: Plain, inputs: Sequence[Tensor | None], wanted: Sequence[bool], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients of a plain function's outputs with respect to the wanted inputs, computed with torch's operations."""
    with torch.enable_grad():
        # Views, so that each input has a gradient of its own even if one was computed from another.
        given = [each.view_as(each) if each is not None and want else each for each, want in zip(inputs, wanted, strict=True)]
        outputs = plain(*given)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    pairs = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if grad is not None and output.requires_grad]
    sought = [each for each, want in zip(given, wanted, strict=True) if each is not None and want]
    if not pairs or not sought:
        return [None] * len(inputs)
    input_grads = iter(
        torch.autograd.grad(
            [output for output, _ in pairs], sought, [grad for _, grad in pairs], create_graph=torch.is_grad_enabled(), allow_unused=True
        )
    )
    return [next(input_grads) if each is not None and want else None for each, want in zip(given, wanted, strict=True)]


def as_saved(backward: Callable[P, R]) -> Callable[P, R]:
    """Decorate a backward to compute in the dtypes that forward saved, even inside an autocast region."""

    @functools.wraps(backward)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda"):
            return backward(*args, **kwargs)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return backward(*args, **kwargs)

    return run


def only_numbers(what: str, remedy: str, *grads: Tensor | None) -> None:
    """Raise, in a backward that received these gradients and returns plain numbers, if more than numbers is requested."""
    if beyond_numbers(*grads):
        raise UserError(f"{what} has no second derivative; {remedy}")
