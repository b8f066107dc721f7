"""The GRU layer for the CPU, with a handwritten backward.

As for the LSTM (`kernels/lstm/manual.py`), everything that does not depend on the previous step runs over the whole sequence at once: the
derivatives of all gates, and the input product and each weight gradient, which are one matrix product instead of one per step; if a
sequence arrives in chunks, a weight gradient is one product for all of them (see `deferred_gradients`). Every gate's gradient is a slope
times the gradient of h, so a step of backward is one multiplication for all gates and one product. Padding follows the real steps of a
lane: it runs like any other step, on zeros, and nothing of it is read, so that its gradients are exactly zero. Gradients of gradients go
through `reference`.

Shapes: T time, B lane, N = T·B, I input, H hidden, G = 3H.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from carrywave.cells import gru
from carrywave.kernels import derivatives, reference
from carrywave.kernels.carry import AnyCarry
from carrywave.kernels.deferred_gradients import deferred_for
from carrywave.kernels.lengths import into_outputs, last_real, real_steps
from carrywave.kernels.step_marks import InitialGradients, StepMarks, begins, both_ways, where_any
from carrywave.kernels.torch_kernels import without_onednn
from carrywave.kernels.weights import Layer, LayerWeights, in_dtype


def layer(
    x_TBI: Tensor, carry: AnyCarry, weights: Layer, lengths_B: Tensor | None, *, clean: bool = False, marks: StepMarks | None = None
) -> tuple[Tensor, AnyCarry]:
    """One layer: outputs [T, B, H·D] and the carry at each lane's last real step. `clean`: x is 0 at padded steps."""
    wide = torch.promote_types(x_TBI.dtype, torch.float32)
    if wide != x_TBI.dtype:
        # Half precision is for storage only, as in the LSTM's.
        return in_dtype(wide, x_TBI, carry, weights, lengths_B, partial(layer, clean=clean), marks)
    apply: Any = _GRUSequence.apply

    def run(x_TBI: Tensor, parts: Sequence[Tensor], each: LayerWeights, way: StepMarks | None) -> tuple[Tensor, Sequence[Tensor]]:
        y_TBH, h_BH = apply(x_TBI, *parts, each.w_ih, each.w_hh, each.b_ih, each.b_hh, *begins(way, parts), lengths_B, clean)
        return y_TBH, [h_BH]

    return both_ways(run, x_TBI, carry, weights, lengths_B, marks)


def serves(x_TBI: Tensor, weights: Layer) -> bool:
    """True if this backend supports the layer: on the CPU."""
    return x_TBI.device.type == "cpu"


class _GRUSequence(torch.autograd.Function):
    """One direction over all steps."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TBI: Tensor,
        h_BH: Tensor,
        w_ih_GI: Tensor,
        w_hh_GH: Tensor,
        b_ih_G: Tensor | None,
        b_hh_G: Tensor | None,
        first_h_1H: Tensor | None,  # the initial carry
        resets_TB: Tensor | None,
        lengths_B: Tensor | None,
        clean: bool,
    ) -> tuple[Tensor, Tensor]:
        steps, lanes, inputs = x_TBI.shape
        hidden = w_hh_GH.shape[1]
        real_TB1 = None if lengths_B is None else real_steps(lengths_B, steps)
        # Saved for backward: if x needs a gradient, x itself instead of its masked copy, so that second derivatives can flow back to it.
        kept_TBI, ctx.masked = x_TBI, real_TB1 is None or clean or not ctx.needs_input_grad[0]
        if real_TB1 is not None and not clean:
            x_TBI = torch.where(real_TB1, x_TBI, 0.0)
            kept_TBI = x_TBI if ctx.masked else kept_TBI
        flat_NI = x_TBI.reshape(steps * lanes, inputs)
        # What the reset gate multiplies, and h after each step. The outputs are a copy of it: they are the user's, to be changed in place.
        past_TBH, h_TBH = (x_TBI.new_empty(steps, lanes, hidden) for _ in range(2))
        with without_onednn():
            bias_G, past_bias_H = _biases(b_ih_G, b_hh_G, w_hh_GH)
            gates_TBG = torch.addmm(bias_G, flat_NI, w_ih_GI.t()).view(steps, lanes, 3 * hidden)
            both_weights, new_weights = (part.t() for part in w_hh_GH.split_with_sizes((2 * hidden, hidden)))
            # Views of all steps, made once: cheaper than indexing in the loop.
            past, after = past_TBH.unbind(), h_TBH.unbind()
            before, resets = [h_BH, *after[:-1]], where_any(resets_TB)
            both, new = (part.unbind() for part in gates_TBG.split_with_sizes((2 * hidden, hidden), dim=-1))
            reset, update = (part.unbind() for part in gates_TBG[..., : 2 * hidden].split_with_sizes((hidden, hidden), dim=-1))
            for t in range(steps):
                if t in resets and first_h_1H is not None:
                    before[t] = torch.where(resets[t], first_h_1H, before[t])
                both[t].addmm_(before[t], both_weights)
                both[t].sigmoid_()
                torch.addmm(past_bias_H, before[t], new_weights, out=past[t])
                new[t].addcmul_(reset[t], past[t])
                new[t].tanh_()
                torch.lerp(new[t], before[t], update[t], out=after[t])
        if lengths_B is None or real_TB1 is None:
            y_TBH, end_BH = h_TBH.clone(), h_TBH[-1].clone()
        else:
            y_TBH = torch.where(real_TB1, h_TBH, 0.0)
            end_BH = last_real(y_TBH, lengths_B, h_BH)
        ctx.weights, ctx.deferred = (w_ih_GI, w_hh_GH), deferred_for(w_ih_GI, w_hh_GH)
        given = (kept_TBI, h_BH, w_ih_GI, w_hh_GH, b_ih_G, b_hh_G, first_h_1H)
        ctx.save_for_backward(*given, resets_TB, lengths_B, gates_TBG, past_TBH, h_TBH)
        ctx.set_materialize_grads(False)
        return y_TBH, end_BH

    @staticmethod
    @derivatives.as_saved
    def backward(ctx: Any, grad_y_TBH: Tensor | None, grad_h_BH: Tensor | None) -> tuple[Tensor | None, ...]:
        *given, resets_TB, lengths_B, gates_TBG, past_TBH, h_TBH = ctx.saved_tensors
        grads = (grad_y_TBH, grad_h_BH)
        if derivatives.beyond_numbers(*grads):
            return *derivatives.through(_plain(resets_TB, lengths_B), given, ctx.needs_input_grad[:7], grads), None, None, None
        x_TBI, h_BH, w_ih_GI, w_hh_GH, _, _, first_h_1H = given
        steps, lanes, inputs = x_TBI.shape
        hidden = w_hh_GH.shape[1]
        grad_y_TBH, grad_past_BH = into_outputs(grad_y_TBH, grad_h_BH, lengths_B, h_TBH)
        with without_onednn():
            before_TBH = torch.cat((h_BH[None], h_TBH[:-1]))
            if resets_TB is not None:
                before_TBH = torch.where(resets_TB[..., None], first_h_1H, before_TBH)
            slopes_TB4H = _slopes(gates_TBG, past_TBH, before_TBH)
            slopes_TBG, update_TBH = slopes_TB4H.view(steps, lanes, 4 * hidden)[..., : 3 * hidden], gates_TBG[..., hidden : 2 * hidden]
            rolled_GH = w_hh_GH.roll(hidden, 0)  # its rows in the order of the slopes
            whole, slopes, update, grads_y = (each.unbind() for each in (slopes_TB4H, slopes_TBG, update_TBH, grad_y_TBH))
            dh_BH = grads_y[-1]
            resets, initial = where_any(resets_TB), InitialGradients((first_h_1H,), ctx.needs_input_grad[6:7])
            # From here on, the slopes are overwritten with the gradients of the gates.
            for t in range(steps - 1, -1, -1):
                whole[t].mul_(dh_BH[:, None])
                if t in resets:
                    past_BH = (dh_BH * update[t]).addmm_(slopes[t], rolled_GH)
                    initial.take(resets[t], past_BH)
                    dh_BH = past_BH.add_(grads_y[t - 1]) if t else past_BH
                elif t:
                    dh_BH = torch.addcmul(grads_y[t - 1], dh_BH, update[t]).addmm_(slopes[t], rolled_GH)
            wants_x, wants_h, wants_ih, wants_hh, wants_b_ih, wants_b_hh = ctx.needs_input_grad[:6]
            if wants_h:
                dh_BH = dh_BH if 0 in resets else (dh_BH * update[0]).addmm_(slopes[0], rolled_GH)
                dh_BH = dh_BH if grad_past_BH is None else dh_BH + grad_past_BH
            grads_N4H = slopes_TB4H.view(steps * lanes, 4 * hidden)
            recurrent_NG, grads_NG = grads_N4H[:, : 3 * hidden], grads_N4H[:, hidden:]
            dx_TBI = (grads_NG @ w_ih_GI).view(steps, lanes, inputs) if wants_x else None
            dw_ih_GI = dw_hh_GH = None
            if not ctx.masked:
                x_TBI = torch.where(real_steps(lengths_B, steps), x_TBI, 0.0)
            flat_NI, before_NH = x_TBI.reshape(steps * lanes, inputs), before_TBH.view(steps * lanes, hidden)
            if ctx.deferred is not None and ctx.deferred.open:
                weight_ih_GI, weight_hh_GH = ctx.weights
                ctx.deferred.product(weight_ih_GI, grads_NG, flat_NI)
                ctx.deferred.product(weight_hh_GH, recurrent_NG, before_NH, shift=hidden)
            else:
                dw_ih_GI = grads_NG.t() @ flat_NI if wants_ih else None
                dw_hh_GH = (recurrent_NG.t() @ before_NH).roll(-hidden, 0) if wants_hh else None
            db_ih_G = grads_NG.sum(0) if wants_b_ih else None
            db_hh_G = recurrent_NG.sum(0).roll(-hidden) if wants_b_hh else None
        return dx_TBI, dh_BH if wants_h else None, dw_ih_GI, dw_hh_GH, db_ih_G, db_hh_G, *initial.parts, None, None, None


def _plain(resets_TB: Tensor | None, lengths_B: Tensor | None) -> derivatives.Plain:
    """One direction over all steps, by definition."""

    def run(x_TBI: Tensor, h_BH: Tensor, *others: Any) -> tuple[Tensor, ...]:
        *weights, first_h_1H = others
        marks = None if resets_TB is None else StepMarks(resets_TB, gru.GRUCarry(first_h_1H[None]))
        y_TBH, [end_DBH] = reference.layer(x_TBI, gru.GRUCarry(h_BH[None]), (LayerWeights(*weights),), lengths_B, gru.CELL, marks=marks)
        return y_TBH, end_DBH[0]

    return run


def _biases(b_ih_G: Tensor | None, b_hh_G: Tensor | None, like_GH: Tensor) -> tuple[Tensor, Tensor]:
    """What is added to the input product, and, apart from it, to what the reset gate multiplies."""
    rows, hidden = like_GH.shape
    if b_ih_G is None or b_hh_G is None:
        return like_GH.new_zeros(rows), like_GH.new_zeros(hidden)
    both, past_H = b_hh_G.split_with_sizes((2 * hidden, hidden))
    bias_G = b_ih_G.clone()
    bias_G[: 2 * hidden] += both
    return bias_G, past_H


def _slopes(gates_TBG: Tensor, past_TBH: Tensor, before_TBH: Tensor) -> Tensor:
    """The factors [T, B, 4, H] that turn the gradient of h into those of what the reset gate multiplies, of the reset and the update gate,
    and of the new value: the first three are the gradient of the recurrent product, the last three that of the input product.
    """
    steps, lanes, hidden = past_TBH.shape
    reset, update, new = gates_TBG.view(steps, lanes, 3, hidden).unbind(2)
    slopes_TB4H = gates_TBG.new_empty(steps, lanes, 4, hidden)
    of_past, of_reset, of_update, of_new = slopes_TB4H.unbind(2)
    rest = 1.0 - update
    torch.addcmul(rest, rest * new, new, value=-1.0, out=of_new)
    torch.mul(of_new, reset, out=of_past)
    torch.mul(of_past, past_TBH, out=of_reset).mul_(1.0 - reset)
    torch.sub(before_TBH, new, out=of_update).mul_(update).mul_(rest)
    return slopes_TB4H
