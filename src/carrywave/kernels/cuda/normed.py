"""Layers with norms inside their cell on CUDA: for each step one matrix product and one launch of our own (`normed.cu`), where plain
PyTorch makes dozens. Everything can be captured in a graph.

The norm of the input's product, over all steps at once, is torch's.

Shapes: T time, B lane, I input, H hidden, G = gates · H, S = T + 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from carrywave.cells.cell import Cell
from carrywave.kernels import derivatives
from carrywave.kernels.carry import AnyCarry
from carrywave.kernels.cuda import nvrtc
from carrywave.kernels.cuda.casting import HALVES
from carrywave.kernels.lengths import real_steps
from carrywave.kernels.step_marks import StepMarks
from carrywave.kernels.weights import Layer, LayerWeights, heads_of

_SOURCE = "normed.cu"
_CELLS = {"lstm": 0, "gru": 1}
_MOST_HIDDEN = 4096
_cuda_kernel = nvrtc.Replaceable("norms inside a cell")


def serves(cell: Cell, x_TBI: Tensor, layer: Layer, marks: StepMarks | None) -> bool:
    """True if these kernels run a layer with norms: in one direction, without heads, projection, noise and resets to a learned carry."""
    first = layer[0]
    if cell.name not in _CELLS or len(layer) > 1 or first.w_hr is not None or heads_of(layer, cell.gates) > 1:
        return False
    if marks is not None and (marks.noise is not None or marks.initial is not None):
        return False
    if set(first.extra) - {"norm_ih", "norm_hh", "norm_c", "norm_c_bias"} or first.w_hh.shape[1] > _MOST_HIDDEN:
        return False
    supported = x_TBI.is_cuda and x_TBI.dtype in (torch.float32, *HALVES) and x_TBI.shape[1] > 0 and not derivatives.plain_only()
    return supported and not _cuda_kernel.failures and bool(_cuda_kernel.tried(lambda: _compiled(cell, x_TBI, first)))


def _compiled(cell: Cell, x_TBI: Tensor, weights: LayerWeights) -> bool:
    for name in ("normed_forward", "normed_backward"):
        _kernel(name, cell.name, weights.w_hh.shape[1], x_TBI)
    return True


def layer(
    x_TBI: Tensor, carry: AnyCarry, weights: Layer, lengths_B: Tensor | None, cell: Cell, *, marks: StepMarks | None = None
) -> tuple[Tensor, AnyCarry]:
    """One layer in one direction: outputs [T, B, H] and the carry at each lane's last real step."""
    [direction] = weights
    real_TB1 = None if lengths_B is None else real_steps(lengths_B, x_TBI.shape[0])
    inputs_TBG = direction.inputs(x_TBI if real_TB1 is None else torch.where(real_TB1, x_TBI, 0.0))
    resets_TB = None if marks is None else marks.resets
    norms = [None if (each := direction.extra.get(name)) is None else each.float() for name in ("norm_hh", "norm_c", "norm_c_bias")]
    bias_G = None if direction.b_hh is None else direction.b_hh.float()
    apply: Any = _Steps.apply
    h_TBH, memory_BH = apply(
        cell.name,
        (resets_TB, lengths_B),
        inputs_TBG.contiguous(),
        carry[0][0],
        carry[-1][0].float(),
        direction.w_hh,
        norms[0],
        bias_G,
        *norms[1:],
    )
    y_TBH = h_TBH if real_TB1 is None else torch.where(real_TB1, h_TBH, 0.0)
    end_BH = memory_BH.to(carry[-1].dtype)
    last: AnyCarry = cell.carry(h_TBH[-1].to(carry[0].dtype)[None], end_BH[None]) if len(carry) > 1 else cell.carry(end_BH[None])
    return y_TBH, last


class _Steps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        cell: str,
        marked: tuple[Tensor | None, Tensor | None],
        inputs_TBG: Tensor,
        h_BH: Tensor,
        memory_BH: Tensor,
        w_hh_GH: Tensor,
        gain_G: Tensor,
        bias_G: Tensor | None,
        gain_c_H: Tensor | None,
        bias_c_H: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        (steps, lanes), hidden = inputs_TBG.shape[:2], w_hh_GH.shape[1]
        resets_TB, lengths_B = marked
        resets_TB = None if resets_TB is None else resets_TB.contiguous()
        lengths_B = None if lengths_B is None else lengths_B.to(torch.int64)
        hs_SBH = inputs_TBG.new_empty(steps + 1, lanes, hidden)
        memories_SBH = memory_BH.new_empty(steps + 1, lanes, hidden)
        products_TBG, gates_TBG = torch.empty_like(inputs_TBG), torch.empty_like(inputs_TBG)
        moments_TB4 = memory_BH.new_empty(steps, lanes, 4)
        hs_SBH[0].copy_(h_BH)
        memories_SBH[0].copy_(memory_BH)
        run, turned_HG = _kernel("normed_forward", cell, hidden, inputs_TBG), w_hh_GH.t()
        for t in range(steps):
            torch.mm(hs_SBH[t], turned_HG, out=products_TBG[t])
            run(
                (lanes, 1, 1), (256, 1), products_TBG[t], inputs_TBG[t], gain_G, bias_G, gain_c_H, bias_c_H,
                memories_SBH[t], memories_SBH[t + 1], hs_SBH[t], hs_SBH[t + 1], gates_TBG[t], moments_TB4[t], resets_TB, lengths_B, t,
            )  # fmt: skip
        ctx.save_for_backward(w_hh_GH, gain_G, bias_G, gain_c_H, bias_c_H, hs_SBH, memories_SBH, products_TBG, gates_TBG, moments_TB4)
        ctx.cell, ctx.marked, ctx.dtypes = cell, (resets_TB, lengths_B), (h_BH.dtype, memory_BH.dtype)
        ctx.set_materialize_grads(False)
        return hs_SBH[1:].clone(), memories_SBH[-1].clone()

    @staticmethod
    @derivatives.as_saved
    def backward(ctx: Any, grad_y_TBH: Tensor | None, grad_memory_BH: Tensor | None) -> tuple[Tensor | None, ...]:
        remedy = "build the layers with kernel='reference' to differentiate gradients again or to compute many at once"
        derivatives.only_numbers("a layer with norms inside its cell on CUDA", remedy, grad_y_TBH, grad_memory_BH)
        w_hh_GH, gain_G, bias_G, gain_c_H, bias_c_H, hs_SBH, memories_SBH, products_TBG, gates_TBG, moments_TB4 = ctx.saved_tensors
        resets_TB, lengths_B = ctx.marked
        (steps, lanes, _), hidden = products_TBG.shape, w_hh_GH.shape[1]
        grad_y_TBH = torch.zeros_like(hs_SBH[1:]) if grad_y_TBH is None else grad_y_TBH.contiguous()
        past_BH, of_memory_BH = (memories_SBH.new_zeros(lanes, hidden) for _ in range(2))
        if grad_memory_BH is not None:
            of_memory_BH.copy_(grad_memory_BH)
        of_inputs_TBG, of_products_TBG = torch.empty_like(products_TBG), torch.empty_like(products_TBG)
        of_normed_TBH = memories_SBH.new_empty(steps, lanes, hidden)
        through_BH: Tensor | None = None
        buffer_BH = torch.empty_like(hs_SBH[0])
        run = _kernel("normed_backward", ctx.cell, hidden, products_TBG)
        for t in range(steps - 1, -1, -1):
            run(
                (lanes, 1, 1), (256, 1), products_TBG[t], gates_TBG[t], moments_TB4[t], memories_SBH[t], memories_SBH[t + 1],
                gain_G, bias_G, gain_c_H, bias_c_H, through_BH, grad_y_TBH[t], past_BH, of_memory_BH,
                of_inputs_TBG[t], of_products_TBG[t], of_normed_TBH[t], resets_TB, lengths_B, t,
            )  # fmt: skip
            through_BH = torch.mm(of_products_TBG[t], w_hh_GH, out=buffer_BH)
        h_dtype, memory_dtype = ctx.dtypes
        grad_h = (past_BH + buffer_BH).to(h_dtype)
        grads = _of_norms(ctx.cell, products_TBG, gates_TBG, moments_TB4, of_inputs_TBG, resets_TB, bias_G is not None)
        dw_GH = of_products_TBG.flatten(0, 1).t() @ hs_SBH[:-1].flatten(0, 1)
        of_c: tuple[Tensor | None, Tensor | None] = (None, None)
        if gain_c_H is not None:
            hats_TBH = (memories_SBH[1:] - moments_TB4[..., 2:3]) * moments_TB4[..., 3:4]
            of_c = (of_normed_TBH * hats_TBH).sum((0, 1)), of_normed_TBH.sum((0, 1))
        return None, None, of_inputs_TBG, grad_h, of_memory_BH.to(memory_dtype), dw_GH, *grads, *of_c


def _of_norms(
    cell: str, products_TBG: Tensor, gates_TBG: Tensor, moments_TB4: Tensor, grads_TBG: Tensor, resets_TB: Tensor | None, biased: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradients of gain and bias of the norm of the recurrent product, from those of the gates."""
    hats_TBG = (products_TBG.float() - moments_TB4[..., 0:1]) * moments_TB4[..., 1:2]
    if resets_TB is not None:
        hats_TBG = torch.where(resets_TB[..., None], 0.0, hats_TBG)
    recurrent_TBG = grads_TBG.to(torch.float32, copy=True)
    if cell == "gru":  # the reset gate is between the candidate and its recurrent part
        hidden = recurrent_TBG.shape[-1] // 3
        recurrent_TBG[..., 2 * hidden :] *= gates_TBG[..., :hidden].float()
    return (recurrent_TBG * hats_TBG).sum((0, 1)), recurrent_TBG.sum((0, 1)) if biased else None


def _kernel(name: str, cell: str, hidden: int, like: Tensor) -> nvrtc.Kernel:
    precision = (("WIDE", int(like.dtype == torch.float32)), ("FP16", int(like.dtype == torch.float16)))
    constants = (("CELL", _CELLS[cell]), ("HIDDEN", hidden), *precision)
    return nvrtc.kernel(_SOURCE, name, constants, 0, like.get_device())
