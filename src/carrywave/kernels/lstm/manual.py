"""The LSTM layer for the CPU, with a handwritten backward.

Everything that does not depend on the previous step runs over the whole sequence at once: the derivatives of all gates, and the input
product and each weight gradient, which are one matrix product instead of one per step; if a sequence arrives in chunks, a weight gradient
is one product for all of them (see `deferred_gradients`). A step is left with one product in forward and one in backward. Padded steps
are handled as in `aten`: saturated gates pass c through bit for bit, and their gradients are exactly zero. Only steps at which a lane is
reset do more: they start from another carry there, and what would flow back over the reset goes to the initial carry instead. Gradients of
gradients go through `reference`.

Shapes: T time, B lane, I input, H hidden, G = 4H.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from carrywave.kernels import derivatives, reference
from carrywave.kernels.carry import AnyCarry, Carry
from carrywave.kernels.deferred_gradients import Deferred, deferred_for
from carrywave.kernels.lengths import into_outputs, last_real, real_steps
from carrywave.kernels.lstm.packed import FEWEST_USES, packed
from carrywave.kernels.step_marks import InitialGradients, StepMarks, begins, both_ways, where_any
from carrywave.kernels.torch_kernels import without_onednn
from carrywave.kernels.weights import Layer, LayerWeights, in_dtype

_SATURATED = 1.0e4  # as in `aten`


def layer(
    x_TBI: Tensor, carry: AnyCarry, weights: Layer, lengths_B: Tensor | None, *, clean: bool = False, marks: StepMarks | None = None
) -> tuple[Tensor, AnyCarry]:
    """One layer without projection: outputs [T, B, H·D] and the carry at each lane's last real step. `clean`: x is 0 at padded steps."""
    wide = torch.promote_types(x_TBI.dtype, torch.float32)
    if wide != x_TBI.dtype:
        # Half precision is for storage only: most processors lack the instructions to compute in it, and took 100 times as long.
        return in_dtype(wide, x_TBI, carry, weights, lengths_B, partial(layer, clean=clean), marks)
    apply: Any = _LSTMSequence.apply

    def run(x_TBI: Tensor, parts: Sequence[Tensor], each: LayerWeights, way: StepMarks | None) -> tuple[Tensor, Sequence[Tensor]]:
        bias_G = None if each.b_ih is None or each.b_hh is None else each.b_ih + each.b_hh
        y_TBH, *ends = apply(x_TBI, *parts, each.w_ih, each.w_hh, bias_G, *begins(way, parts), lengths_B, clean)
        return y_TBH, ends

    return both_ways(run, x_TBI, carry, weights, lengths_B, marks)


def serves(x_TBI: Tensor, weights: Layer) -> bool:
    """True if this backend supports the layer: on the CPU, without projection."""
    return x_TBI.device.type == "cpu" and weights[0].w_hr is None


class _LSTMSequence(torch.autograd.Function):
    """One direction over all steps."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TBI: Tensor,
        h_BH: Tensor,
        c_BH: Tensor,
        w_ih_GI: Tensor,
        w_hh_GH: Tensor,
        bias_G: Tensor | None,
        first_h_1H: Tensor | None,  # the initial carry
        first_c_1H: Tensor | None,
        resets_TB: Tensor | None,
        lengths_B: Tensor | None,
        clean: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        steps, lanes, inputs = x_TBI.shape
        hidden = w_hh_GH.shape[1]
        real_TB1 = None if lengths_B is None else real_steps(lengths_B, steps)
        # Saved for backward: if x needs a gradient, x itself instead of its masked copy, so that second derivatives can flow back to it.
        kept_TBI, ctx.masked = x_TBI, real_TB1 is None or clean or not ctx.needs_input_grad[0]
        if real_TB1 is not None and not clean:
            x_TBI = torch.where(real_TB1, x_TBI, 0.0)
            kept_TBI = x_TBI if ctx.masked else kept_TBI
        flat_NI = x_TBI.reshape(steps * lanes, inputs)
        y_TBH, c_TBH, tanh_TBH = (x_TBI.new_empty(steps, lanes, hidden) for _ in range(3))
        ctx.weights, ctx.deferred = (w_ih_GI, w_hh_GH), deferred_for(w_ih_GI, w_hh_GH)
        with without_onednn():
            of_inputs = packed(w_ih_GI, steps * lanes) if ctx.deferred is not None else None  # other chunks will use it too
            of_step = packed(w_hh_GH, lanes) if ctx.deferred is not None or steps >= FEWEST_USES else None
            if of_inputs is not None:
                product = of_inputs(flat_NI, bias_G)
            else:
                product = flat_NI @ w_ih_GI.t() if bias_G is None else torch.addmm(bias_G, flat_NI, w_ih_GI.t())
            gates_TBG = product.view(steps, lanes, 4 * hidden)
            if real_TB1 is not None:
                gates_TBG[..., :hidden].masked_fill_(~real_TB1, -_SATURATED)
                gates_TBG[..., hidden : 2 * hidden].masked_fill_(~real_TB1, _SATURATED)
            recurrent_HG = w_hh_GH.t()
            # Views of all steps, made once: cheaper than indexing in the loop.
            gates, after_h, after_c, tanhs = (each.unbind() for each in (gates_TBG, y_TBH, c_TBH, tanh_TBH))
            before_h, before_c = [h_BH, *after_h[:-1]], [c_BH, *after_c[:-1]]
            resets = where_any(resets_TB)
            both, cell, output = (part.unbind() for part in gates_TBG.split_with_sizes((2 * hidden, hidden, hidden), dim=-1))
            inputs_, forget = (part.unbind() for part in gates_TBG[..., : 2 * hidden].split_with_sizes((hidden, hidden), dim=-1))
            for t in range(steps):
                if t in resets and first_h_1H is not None and first_c_1H is not None:
                    before_h[t] = torch.where(resets[t], first_h_1H, before_h[t])
                    before_c[t] = torch.where(resets[t], first_c_1H, before_c[t])
                if of_step is not None:
                    gates[t].add_(of_step(before_h[t]))
                else:
                    gates[t].addmm_(before_h[t], recurrent_HG)
                both[t].sigmoid_()
                cell[t].tanh_()
                output[t].sigmoid_()
                torch.mul(forget[t], before_c[t], out=after_c[t])
                after_c[t].addcmul_(inputs_[t], cell[t])
                torch.tanh(after_c[t], out=tanhs[t])
                torch.mul(output[t], tanhs[t], out=after_h[t])
        if lengths_B is None or real_TB1 is None:
            end_BH = y_TBH[-1].clone()
        else:
            y_TBH.masked_fill_(~real_TB1, 0.0)
            end_BH = last_real(y_TBH, lengths_B, h_BH)
        # Not the outputs: they are the user's, to be changed in place. Backward has them again on the way to its slopes.
        given = (kept_TBI, h_BH, c_BH, w_ih_GI, w_hh_GH, bias_G, first_h_1H, first_c_1H)
        ctx.save_for_backward(*given, resets_TB, lengths_B, gates_TBG, c_TBH, tanh_TBH)
        ctx.set_materialize_grads(False)
        return y_TBH, end_BH, c_TBH[-1].clone()

    @staticmethod
    @derivatives.as_saved
    def backward(ctx: Any, grad_y_TBH: Tensor | None, grad_h_BH: Tensor | None, grad_c_BH: Tensor | None) -> tuple[Tensor | None, ...]:
        *given, resets_TB, lengths_B, gates_TBG, c_TBH, tanh_TBH = ctx.saved_tensors
        grads = (grad_y_TBH, grad_h_BH, grad_c_BH)
        if derivatives.beyond_numbers(*grads):
            return *derivatives.through(_plain(resets_TB, lengths_B), given, ctx.needs_input_grad[:8], grads), None, None, None
        x_TBI, h_BH, c_BH, w_ih_GI, w_hh_GH, _, first_h_1H, first_c_1H = given
        steps, lanes, inputs = x_TBI.shape
        hidden = w_hh_GH.shape[1]
        grad_y_TBH, grad_past_BH = into_outputs(grad_y_TBH, grad_h_BH, lengths_B, tanh_TBH)
        with without_onednn():
            past_c_TBH = None if resets_TB is None else torch.where(resets_TB[..., None], first_c_1H, torch.cat((c_BH[None], c_TBH[:-1])))
            slopes_TBG, through_TBH, y_TBH = _slopes(gates_TBG, c_BH, c_TBH, tanh_TBH, past_c_TBH)
            by_gate = slopes_TBG.view(steps, lanes, 4, hidden)
            slopes, from_cell, from_output = (each.unbind() for each in (slopes_TBG, by_gate[:, :, :3], by_gate[:, :, 3]))
            forget, through = gates_TBG[..., hidden : 2 * hidden].unbind(), through_TBH.unbind()
            grads_y = grad_y_TBH.unbind()
            dc_BH = torch.zeros_like(c_BH) if grad_c_BH is None else grad_c_BH.clone()
            dh_BH = grads_y[-1]
            resets, initial = where_any(resets_TB), InitialGradients((first_h_1H, first_c_1H), ctx.needs_input_grad[6:8])
            deferred: Deferred | None = ctx.deferred if ctx.deferred is not None and ctx.deferred.open else None
            weight_ih_GI, weight_hh_GH = ctx.weights
            to_inputs = None if deferred is None else packed(weight_ih_GI, steps * lanes, transposed=True)
            to_step = None if deferred is None else packed(weight_hh_GH, lanes, transposed=True)
            # From here on, the slopes are overwritten with the gradients of the gates.
            for t in range(steps - 1, -1, -1):
                dc_BH.addcmul_(dh_BH, through[t])
                from_cell[t].mul_(dc_BH[:, None])
                from_output[t].mul_(dh_BH)
                dc_BH.mul_(forget[t])
                if t in resets:
                    past_BH = slopes[t] @ w_hh_GH
                    initial.take(resets[t], past_BH, dc_BH)
                    dh_BH = past_BH.add_(grads_y[t - 1]) if t else past_BH
                elif t and to_step is not None:
                    dh_BH = to_step(slopes[t]).add_(grads_y[t - 1])
                elif t:
                    dh_BH = torch.addmm(grads_y[t - 1], slopes[t], w_hh_GH)
            grads_NG = slopes_TBG.view(steps * lanes, 4 * hidden)
            wants_x, wants_h, wants_c, wants_ih, wants_hh, wants_bias = ctx.needs_input_grad[:6]
            dx_TBI = None
            if wants_x:
                dx_TBI = (grads_NG @ w_ih_GI if to_inputs is None else to_inputs(grads_NG)).view(steps, lanes, inputs)
            if wants_h:
                dh_BH = dh_BH if 0 in resets else slopes[0] @ w_hh_GH
                dh_BH = dh_BH if grad_past_BH is None else dh_BH + grad_past_BH
            dw_ih_GI = dw_hh_GH = None
            if not ctx.masked:
                x_TBI = torch.where(real_steps(lengths_B, steps), x_TBI, 0.0)
            flat_NI, past_NH = x_TBI.reshape(steps * lanes, inputs), y_TBH[:-1].view(-1, hidden)
            if resets_TB is not None and first_h_1H is not None:
                h_BH = torch.where(resets_TB[0, :, None], first_h_1H, h_BH)
                past_NH = torch.where(resets_TB[1:, :, None], first_h_1H, y_TBH[:-1]).view(-1, hidden)
            if deferred is not None:
                deferred.product(weight_ih_GI, grads_NG, flat_NI)
                deferred.product(weight_hh_GH, grads_NG, torch.cat((h_BH, past_NH)))
            else:
                dw_ih_GI = grads_NG.t() @ flat_NI if wants_ih else None
                dw_hh_GH = slopes[0].t() @ h_BH if wants_hh else None
                if dw_hh_GH is not None and steps > 1:
                    dw_hh_GH.addmm_(grads_NG[lanes:].t(), past_NH)
            dbias_G = grads_NG.sum(0) if wants_bias else None
        of_carry = (dh_BH if wants_h else None, dc_BH if wants_c else None)
        return dx_TBI, *of_carry, dw_ih_GI, dw_hh_GH, dbias_G, *initial.parts, None, None, None


def _plain(resets_TB: Tensor | None, lengths_B: Tensor | None) -> derivatives.Plain:
    """One direction over all steps, by definition."""

    def run(
        x_TBI: Tensor, h_BH: Tensor, c_BH: Tensor, w_ih_GI: Tensor, w_hh_GH: Tensor, bias_G: Tensor | None, *first: Tensor
    ) -> tuple[Tensor, ...]:
        marks = None if resets_TB is None else StepMarks(resets_TB, Carry(*(part[None] for part in first)))
        weights = (LayerWeights(w_ih_GI, w_hh_GH, bias_G),)
        y_TBH, end = reference.layer(x_TBI, Carry(h_BH[None], c_BH[None]), weights, lengths_B, marks=marks)
        return y_TBH, *(part[0] for part in end)

    return run


def _slopes(
    gates_TBG: Tensor, first_c_BH: Tensor, c_TBH: Tensor, tanh_TBH: Tensor, past_c_TBH: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The factors that turn dc (input, forget, cell) and dh (output) into gate gradients, the one that turns dh into its part of dc, and
    the outputs, which need not be 0 at padded steps here: the gradients there are. `past_c_TBH`: c before each step, if lanes are reset.
    """
    steps, lanes, hidden = tanh_TBH.shape
    input_, _, cell, output = gates_TBG.view(steps, lanes, 4, hidden).unbind(2)
    slopes_TBG = torch.addcmul(gates_TBG, gates_TBG, gates_TBG, value=-1.0)  # s(1 - s), correct for all gates but the cell
    of_input, of_forget, of_cell, of_output = slopes_TBG.view(steps, lanes, 4, hidden).unbind(2)
    of_input.mul_(cell)
    if past_c_TBH is None:
        of_forget[0].mul_(first_c_BH)
        of_forget[1:].mul_(c_TBH[:-1])
    else:
        of_forget.mul_(past_c_TBH)
    torch.addcmul(input_, input_ * cell, cell, value=-1.0, out=of_cell)
    of_output.mul_(tanh_TBH)
    y_TBH = output * tanh_TBH
    return slopes_TBG, torch.addcmul(output, y_TBH, tanh_TBH, value=-1.0), y_TBH
