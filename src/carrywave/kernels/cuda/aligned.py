"""Linear layers in half precision on CUDA, of any width, as fast as those whose widths are multiples of 8.

A GPU's fast matrix products need rows aligned to 16 bytes and sizes that are multiples of 8. A vocabulary of 33,278, or 650 units, gets
other kernels, which take two to five times as long. So the products here are of padded matrices. The weights are cast to half precision in
any case, so padding them costs nothing.

Shapes: N rows, I inputs, V outputs; J and P are I and V padded to multiples of 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from carrywave.kernels import pass_cache
from carrywave.kernels.cuda.casting import EACH, dense_rows, padded_rows, padded_width, write_padded
from carrywave.kernels.derivatives import as_saved, only_numbers, plain_only


def serves(x: Tensor, weight_VI: Tensor) -> bool:
    """True if alignment makes a difference: under autocast to half precision on CUDA, if a width is not a multiple of 8."""
    odd = bool(weight_VI.shape[0] % EACH or weight_VI.shape[1] % EACH)
    cast = x.is_cuda and torch.is_autocast_enabled("cuda") and torch.float64 not in (x.dtype, weight_VI.dtype)
    return odd and cast and not plain_only()


def linear(x: Tensor, weight_VI: Tensor, bias_V: Tensor | None) -> Tensor:
    """Like torch's under autocast, but the rows of the result are aligned to 16 bytes."""
    apply: Any = _AlignedLinear.apply
    y: Tensor = apply(x, weight_VI, bias_V, torch.get_autocast_dtype("cuda"))
    return y


def empty_rows(shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised [rows, width] tensor with each row aligned to 16 bytes."""
    rows, width = shape
    return like.new_empty((rows, padded_width(width)), dtype=dtype or like.dtype)[:, :width]


def aligned_rows(x_NI: Tensor, dtype: torch.dtype) -> Tensor:
    """The same numbers in this dtype, with rows aligned to 16 bytes; copied only if necessary."""
    if x_NI.dtype == dtype and x_NI.stride(1) == 1 and x_NI.stride(0) % EACH == 0 and x_NI.storage_offset() % EACH == 0:
        return x_NI
    return padded_rows(x_NI, dtype)[:, : x_NI.shape[1]]


def _zero_padded(x_NI: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, J]: the rows with zeros after them."""
    return padded_rows(x_NI, dtype) if x_NI.shape[1] % EACH else aligned_rows(x_NI, dtype)


def _padded_weight(weight_VI: Tensor, dtype: torch.dtype) -> Tensor:
    outputs, inputs = weight_VI.shape
    w_PJ = weight_VI.new_empty(padded_width(outputs), padded_width(inputs), dtype=dtype)
    write_padded(weight_VI, w_PJ[:outputs])
    w_PJ[outputs:].zero_()
    return w_PJ


def _with_gaps(x_NV: Tensor) -> Tensor:
    """[N, P]: aligned rows, with whatever lies between them in memory."""
    rows, width = x_NV.shape
    end = x_NV.storage_offset() + max(rows - 1, 0) * x_NV.stride(0) + padded_width(width)
    if (rows > 1 and x_NV.stride(0) < padded_width(width)) or end * x_NV.element_size() > x_NV.untyped_storage().nbytes():
        return padded_rows(x_NV, x_NV.dtype)
    return x_NV.as_strided((rows, padded_width(width)), x_NV.stride())


def _inputs_gradient(grad_NV: Tensor, w_PJ: Tensor) -> Tensor:
    """[N, J]. What lies between the rows of `grad` may be no number, so the last few outputs are multiplied apart, from a copy."""
    outputs = grad_NV.shape[1]
    even = outputs - outputs % EACH
    if even == outputs:
        return grad_NV @ w_PJ
    rest_NJ = padded_rows(grad_NV[:, even:], w_PJ.dtype) @ w_PJ[even:]
    return torch.addmm(rest_NJ, grad_NV[:, :even], w_PJ[:even]) if even else rest_NJ


def _strides(lead: Sequence[int], width: int) -> list[int]:
    """The strides of a tensor [*lead, width] with rows aligned to 16 bytes."""
    strides, step = [1], padded_width(width)
    for size in reversed(lead):
        strides.insert(0, step)
        step *= size
    return strides


class _AlignedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_VI: Tensor, bias_V: Tensor | None, dtype: torch.dtype) -> Tensor:
        x_NJ = _zero_padded(x.reshape(-1, x.shape[-1]), dtype)
        w_PJ = pass_cache.cached([weight_VI], ("aligned", dtype), lambda: _padded_weight(weight_VI.detach(), dtype))
        outputs = weight_VI.shape[0]
        if bias_V is None:
            y_NP = x_NJ @ w_PJ.t()
        else:
            y_NP = torch.addmm(functional.pad(bias_V.to(dtype), (0, w_PJ.shape[0] - outputs)), x_NJ, w_PJ.t())
        # Not a view of a wider tensor, so that the result can be modified in place, as torch's can.
        y = y_NP.new_empty(0).set_(y_NP.untyped_storage(), 0, (*x.shape[:-1], outputs), _strides(x.shape[:-1], outputs))
        ctx.save_for_backward(x_NJ, w_PJ)
        ctx.given = (x.shape, x.dtype, weight_VI.shape, weight_VI.dtype, None if bias_V is None else bias_V.dtype)
        return y

    @staticmethod
    @as_saved
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        only_numbers("carrywave's linear layer under autocast", "compute without autocast, or use nn.Linear in your own head", grad)
        x_NJ, w_PJ = ctx.saved_tensors
        x_shape, x_dtype, (outputs, inputs), w_dtype, b_dtype = ctx.given
        grad_NV = aligned_rows(grad.reshape(-1, outputs), w_PJ.dtype)
        wants_x, wants_w, wants_b, _ = ctx.needs_input_grad
        dx = dw = db = None
        if wants_x:
            dx_NI = _inputs_gradient(grad_NV, w_PJ)[:, :inputs]
            dx = (dx_NI if x_dtype == dx_NI.dtype else dense_rows(dx_NI, x_dtype)).reshape(x_shape)
        if wants_w:
            dw = dense_rows((_with_gaps(grad_NV).t() @ x_NJ)[:outputs, :inputs], w_dtype)
        if wants_b and b_dtype is not None:
            db = grad_NV.sum(0, dtype=torch.float32).to(b_dtype)
        return dx, dw, db, None
