"""Linear layers in half precision on CUDA, of any width, with rows aligned to 16 bytes.

A GPU's fast matrix products need such rows. A vocabulary of 33,278, or 650 units, gets other kernels, which take two to three times as
long. The weights are cast to half precision in any case, so padding their rows costs nothing.

Shapes: N rows, I inputs, V outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from carrywave.kernels import pass_cache
from carrywave.kernels.cuda.casting import EACH, dense_rows, padded_rows
from carrywave.kernels.derivatives import as_saved, only_numbers, plain_only


def serves(x: Tensor, weight_VI: Tensor) -> bool:
    """True if alignment makes a difference: under autocast to half precision on CUDA, if a width is not a multiple of 8."""
    odd = bool(weight_VI.shape[0] % EACH or weight_VI.shape[1] % EACH)
    cast = x.is_cuda and torch.is_autocast_enabled("cuda") and torch.float64 not in (x.dtype, weight_VI.dtype)
    return odd and cast and not plain_only()


def linear(x: Tensor, weight_VI: Tensor, bias_V: Tensor | None) -> Tensor:
    """Like torch's under autocast, but the rows of the result are aligned to 16 bytes."""
    apply: Any = _Linear.apply
    y: Tensor = apply(x, weight_VI, bias_V, torch.get_autocast_dtype("cuda"))
    return y


def empty_rows(shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised [rows, width] tensor with each row aligned to 16 bytes."""
    rows, width = shape
    return like.new_empty((rows, -(-width // EACH) * EACH), dtype=dtype or like.dtype)[:, :width]


def aligned_rows(x_NI: Tensor, dtype: torch.dtype) -> Tensor:
    """The same numbers in this dtype, with rows aligned to 16 bytes; copied only if necessary."""
    if x_NI.dtype == dtype and x_NI.stride(1) == 1 and x_NI.stride(0) % EACH == 0 and x_NI.storage_offset() % EACH == 0:
        return x_NI
    return padded_rows(x_NI, dtype)[:, : x_NI.shape[1]]


def _strides(lead: Sequence[int], width: int) -> list[int]:
    """The strides of a tensor [*lead, width] with rows aligned to 16 bytes."""
    strides, step = [1], -(-width // EACH) * EACH
    for size in reversed(lead):
        strides.insert(0, step)
        step *= size
    return strides


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_VI: Tensor, bias_V: Tensor | None, dtype: torch.dtype) -> Tensor:
        x_NI = aligned_rows(x.reshape(-1, x.shape[-1]), dtype)
        w_VI = pass_cache.cached([weight_VI], ("aligned", dtype), lambda: aligned_rows(weight_VI.detach(), dtype))
        outputs = w_VI.shape[0]
        # Not a view of a wider tensor, so that the result can be modified in place, as torch's can.
        y = x_NI.new_empty_strided((*x.shape[:-1], outputs), _strides(x.shape[:-1], outputs))
        y_NV = y.view(x_NI.shape[0], outputs)
        if bias_V is None:
            torch.mm(x_NI, w_VI.t(), out=y_NV)
        else:
            torch.addmm(bias_V.to(dtype), x_NI, w_VI.t(), out=y_NV)
        ctx.save_for_backward(x_NI, w_VI)
        ctx.given = (x.shape, x.dtype, weight_VI.dtype, None if bias_V is None else bias_V.dtype)
        return y

    @staticmethod
    @as_saved
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        only_numbers("carrywave's linear layer under autocast", "compute without autocast, or use nn.Linear in your own head", grad)
        x_NI, w_VI = ctx.saved_tensors
        x_shape, x_dtype, w_dtype, b_dtype = ctx.given
        grad_NV = aligned_rows(grad.reshape(-1, grad.shape[-1]), w_VI.dtype)
        wants_x, wants_w, wants_b, _ = ctx.needs_input_grad
        dx = dw = db = None
        if wants_x:
            dx_NI = torch.mm(grad_NV, w_VI, out=empty_rows(x_NI.shape, x_NI))
            dx = (dx_NI if x_dtype == dx_NI.dtype else dense_rows(dx_NI, x_dtype)).reshape(x_shape)
        if wants_w:
            product_VI = torch.mm(grad_NV.t(), x_NI, out=empty_rows(w_VI.shape, w_VI))
            dw = dense_rows(product_VI, w_dtype)
        if wants_b and b_dtype is not None:
            db = grad_NV.sum(0, dtype=torch.float32).to(b_dtype)
        return dx, dw, db, None
