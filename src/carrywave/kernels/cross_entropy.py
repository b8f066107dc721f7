"""Summed cross entropy over rows of logits, in half precision on CUDA with our own forward and backward kernels (`cross_entropy.cu`).

torch's cross entropy makes float32 copies of all logits, forward and backward: with a large vocabulary they dominate a training step's
memory traffic. It is used in all other cases, and if our kernel is unavailable.

Shapes: N rows, V classes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from carrywave.kernels import derivatives
from carrywave.kernels.cuda import nvrtc
from carrywave.kernels.cuda.aligned import empty_rows
from carrywave.kernels.cuda.casting import HALVES

_SOURCE = "cross_entropy.cu"
_cuda_kernel = nvrtc.Replaceable("cross entropy")


def summed(
    logits_NV: Tensor,
    target_N: Tensor,
    ignored: int,
    weights_V: Tensor | None = None,
    smoothing: float = 0.0,
    weights_N: Tensor | None = None,
) -> Tensor:
    """The sum, in float32 or wider, over the rows whose target is not `ignored`, each times the weight of its class and its own;
    `smoothing` as torch's `label_smoothing`.
    """
    if weights_V is None and not smoothing and _serves(logits_NV, target_N):
        apply: Any = _Losses.apply
        # The kernel reads two numbers at a time. Copied here, so that the tensor saved for backward is the autograd function's own input.
        in_place = logits_NV.stride(1) == 1 and logits_NV.stride(0) % 2 == 0 and logits_NV.data_ptr() % 4 == 0
        read_NV = logits_NV if in_place else logits_NV.clone(memory_format=torch.contiguous_format)
        losses_N: Tensor | None = _cuda_kernel.tried(lambda: apply(read_NV, target_N, ignored))
        if losses_N is not None:
            return _total(losses_N, weights_N)
    if weights_N is None:
        return _plain(logits_NV, target_N, ignored, weights_V, smoothing, reduction="sum")
    return _total(_plain(logits_NV, target_N, ignored, weights_V, smoothing), weights_N)


def _total(losses_N: Tensor, weights_N: Tensor | None) -> Tensor:
    return (losses_N if weights_N is None else losses_N * weights_N.to(losses_N.dtype)).sum()


def _plain(
    logits_NV: Tensor, target_N: Tensor, ignored: int, weights_V: Tensor | None = None, smoothing: float = 0.0, *, reduction: str = "none"
) -> Tensor:
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    weights_V = None if weights_V is None else weights_V.to(logits_NV.dtype)
    return functional.cross_entropy(
        logits_NV, target_N, weight=weights_V, ignore_index=ignored, reduction=reduction, label_smoothing=smoothing
    )


def _serves(logits_NV: Tensor, target_N: Tensor) -> bool:
    """True if the kernel supports these arguments; torch reports the errors in invalid ones."""
    halves = logits_NV.is_cuda and logits_NV.dtype in HALVES and logits_NV.numel() > 0 and not derivatives.plain_only()
    return halves and target_N.dtype == torch.int64 and target_N.shape == logits_NV.shape[:1] and target_N.device == logits_NV.device


class _Losses(torch.autograd.Function):
    """The loss of each row, in float32."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, target_N: Tensor, ignored: int) -> Tensor:
        target_N = target_N.contiguous()
        rows, classes = logits_NV.shape
        losses_N, logarithms_N = (logits_NV.new_empty(rows, dtype=torch.float32) for _ in range(2))
        _kernel("score_forward", logits_NV)(
            (rows, 1, 1), (512, 1), logits_NV, target_N, losses_N, logarithms_N, classes, logits_NV.stride(0), ignored
        )
        ctx.save_for_backward(logits_NV, target_N, logarithms_N)
        ctx.ignored = ignored
        return losses_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, None, None]:
        logits_NV, target_N, logarithms_N = ctx.saved_tensors
        if derivatives.beyond_numbers(grad_N):
            [again] = derivatives.through(lambda logits: _plain(logits, target_N, ctx.ignored), (logits_NV,), (True,), (grad_N,))
            return again, None, None
        rows, classes = logits_NV.shape
        grads_NV = empty_rows(logits_NV.shape, logits_NV)
        scale_N = grad_N.to(torch.float32)  # of a plain sum, one number for all rows, at a distance of 0
        _kernel("score_backward", logits_NV)(
            (rows, 1, 1), (512, 1), logits_NV, target_N, logarithms_N, scale_N, grads_NV, classes, logits_NV.stride(0), grads_NV.stride(0),
            scale_N.stride(0), ctx.ignored,
        )  # fmt: skip
        return grads_NV, None, None


def _kernel(name: str, like: Tensor) -> nvrtc.Kernel:
    return nvrtc.kernel(_SOURCE, name, (("FP16", int(like.dtype == torch.float16)),), 0, like.get_device())
