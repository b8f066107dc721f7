"""Derivatives beyond the first, and of other kinds than backward: where code written by hand steps aside for plain operations.

A backward written by hand gives numbers, which nothing can be differentiated through: what is missing would count as zero, in silence. So
where the gradient of a gradient is asked for (`create_graph`), or many gradients at once, the forward is done again with plain
operations and autograd goes back through those. torch.func, forward mode and tracers look at the operations of forward: they get
plain ones from the start.
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
    """Whether forward runs within torch.func (grad, jvp, vmap and their like) or in forward mode."""
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0


def traced() -> bool:
    """Whether a compiler or tracer writes down the operations of forward."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def plain_only() -> bool:
    """Whether somebody looks at the operations of forward, who knows those of torch only."""
    return traced() or transformed()


def beyond_numbers(*grads: Tensor | None) -> bool:
    """Asked in a backward that got these: whether what it gives is differentiated again, or is for many gradients at once."""
    if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return True
    return any(grad is not None and torch._C._functorch.is_legacy_batchedtensor(grad) for grad in grads)


def through(plain: Plain, inputs: Sequence[Tensor | None], wanted: Sequence[bool], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients of a plain function's outputs with respect to the inputs that are wanted, made of operations of torch."""
    with torch.enable_grad():
        # Views: where one input was made of another, each counts for itself.
        given = [each.view_as(each) if each is not None and want else each for each, want in zip(inputs, wanted, strict=True)]
        outputs = plain(*given)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    known = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if grad is not None and output.requires_grad]
    sought = [each for each, want in zip(given, wanted, strict=True) if each is not None and want]
    if not known or not sought:
        return [None] * len(inputs)
    found = iter(
        torch.autograd.grad(
            [output for output, _ in known], sought, [grad for _, grad in known], create_graph=torch.is_grad_enabled(), allow_unused=True
        )
    )
    return [next(found) if each is not None and want else None for each, want in zip(given, wanted, strict=True)]


def as_saved(backward: Callable[P, R]) -> Callable[P, R]:
    """A backward that computes in the dtypes that forward left, also where it is called inside an autocast region."""

    @functools.wraps(backward)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda"):
            return backward(*args, **kwargs)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return backward(*args, **kwargs)

    return run


def only_numbers(what: str, remedy: str, *grads: Tensor | None) -> None:
    """Raise, in a backward that got these and gives numbers, where more is asked for."""
    if beyond_numbers(*grads):
        raise UserError(f"{what} has no second derivative; {remedy}")
