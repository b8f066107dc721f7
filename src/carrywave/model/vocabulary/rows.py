"""A vocabulary whose rows are split over workers: embedding, logits and summed cross entropy, with the answer of a single device.

Every worker has lanes of its own and some rows of the embedding and of the softmax, weights, gradients and optimizer state alike, and no
worker ever has all of them. So each computes the part of its rows for the lanes of all workers, and they exchange what is small: tokens,
outputs of the last layer, and two numbers for each target. Gradients of rows are complete where the rows are, and are not summed again.

Logits are computed in blocks, once forward and once more backward, and never kept. What is kept is the last layer's output of all workers
and one number for each of their targets.

All workers call these functions in the same order with the same number of steps, and pad their lanes to the number of the worker that has
the most (`sharing`): shapes are then known to all, and nothing has to be negotiated.

Shapes: R workers, T time, B lanes of this worker, M most lanes of a worker, N = R T M, W width, V rows of this worker.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from carrywave.errors import UserError
from carrywave.kernels import deferred_gradients
from carrywave.plan.plan import LOGITS_AT_ONCE


class Exchange(Protocol):
    """What the workers that share a vocabulary do together. Every method is collective: all of them must call it."""

    @property
    def index(self) -> int:
        """This worker's number among them."""

    @property
    def of(self) -> int:
        """How many they are."""

    def gather(self, tensor: Tensor) -> Tensor:
        """[R, …]: the tensors of all workers."""

    def scatter_sum(self, parts: Tensor) -> Tensor:
        """The sum over all workers of the part `parts[index]` of each."""

    def sum_(self, tensor: Tensor) -> Tensor:
        """The sum over all workers, in place."""

    def maximum_(self, tensor: Tensor) -> Tensor:
        """The largest over all workers, element by element and in place."""


@dataclass(frozen=True)
class Rows:
    """The rows [low, high) of a vocabulary that a worker holds; `exchange` reaches the others, and is None until they are connected."""

    low: int
    high: int
    vocabulary: int
    exchange: Exchange | None = None

    @staticmethod
    def of_worker(vocabulary: int, index: int, of: int) -> Rows:
        """An even share, divided as lanes are."""
        return Rows(vocabulary * index // of, vocabulary * (index + 1) // of, vocabulary)

    @property
    def count(self) -> int:
        """The number of rows."""
        return self.high - self.low


_MOST: contextvars.ContextVar[int | None] = contextvars.ContextVar("carrywave_most_lanes", default=None)


@contextlib.contextmanager
def sharing(most: int | None) -> Iterator[None]:
    """Inside this context, the worker with the most lanes has this many; None: the vocabulary is not split."""
    token = _MOST.set(most)
    try:
        yield
    finally:
        _MOST.reset(token)


def embedded(tokens_TB: Tensor, weight_VW: Tensor, rows: Rows) -> Tensor:
    """The rows of these tokens [T, B, W], each from the worker that holds it."""
    exchange, most = _connected(rows)
    tokens_RTM = exchange.gather(_padded(tokens_TB, most, rows.vocabulary))
    owned_RTM = (tokens_RTM >= rows.low) & (tokens_RTM < rows.high)
    rows_RTMW = deferred_gradients.embedding(torch.where(owned_RTM, tokens_RTM - rows.low, 0), weight_VW)
    apply: Any = _ScatterSum.apply
    # Not a product with the mask: a gradient that is not finite must stay with the row that it belongs to.
    local_TMW: Tensor = apply(torch.where(owned_RTM[..., None], rows_RTMW, 0.0), exchange)
    return local_TMW[:, : tokens_TB.shape[1]]


def summed_cross_entropy(
    y_TBW: Tensor, weight_VW: Tensor, bias_V: Tensor | None, target_TB: Tensor, ignored: int, rows: Rows, weights_TB: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The sum over this worker's targets that are not `ignored`, each times its weight, in float32 or wider, and their number or the sum of
    their weights.
    """
    exchange, most = _connected(rows)
    target_N = exchange.gather(_padded(target_TB, most, ignored)).reshape(-1)
    weights_N = None if weights_TB is None else exchange.gather(_padded(weights_TB, most, 0.0)).reshape(-1)
    apply: Any = _Summed.apply
    total: Tensor = apply(y_TBW, weight_VW, bias_V, target_N, weights_N, ignored, rows, most)
    real_TB = target_TB != ignored
    return total, real_TB.sum().to(total.dtype) if weights_TB is None else torch.where(real_TB, weights_TB, 0.0).sum()


def logits(y_TBW: Tensor, weight_VW: Tensor, bias_V: Tensor | None, rows: Rows) -> Tensor:
    """The logits of this worker's lanes over the whole vocabulary, one worker's after the other; without gradients."""
    exchange, most = _connected(rows)
    if torch.is_grad_enabled() and (weight_VW.requires_grad or y_TBW.requires_grad):
        raise UserError(
            "logits over a vocabulary that is split over workers have no gradient; call the head's loss, or use torch.no_grad()"
        )
    local: Tensor | None = None
    for worker, y_TMW in enumerate(exchange.gather(_padded(y_TBW, most, 0.0))):
        part_TMV = functional.linear(y_TMW, weight_VW, bias_V)
        whole = part_TMV.new_zeros(*part_TMV.shape[:2], rows.vocabulary)
        whole[..., rows.low : rows.high] = part_TMV
        whole = exchange.sum_(whole)
        local = whole if worker == exchange.index else local
    assert local is not None
    return local[:, : y_TBW.shape[1]]


def _connected(rows: Rows) -> tuple[Exchange, int]:
    most = _MOST.get()
    if rows.exchange is None or most is None:
        raise UserError(
            "the model's vocabulary is split over workers, so it runs only on all of them together; call trainer.evaluate, or load "
            "trainer.gathered() into a model of its own"
        )
    return rows.exchange, most


def _padded(x_TB: Tensor, most: int, value: float) -> Tensor:
    """x [T, B, …] with further lanes of this value, up to `most`."""
    if x_TB.shape[1] == most:
        return x_TB
    more = x_TB.new_full((x_TB.shape[0], most - x_TB.shape[1], *x_TB.shape[2:]), value)
    return torch.cat((x_TB, more), dim=1)


class _ScatterSum(torch.autograd.Function):
    """Every worker gets the sum of its part; the gradient of a part is that of the worker who got it."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.scatter_sum(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.gather(grad), None


class _Summed(torch.autograd.Function):
    """Cross entropy of this worker's lanes. Its backward is that of the sum over the lanes of all workers, scaled as this worker's own loss
    is: the scale (of fp16) is the same on all of them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        y_TBW: Tensor,
        weight_VW: Tensor,
        bias_V: Tensor | None,
        target_N: Tensor,
        weights_N: Tensor | None,
        ignored: int,
        rows: Rows,
        most: int,
    ) -> Tensor:
        exchange = rows.exchange
        assert exchange is not None
        kind = y_TBW.device.type
        narrow = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight_VW.dtype
        y_NW = exchange.gather(_padded(y_TBW.detach().to(narrow), most, 0.0)).flatten(0, 2)
        with torch.autocast(kind, enabled=False):
            top_N, sums_2N = _tops(y_NW, weight_VW, bias_V, target_N, rows)
            highest_N = exchange.maximum_(top_N.clone())
            sums_2N[0] *= torch.exp(top_N - highest_N)
            exchange.sum_(sums_2N)
            logarithm_N = highest_N + sums_2N[0].log()
        real_N = target_N != ignored
        share_N = real_N.to(logarithm_N.dtype) if weights_N is None else torch.where(real_N, weights_N.to(logarithm_N.dtype), 0.0)
        losses_RTM = torch.where(real_N, (logarithm_N - sums_2N[1]) * share_N, 0.0).view(exchange.of, -1, most)
        ctx.save_for_backward(y_NW, weight_VW, bias_V, target_N, share_N, logarithm_N)
        ctx.rows, ctx.shape_RTM, ctx.lanes, ctx.given = rows, losses_RTM.shape, y_TBW.shape[1], y_TBW.dtype
        return losses_RTM[exchange.index].sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y_NW, weight_VW, bias_V, target_N, share_N, logarithm_N = ctx.saved_tensors
        rows: Rows = ctx.rows
        exchange = rows.exchange
        assert exchange is not None
        wants_y, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_NW = torch.empty_like(y_NW)
        grad_VW = torch.zeros_like(weight_VW) if wants_weight else None
        grad_V = torch.zeros_like(bias_V) if wants_bias else None
        narrow_VW = weight_VW.to(y_NW.dtype)
        scale_N = torch.where(share_N > 0.0, grad.to(logarithm_N.dtype) * share_N, 0.0)
        for part, logits_nV in _blocks(y_NW, narrow_VW, bias_V):
            # A padded row's logits are finite but meaningless: its scale is zero.
            error_nV = logits_nV.sub_(logarithm_N[part, None]).exp_()
            at_n, owned_n = _places(target_N[part], rows)
            error_nV.scatter_add_(1, at_n[:, None], -owned_n.to(error_nV.dtype)[:, None])
            error_nV = error_nV.mul_(scale_N[part, None]).to(y_NW.dtype)
            torch.mm(error_nV, narrow_VW, out=grad_NW[part])
            if grad_VW is not None:
                if grad_VW.dtype == error_nV.dtype:
                    grad_VW.addmm_(error_nV.t(), y_NW[part])
                else:
                    grad_VW.add_(error_nV.t() @ y_NW[part])
            if grad_V is not None:
                grad_V.add_(error_nV.sum(0, dtype=grad_V.dtype))
        # All workers take part, even one whose own lanes need no gradient.
        local_TMW = exchange.scatter_sum(grad_NW.view(*ctx.shape_RTM, -1))
        return local_TMW[:, : ctx.lanes].to(ctx.given) if wants_y else None, grad_VW, grad_V, *[None] * 5


def _tops(y_NW: Tensor, weight_VW: Tensor, bias_V: Tensor | None, target_N: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Over this worker's rows: the largest logit [N]; and the sum of exponentials relative to it, and the target's logit (0 if another
    worker holds it), [2, N].
    """
    tops: list[Tensor] = []
    sums: list[Tensor] = []
    for part, logits_nV in _blocks(y_NW, weight_VW.to(y_NW.dtype), bias_V):
        at_n, owned_n = _places(target_N[part], rows)
        wanted_n = torch.where(owned_n, logits_nV.gather(1, at_n[:, None])[:, 0], 0.0)
        top_n = logits_nV.amax(1)
        tops.append(top_n)
        sums.append(torch.stack((logits_nV.sub_(top_n[:, None]).exp_().sum(1), wanted_n)))
    return torch.cat(tops), torch.cat(sums, dim=1)


def _blocks(y_NW: Tensor, weight_VW: Tensor, bias_V: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """The logits of this worker's rows, in float32 or wider, for some targets at a time."""
    size = max(1, LOGITS_AT_ONCE // weight_VW.shape[0])
    wide = torch.promote_types(y_NW.dtype, torch.float32)
    for low in range(0, y_NW.shape[0], size):
        part = slice(low, low + size)
        logits_nV = (y_NW[part] @ weight_VW.t()).to(wide)
        yield part, logits_nV if bias_V is None else logits_nV.add_(bias_V)


def _places(target_n: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Where each target is among this worker's rows, and whether it is there at all; 0 if not."""
    owned_n = (target_n >= rows.low) & (target_n < rows.high)
    return torch.where(owned_n, target_n - rows.low, 0), owned_n
