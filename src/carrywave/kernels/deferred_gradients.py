"""Deferred weight gradients: one matrix product over all time chunks of a micro-batch, instead of one per chunk (but see `_large`).

Backward through a chunk has two parts. The gradient of its input is needed at once, by the previous chunk and stage; the gradients of
the weights are not. Deferred to the end, the second part is one large product that accumulates directly into the gradient, where many
small ones would each read and write all of it; and other stages are not kept waiting. (Splitting backward like this to fill a
pipeline's bubble is the idea of "zero bubble" schedules, Qi et al. 2024.)

Only gradients of weights that are parameters themselves can be deferred: derived weights (dropped or cast) go through autograd. So does a
gradient requested along the way, such as a gradient penalty inside a loss: only this module's `backward` defers.

Shapes: N rows (time × lane), G outputs, I inputs, E width.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from carrywave.kernels import derivatives, random
from carrywave.kernels.cuda import aligned
from carrywave.kernels.torch_kernels import ON_X86, without_onednn

APART, LARGE = ON_X86, 256  # whether chunks of this many rows have a product of their own: joining them is a copy of all of them
Ready = Callable[[Tensor], None]  # called with each weight whose gradient is complete


@dataclass
class _Put:
    """Pending contributions to the gradient of one weight."""

    weight: Tensor
    products: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (grad, input) of each gradᵀ @ input
    shift: int = 0  # of the rows of these products against those of the weight
    rows: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (gradients of rows, indices of these rows)


@dataclass
class _Later:
    """Weights whose gradients a kernel will compute itself, from what it keeps."""

    weights: Sequence[Tensor]
    compute: Callable[[], Sequence[Tensor]]


class Deferred:
    """Pending weight gradients, by weight, in the order in which backward reached them."""

    def __init__(self) -> None:
        self.open = False  # True during the backward pass of a step, when gradients may be deferred
        self._puts: dict[int, _Put] = {}
        self._later: list[_Later] = []

    def product(self, weight_GI: Tensor, grads_NG: Tensor, inputs_NI: Tensor, *, shift: int = 0) -> None:
        """Defer adding `grads.T @ inputs` to a weight's gradient. `shift`: the rows of the product come so much later, the last ones first;
        the same for all products of a weight.
        """
        put = self._to(weight_GI)
        put.products.append((grads_NG, inputs_NI))
        put.shift = shift

    def rows(self, weight_VE: Tensor, grads_NE: Tensor, index_N: Tensor) -> None:
        """Defer adding, to each row of a weight's gradient, the sum of the gradients that have its index."""
        self._to(weight_VE).rows.append((grads_NE, index_N))

    def later(self, weights: Sequence[Tensor], compute: Callable[[], Sequence[Tensor]]) -> None:
        """Defer adding what `compute` returns, one new tensor for each weight, to the weights' gradients."""
        self._later.append(_Later(weights, compute))

    def pending(self, weight: Tensor) -> bool:
        """True if a weight's gradient is still incomplete."""
        return id(weight) in self._puts or any(weight is each for later in self._later for each in later.weights)

    @torch.no_grad()
    def flush(self, ready: Ready | None = None) -> None:
        """Add everything pending to the weights' gradients, and call `ready` with each weight as its gradient is complete."""
        joined: tuple[tuple[int, ...], Tensor] | None = None  # the last concatenation: both weights of a layer have the same gradients
        while self._puts:
            put = self._puts.pop(next(iter(self._puts)))
            if put.products:
                products = put.products
                if not all(_large(grads_NG) for grads_NG, _ in products):
                    parts, inputs = zip(*products, strict=True)
                    names = tuple(id(part) for part in parts)
                    if joined is None or joined[0] != names:
                        joined = names, torch.cat(parts)
                    products = [(joined[1], torch.cat(inputs))]
                with without_onednn():
                    for grads_NG, inputs_NI in products:
                        if put.weight.grad is None or put.shift:
                            product_GI = (grads_NG.t() @ inputs_NI).roll(-put.shift, 0) if put.shift else grads_NG.t() @ inputs_NI
                            put.weight.grad = product_GI if put.weight.grad is None else put.weight.grad.add_(product_GI)
                        else:
                            put.weight.grad.addmm_(grads_NG.t(), inputs_NI)
            if put.rows:
                grads_NE, index_N = (torch.cat(parts) for parts in zip(*put.rows, strict=True))
                grad_VE = torch.ops.aten.embedding_dense_backward(grads_NE, index_N, put.weight.shape[0], -1, False)
                put.weight.grad = grad_VE if put.weight.grad is None else put.weight.grad.add_(grad_VE)
            if ready is not None and not self.pending(put.weight):
                ready(put.weight)
        while self._later:
            later = self._later.pop(0)
            weights, grads = _each_once(later.weights, later.compute())
            pairs = [(weight.grad, grad) for weight, grad in zip(weights, grads, strict=True) if weight.grad is not None]
            if pairs:
                torch._foreach_add_(*(list(each) for each in zip(*pairs, strict=True)))
            for weight, grad in zip(weights, grads, strict=True):
                weight.grad = grad if weight.grad is None else weight.grad
                if ready is not None and not self.pending(weight):
                    ready(weight)

    def _to(self, weight: Tensor) -> _Put:
        return self._puts.setdefault(id(weight), _Put(weight))


def _large(grads_NG: Tensor) -> bool:
    """True if a chunk's own product is faster than its part of a joint one: on x86, where it took 0.85 to 0.95 times as long."""
    return APART and grads_NG.device.type == "cpu" and grads_NG.shape[0] >= LARGE


def _each_once(weights: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients of weights of which some may be there twice, because layers share them: added up."""
    by_id: dict[int, tuple[Tensor, Tensor]] = {}
    for weight, grad in zip(weights, grads, strict=True):
        by_id[id(weight)] = weight, by_id[id(weight)][1].add_(grad) if id(weight) in by_id else grad
    return [weight for weight, _ in by_id.values()], [grad for _, grad in by_id.values()]


_CURRENT: contextvars.ContextVar[Deferred | None] = contextvars.ContextVar("carrywave_deferred", default=None)


@contextlib.contextmanager
def deferring(deferred: Deferred | None) -> Iterator[None]:
    """Inside this context, forward passes and their backward passes defer weight gradients."""
    token = _CURRENT.set(deferred)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def backward(roots: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Like torch.autograd.backward, but leaves the weight gradients of layers that ran inside `deferring` pending."""
    current = _CURRENT.get()
    with random.without_draws():
        if current is None:
            torch.autograd.backward(roots, gradients)
            return
        current.open = True
        try:
            torch.autograd.backward(roots, gradients)
        finally:
            current.open = False


def deferred_for(*weights: Tensor) -> Deferred | None:
    """Where to defer the gradients of these weights; None: do not defer."""
    current = _CURRENT.get()
    if current is None or derivatives.transformed():
        return None
    return current if all(weight.is_leaf and weight.requires_grad for weight in weights) else None


def linear(x: Tensor, weight_GI: Tensor, bias_G: Tensor | None = None) -> Tensor:
    """Like torch's `linear`."""
    # Under autocast the product is in a narrower dtype, which torch handles.
    defers = deferred_for(weight_GI) is not None and x.dtype == weight_GI.dtype and not torch.is_autocast_enabled(x.device.type)
    if not defers or not torch.is_grad_enabled():
        return (aligned.linear if aligned.serves(x, weight_GI) else functional.linear)(x, weight_GI, bias_G)
    apply: Any = _DeferredLinear.apply
    y: Tensor = apply(x, weight_GI)
    return y if bias_G is None else y + bias_G


def embedding(index: Tensor, weight_VE: Tensor) -> Tensor:
    """Like torch's `embedding`."""
    if deferred_for(weight_VE) is None or not torch.is_grad_enabled():
        return functional.embedding(index, weight_VE)
    apply: Any = _DeferredRows.apply
    rows: Tensor = apply(index, weight_VE)
    return rows


class _DeferredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_GI: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight_GI, ctx.deferred = weight_GI, deferred_for(weight_GI)
        return functional.linear(x, weight_GI)

    @staticmethod
    @derivatives.as_saved
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        [x] = ctx.saved_tensors
        if derivatives.beyond_numbers(grad) or not ctx.deferred.open:
            return tuple(derivatives.through(functional.linear, (x, ctx.weight_GI), ctx.needs_input_grad, (grad,)))
        ctx.deferred.product(ctx.weight_GI, grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1]))
        return grad @ ctx.weight_GI if ctx.needs_input_grad[0] else None, None


class _DeferredRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, index: Tensor, weight_VE: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.weight_VE, ctx.deferred = weight_VE, deferred_for(weight_VE)
        return functional.embedding(index, weight_VE)

    @staticmethod
    @derivatives.as_saved
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        [index] = ctx.saved_tensors
        if derivatives.beyond_numbers(grad) or not ctx.deferred.open:
            return tuple(derivatives.through(functional.embedding, (index, ctx.weight_VE), ctx.needs_input_grad, (grad,)))
        ctx.deferred.rows(ctx.weight_VE, grad.reshape(-1, grad.shape[-1]), index.reshape(-1))
        return None, None
