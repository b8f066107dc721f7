"""Runs a stack of recurrent layers on one GPU through the persistent kernels: one after the other, or as a wavefront.

In a wave the layers run concurrently on different multiprocessors, one time chunk apart, each on its own stream: layer 1 starts as soon
as layer 0 has finished its first chunk, and C + L - 1 rounds replace C × L. It is the pipeline over devices again, inside one device.
Whatever does not depend on the previous step is a matrix product: that of the inputs, chunk by chunk, and both weight gradients, over
the whole sequence. The memory of a cell is float32 throughout: c of an LSTM, and a second, exact copy of a GRU's h.

The blocks of all concurrent layers fit on the GPU together, so that none waits for a multiprocessor that another one holds; only in
backward, small layers may have to wait their turn (see `layout`).

Shapes: T time, B lane, I input (J padded), H hidden (P padded), Q = 4P, N = T·B, S = T + 1, C chunks, L layers, E groups of lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from carrywave.cells.cell import by_name
from carrywave.kernels import derivatives
from carrywave.kernels.carry import AnyCarries, AnyCarry
from carrywave.kernels.hopper import marks as marking
from carrywave.kernels.hopper import recurrence, stack
from carrywave.kernels.hopper.buffers import Activations, Ends
from carrywave.kernels.hopper.joined import Turned
from carrywave.kernels.hopper.layout import Wave
from carrywave.kernels.hopper.recurrence import Packed, SortedLanes
from carrywave.kernels.step_marks import StepMarks
from carrywave.kernels.weights import LayerWeights

_OF_LAYER = 9  # arguments per layer: h, memory, four weights, the mask, and what resets put into h and memory


def run(
    x_TBI: Tensor,
    carries: AnyCarries,
    layers: Sequence[LayerWeights],
    masks: Sequence[Tensor | None],
    lengths_B: Tensor | None,
    wave: Wave,
    *,
    marks: Sequence[StepMarks | None] | None = None,
    clean: bool = False,
) -> tuple[Tensor, AnyCarries]:
    """Run the layers in order, each one's outputs times its mask feeding the next: outputs [T, B, H] of the last one, and the carries.

    `clean`: padding already holds zeros, as in the output of a layer.
    """
    check(x_TBI, carries, layers, wave.shape.cell)
    flat: list[Tensor | None] = []
    for number, (carry, weights, mask) in enumerate(zip(carries, layers, masks, strict=True)):
        of_layer = None if marks is None else marks[number]
        initial = None if of_layer is None or of_layer.resets is None else of_layer.initial
        begin = [None, None] if initial is None else [initial[0][0, 0], initial[-1][0, 0]]
        flat += [carry[0][0], memory_of(carry), *weights[:4], mask, *begin]
    apply: Any = _Stack.apply
    # Passed on, because needs_input_grad ignores no_grad: it stays True for inputs that require gradients.
    y_TBH, *ends = apply(wave, torch.is_grad_enabled(), x_TBI, (lengths_B, marks), clean, *flat)
    return y_TBH, tuple(carry_of(wave, h[None], memory[None]) for h, memory in zip(ends[::2], ends[1::2], strict=True))


def memory_of(carry: AnyCarry) -> Tensor:
    """[B, …]: the memory of a layer as the kernels have it: h itself if it is the whole carry, else the other parts, unit by unit."""
    parts = carry[1:] or carry
    if len(parts) == 1:
        return parts[0][0]
    c, n, m = (part[0] for part in parts)
    scale = (m - m.detach()).exp()  # 1: in the kernels' gradients, m is what it is while c and n change with it (see `cell.cuh`)
    return torch.stack((c * scale, n * scale, m, torch.zeros_like(m)), dim=-1).flatten(1)


def carry_of(wave: Wave, h: Tensor, memory: Tensor) -> AnyCarry:
    """The carry of a layer, from its h and memory."""
    cell = by_name(wave.shape.cell)
    parts: tuple[Tensor, ...] = (memory,)
    if wave.shape.memory > 1:
        c, n, m, _ = memory.view(*memory.shape[:-1], -1, wave.shape.memory).unbind(-1)
        scale = (m.detach() - m).exp()
        parts = c * scale, n * scale, m
    carry: AnyCarry = cell.carry(h, *parts) if len(cell.parts) > 1 else cell.carry(*parts)
    return carry


def check(x_TBI: Tensor, carries: AnyCarries, layers: Sequence[LayerWeights], cell: str) -> None:
    """Check what the kernels take on trust."""
    (lanes, width), gates = x_TBI.shape[1:], by_name(cell).gates
    for carry, weights in zip(carries, layers, strict=True):
        hidden = weights.w_ih.shape[0] // gates
        if weights.w_ih.shape != (gates * hidden, width):
            raise ValueError(f"inputs are {width} wide, but the weights {list(weights.w_ih.shape)} expect {weights.w_ih.shape[1]}")
        if any(part.shape != (1, lanes, hidden) for part in carry):
            got = " and ".join(str(list(part.shape)) for part in carry)
            raise ValueError(f"the carry has shapes {got}; expected [1, {lanes}, {hidden}] for each part")
        for tensor in (*carry, *weights[:4]):
            if tensor is not None and tensor.device != x_TBI.device:
                raise ValueError(f"x is on {x_TBI.device}, but the weights or the carry are on {tensor.device}; move them to one device")
        width = hidden


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        wave: Wave,
        wanted: bool,
        x_TBI: Tensor,
        lengths_and_marks: tuple[Tensor | None, Sequence[StepMarks | None] | None],
        clean: bool,
        *flat: Tensor | None,
    ) -> tuple[Tensor, ...]:
        (lengths_B, marks), steps = lengths_and_marks, x_TBI.shape[0]
        given = list(zip(*[iter(flat)] * _OF_LAYER, strict=True))
        hidden = given[0][2].shape[0] // by_name(wave.shape.cell).gates
        like, kept = x_TBI.new_empty(0), wanted and any(ctx.needs_input_grad)
        spans = stack.spans_of(steps, wave.chunk_steps)
        dealt = [SortedLanes(None, None) for _ in spans] if lengths_B is None else recurrence.deal(lengths_B, steps, wave.chunk_steps, like)
        resets = marking.resets_of(None if marks is None or marks[0] is None else marks[0].resets)
        marked = marking.marks_of(marks, len(given), resets, wave.shape, x_TBI)
        masks = [padded_mask(each[6], wave, like) for each in given]
        carries = [(h_BH, c_BH) for h_BH, c_BH, *_ in given]
        layers = stack.activations(wave.shape, carries, [mask is not None for mask in masks], steps, len(spans), like, kept=kept)
        layers[0] = layers[0]._replace(inputs_NJ=rows_of(x_TBI, None if clean else lengths_B))
        layers = [layer._replace(mask=mask) for layer, mask in zip(layers, masks, strict=True)]
        packs = [
            stack.packed(LayerWeights(*each[2:6]), wave.shape, pitch_of(layer), like, transposed=kept)
            for layer, each in zip(layers, given, strict=True)
        ]
        if kept:
            for kinds in {each.kinds for each in marked}:
                recurrence.prepare_backward(wave.back, like, kinds)
        stack.forward(wave, packs, layers, spans, dealt, marked)
        outputs = [layers[-1].hs_SBP[1:, :, :hidden]]
        for layer, (h_BH, c_BH) in zip(layers, carries, strict=True):
            outputs += stack.last_carry(layer, lengths_B, hidden, (h_BH.dtype, c_BH.dtype))
        if kept:
            saved = [tensor for layer, pack in zip(layers, packs, strict=True) for tensor in (*layer, *turned_of(pack))]
            ctx.save_for_backward(*saved, *(tensor for each in dealt for tensor in each))
            ctx.wave, ctx.x_shape, ctx.hidden, ctx.spans, ctx.marked = wave, x_TBI.shape, hidden, spans, marked
            ctx.dtypes = [(h.dtype, c.dtype, w.dtype, w.shape[1], b is not None) for h, c, w, _, b, *_ in given]
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @derivatives.as_saved
    def backward(ctx: Any, grad_y_TBH: Tensor | None, *grad_ends: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_more(grad_y_TBH, *grad_ends)
        wave, hidden, spans, marked, saved = ctx.wave, ctx.hidden, ctx.spans, ctx.marked, list(ctx.saved_tensors)
        count, of_layer = len(ctx.dtypes), len(Activations._fields) + len(Turned._fields)
        each = [saved[number * of_layer : (number + 1) * of_layer] for number in range(count)]
        layers, weights = [Activations(*tensors[:-3]) for tensors in each], [Turned(*tensors[-3:]) for tensors in each]
        dealt = [SortedLanes(*pair) for pair in zip(*[iter(saved[count * of_layer :])] * 2, strict=True)]
        wants = list(zip(*[iter(ctx.needs_input_grad[5:])] * _OF_LAYER, strict=True))
        grads = stack.gradients(layers, wave.back, len(spans), learned=marked[0].memory_P is not None)
        inputs_NJ = layers[0].inputs_NJ
        assert inputs_NJ is not None
        dx_NJ = torch.empty_like(inputs_NJ) if ctx.needs_input_grad[2] else None
        products = [
            (torch.empty_like(w_ih_QJ) if want[2] else None, w_ih_QJ.new_empty(len(w_ih_QJ), wave.back.hidden) if want[3] else None)
            for (w_ih_QJ, *_), want in zip(weights, wants, strict=True)
        ]

        def finish(number: int) -> None:
            layer = layers[number]
            assert layer.inputs_NJ is not None
            stack.weight_products(grads[number].gates_NQ, layer.inputs_NJ, layer.hs_SBP, products[number], marked[number])

        grad_y = grad_outputs(grad_y_TBH, ctx.x_shape, wave, inputs_NJ)
        stack.backward(wave, weights, layers, grads, grad_y, padded_ends(grad_ends, wave), spans, dealt, dx_NJ, marked, finish)
        results: list[Tensor | None] = []
        for number, (h_dtype, c_dtype, w_dtype, width, biased) in enumerate(ctx.dtypes):
            dw_ih = dw_hh = db = None
            if any(wants[number][2:6]):
                bias_EQ = grads[number].bias_CEQ.flatten(0, 1)
                dw_ih, dw_hh, db = recurrence.unpack(wave.back, *products[number], bias_EQ, inputs_NJ, hidden, width, w_dtype)
            of_h, of_memory = (each[0] for each in grads[number].starts)
            results += [of_h[:, :hidden].to(h_dtype) if wants[number][0] else None]
            results += [of_memory[:, : hidden * wave.back.memory].to(c_dtype) if wants[number][1] else None]
            results += [dw_ih, dw_hh, *(db.unbind() if db is not None and biased else (None, None)), None]
            begin: tuple[Tensor | None, Tensor | None] = (None, None)
            if any(wants[number][7:]):
                begin = stack.initial_gradients(grads[number], weights[number].w_hh_PQ, marked[number])
            results += [None if each is None else each[:hidden].to(w_dtype) for each in begin]
        return None, None, input_gradient(dx_NJ, ctx.x_shape), None, None, *results


def refuse_more(*grads: Tensor | None) -> None:
    """Raise, in a backward that received these gradients, if more than numbers is requested."""
    # What plain operations would need from every layer is not saved: no training step would use that memory.
    remedy = "build the layers with kernel='reference' to differentiate gradients again or to compute many at once"
    derivatives.only_numbers("the persistent recurrent kernel", remedy, *grads)


def rows_of(x_TBI: Tensor, lengths_B: Tensor | None) -> Tensor:
    """[N, J]: x as the first layer's product takes it; with lengths, 0 at padded steps."""
    return recurrence.aligned(x_TBI.reshape(-1, x_TBI.shape[-1])) if lengths_B is None else recurrence.real_rows(x_TBI, lengths_B)


def pitch_of(layer: Activations) -> int:
    """The padded width of a layer's inputs."""
    assert layer.inputs_NJ is not None
    return layer.inputs_NJ.shape[1]


def turned_of(pack: Packed) -> Turned:
    """The weights as backward reads them."""
    assert pack.turned_PQ is not None  # packed for backward
    return Turned(pack.w_ih_QJ, pack.turned_PQ, pack.turned_ih_JQ)


def padded_mask(mask: Tensor | None, wave: Wave, like: Tensor) -> Tensor | None:
    """A mask of outputs in the kernel's width and dtype."""
    return None if mask is None else recurrence.padded_to(mask, wave.shape.width, like.dtype)


def grad_outputs(grad_y_TBH: Tensor | None, x_shape: torch.Size, wave: Wave, like: Tensor) -> Tensor:
    """The gradient of the outputs as the kernel reads it."""
    if grad_y_TBH is None:
        return like.new_zeros(*x_shape[:2], wave.back.width)
    return recurrence.padded_to(grad_y_TBH, wave.back.width, like.dtype)


def padded_ends(grad_ends: Sequence[Tensor | None], wave: Wave) -> list[Ends]:
    """The gradients of each layer's last h and c as the kernel reads them."""
    widths = [wave.back.width, wave.back.width * wave.back.memory] * (len(grad_ends) // 2)
    ends = [
        None if grad is None else recurrence.padded_to(grad, width, torch.float32) for grad, width in zip(grad_ends, widths, strict=True)
    ]
    return list(zip(ends[::2], ends[1::2], strict=True))


def input_gradient(dx_NJ: Tensor | None, x_shape: torch.Size) -> Tensor | None:
    """The gradient of x, without padding."""
    return None if dx_NJ is None else dx_NJ[:, : x_shape[-1]].reshape(x_shape)
