"""Runs a stack of LSTM layers on one GPU through the persistent kernels: one after the other, or as a wavefront.

In a wave the layers run concurrently on different multiprocessors, one time chunk apart, each on its own stream: layer 1 starts as soon
as layer 0 has finished its first chunk, and C + L - 1 rounds replace C × L. It is the pipeline over devices again, inside one device.
Whatever does not depend on the previous step is a matrix product: that of the inputs, chunk by chunk, and both weight gradients, over
the whole sequence. c is float32 throughout.

The blocks of all concurrent layers fit on the GPU together, so that none waits for a multiprocessor that another one holds; only in
backward, small layers may have to wait their turn (see `layout`).

Shapes: T time, B lane, I input (J padded), H hidden (P padded), Q = 4P, N = T·B, S = T + 1, C chunks, L layers, E groups of lanes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from carrywave.kernels import derivatives
from carrywave.kernels.carry import Carries, Carry
from carrywave.kernels.hopper import recurrence
from carrywave.kernels.hopper.layout import Wave
from carrywave.kernels.hopper.recurrence import Dealt
from carrywave.kernels.weights import LayerWeights

_OF_LAYER = 7  # arguments per layer: h, c, four weights, the mask


def run(
    x_TBI: Tensor,
    carries: Carries,
    layers: Sequence[LayerWeights],
    masks: Sequence[Tensor | None],
    lengths_B: Tensor | None,
    wave: Wave,
) -> tuple[Tensor, Carries]:
    """Run the layers in order, each one's outputs times its mask feeding the next: outputs [T, B, H] of the last one, and the carries."""
    flat: list[Tensor | None] = []
    width = x_TBI.shape[-1]
    for carry, weights, mask in zip(carries, layers, masks, strict=True):
        _check(x_TBI, width, carry, weights)
        width = weights.w_hh.shape[1]
        flat += [carry.h[0], carry.c[0], *weights[:4], mask]
    apply: Any = _Stack.apply
    # Passed on, because needs_input_grad ignores no_grad: it stays True for inputs that require gradients.
    y_TBH, *ends = apply(wave, torch.is_grad_enabled(), x_TBI, lengths_B, *flat)
    return y_TBH, tuple(Carry(h[None], c[None]) for h, c in zip(ends[::2], ends[1::2], strict=True))


def _check(x_TBI: Tensor, width: int, carry: Carry, weights: LayerWeights) -> None:
    """Check what the kernels take on trust."""
    lanes, hidden = x_TBI.shape[1], weights.w_hh.shape[1]
    if weights.w_ih.shape != (4 * hidden, width):
        raise ValueError(f"inputs are {width} wide, but the weights {list(weights.w_ih.shape)} expect {weights.w_ih.shape[1]}")
    if carry.h.shape != (1, lanes, hidden) or carry.c.shape != (1, lanes, hidden):
        raise ValueError(f"the carry has shapes {list(carry.h.shape)} and {list(carry.c.shape)}; expected [1, {lanes}, {hidden}] for both")
    for tensor in (*carry, *weights[:4]):
        if tensor is not None and tensor.device != x_TBI.device:
            raise ValueError(f"x is on {x_TBI.device}, but the weights or the carry are on {tensor.device}; move them to one device")


class _Layer(NamedTuple):
    """What backward needs from one layer."""

    inputs_NJ: Tensor
    w_ih_QJ: Tensor
    turned_PQ: Tensor | None
    hs_SBP: Tensor
    gates_NQ: Tensor
    cells_TBP: Tensor | None
    cs_CBP: Tensor  # c at the start of each chunk, and after the last one
    mask: Tensor | None


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, wave: Wave, wanted: bool, x_TBI: Tensor, lengths_B: Tensor | None, *flat: Tensor | None) -> tuple[Tensor, ...]:
        steps, lanes = x_TBI.shape[:2]
        given = list(zip(*[iter(flat)] * _OF_LAYER, strict=True))
        hidden = given[0][3].shape[1]
        shape, like, kept = wave.shape, x_TBI.new_empty(0), wanted and any(ctx.needs_input_grad)
        spans = _spans(steps, wave.chunk_steps)
        dealt = [Dealt(None, None) for _ in spans] if lengths_B is None else recurrence.deal(lengths_B, steps, wave.chunk_steps, like)
        layers: list[_Layer] = []
        packs = []
        whole = x_TBI.reshape(steps * lanes, -1)
        inputs_NJ = recurrence.aligned(whole) if lengths_B is None else recurrence.real_rows(x_TBI, lengths_B)
        for number, (h_BH, c_BH, *weights, mask) in enumerate(given):
            if number:
                # With a mask, the inputs are a product, written chunk by chunk; without one, they are h itself.
                before = layers[-1]
                whole = before.hs_SBP[1:].view(steps * lanes, shape.hidden)
                inputs_NJ = whole if before.mask is None else torch.empty_like(whole)
            packed = recurrence.pack(LayerWeights(*weights), shape, inputs_NJ.shape[1], like, transposed=kept)
            cs_CBP = like.new_empty(len(spans) + 1, lanes, shape.hidden, dtype=torch.float32)
            cs_CBP[0].copy_(recurrence.padded_to(c_BH, shape.hidden, torch.float32))
            cells = like.new_empty(steps, lanes, shape.hidden, dtype=torch.float32) if kept else None
            gates = like.new_empty(steps * lanes, 4 * shape.hidden)
            mask = None if mask is None else recurrence.padded_to(mask, shape.hidden, like.dtype)
            hs = recurrence.states(h_BH, shape, steps, like)
            layers.append(_Layer(inputs_NJ, packed.w_ih_QJ, packed.turned_PQ, hs, gates, cells, cs_CBP, mask))
            packs.append(packed)
        if kept:
            recurrence.prepare_backward(wave.back, like)
        with _Streams(wave.streams, like.device) as streams:
            for number, chunk in _diagonals(len(layers), len(spans)):
                layer, (first, end) = layers[number], spans[chunk]
                rows = slice(first * lanes, end * lanes)
                with streams.of(number, number - 1, chunk):
                    mask = layers[number - 1].mask if number else None
                    if mask is not None:
                        part = mask if mask.shape[0] == 1 else mask[first:end]
                        masked = layer.inputs_NJ[rows].view(end - first, lanes, shape.hidden)
                        torch.mul(layers[number - 1].hs_SBP[first + 1 : end + 1], part, out=masked)
                    gates = layer.gates_NQ[rows]
                    torch.addmm(packs[number].bias_Q, layer.inputs_NJ[rows], layer.w_ih_QJ.t(), out=gates)
                    cells = None if layer.cells_TBP is None else layer.cells_TBP[first:end]
                    recurrence.forward(
                        shape, packs[number], layer.hs_SBP[first : end + 1], gates, cells,
                        layer.cs_CBP[chunk], layer.cs_CBP[chunk + 1], dealt[chunk],
                    )  # fmt: skip
        outputs = [layers[-1].hs_SBP[1:, :, :hidden]]
        for layer, (h_BH, c_BH, *_) in zip(layers, given, strict=True):
            if lengths_B is None:
                h = layer.hs_SBP[-1, :, :hidden].to(h_BH.dtype, copy=True)
            else:
                h = recurrence.last_state(layer.hs_SBP, lengths_B, hidden, h_BH.dtype)
            outputs += [h, layer.cs_CBP[-1, :, :hidden].to(c_BH.dtype, copy=True)]
        if kept:
            saved = [tensor for layer in layers for tensor in layer]
            ctx.save_for_backward(*saved, *(tensor for each in dealt for tensor in each))
            ctx.wave, ctx.x_shape, ctx.hidden, ctx.spans = wave, x_TBI.shape, hidden, spans
            ctx.dtypes = [(h.dtype, c.dtype, w.dtype, w.shape[1], b is not None) for h, c, w, _, b, *_ in given]
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @derivatives.as_saved
    def backward(ctx: Any, grad_y_TBH: Tensor | None, *grad_ends: Tensor | None) -> tuple[Tensor | None, ...]:
        # What plain operations would need from every layer is not saved: no training step would use that memory.
        remedy = "build the LSTM with kernel='reference' to differentiate gradients again or to compute many at once"
        derivatives.only_numbers("the persistent LSTM kernel", remedy, grad_y_TBH, *grad_ends)
        wave, (steps, lanes, inputs), hidden, spans = ctx.wave, ctx.x_shape, ctx.hidden, ctx.spans
        shape, saved = wave.back, list(ctx.saved_tensors)
        count, of_layer = len(ctx.dtypes), len(_Layer._fields)
        layers = [_Layer(*saved[number * of_layer : (number + 1) * of_layer]) for number in range(count)]
        dealt = [Dealt(*pair) for pair in zip(*[iter(saved[count * of_layer :])] * 2, strict=True)]
        like = layers[0].hs_SBP.new_empty(0)
        wants = list(zip(*[iter(ctx.needs_input_grad[4:])] * _OF_LAYER, strict=True))
        given_TBP = None if grad_y_TBH is None else recurrence.padded_to(grad_y_TBH, shape.hidden, like.dtype)
        buffers = [recurrence.gradients(layer.gates_NQ, shape, len(spans)) for layer in layers]
        ys, bounds, biases = [], [], []
        for number in range(count):
            top = number == count - 1
            make = like.new_zeros if top and given_TBP is None else like.new_empty
            ys.append(given_TBP if top and given_TBP is not None else make(steps, lanes, shape.hidden))
            # Gradients of h and c at the start of each chunk, and after the last one.
            bound = like.new_empty(2, len(spans) + 1, lanes, shape.hidden, dtype=torch.float32)
            for end, grad in zip(bound[:, -1], grad_ends[2 * number : 2 * number + 2], strict=True):
                end.zero_() if grad is None else end.copy_(recurrence.padded_to(grad, shape.hidden, torch.float32))
            bounds.append(bound)
            biases.append(like.new_empty(len(spans), shape.groups, 4 * shape.hidden, dtype=torch.float32))
        dx_NJ = torch.empty_like(layers[0].inputs_NJ) if ctx.needs_input_grad[2] else None
        products: list[tuple[Tensor | None, Tensor | None]] = [
            (torch.empty_like(layer.w_ih_QJ) if want[2] else None, like.new_empty(4 * shape.hidden, shape.hidden) if want[3] else None)
            for layer, want in zip(layers, wants, strict=True)
        ]
        with _Streams(wave.streams, like.device) as streams:
            for turned_number, turned_chunk in _diagonals(count, len(spans)):
                number, chunk = count - 1 - turned_number, len(spans) - 1 - turned_chunk
                layer, (first, end), (grads_NQ, ring) = layers[number], spans[chunk], buffers[number]
                rows = slice(first * lanes, end * lanes)
                with streams.of(number, number + 1, chunk):
                    assert layer.turned_PQ is not None  # saved by forward
                    assert layer.cells_TBP is not None
                    bound = bounds[number]
                    recurrence.backward(
                        shape, layer.turned_PQ, layer.gates_NQ[rows], layer.cells_TBP[first:end], layer.cs_CBP[chunk],
                        ys[number][first:end], (bound[0, chunk + 1], bound[1, chunk + 1]), grads_NQ[rows],
                        (bound[0, chunk], bound[1, chunk]), biases[number][chunk], ring[chunk], dealt[chunk],
                    )  # fmt: skip
                    if number:
                        below = ys[number - 1][first:end]
                        torch.mm(grads_NQ[rows], layer.w_ih_QJ, out=below.view(-1, shape.hidden))
                        mask = layers[number - 1].mask
                        if mask is not None:
                            below.mul_(mask if mask.shape[0] == 1 else mask[first:end])
                    elif dx_NJ is not None:
                        torch.mm(grads_NQ[rows], layer.w_ih_QJ, out=dx_NJ[rows])
                    if chunk == 0:
                        into_ih, into_hh = products[number]
                        if into_ih is not None:
                            torch.mm(grads_NQ.t(), layer.inputs_NJ, out=into_ih)
                        if into_hh is not None:
                            torch.mm(grads_NQ.t(), layer.hs_SBP[:-1].view(steps * lanes, shape.hidden), out=into_hh)
        results: list[Tensor | None] = []
        for number, (h_dtype, c_dtype, w_dtype, width, biased) in enumerate(ctx.dtypes):
            of_ih, of_hh = products[number]
            dw_ih = dw_hh = db = None
            if any(wants[number][2:6]):
                dw_ih, dw_hh, db = recurrence.unpack(of_ih, of_hh, biases[number].flatten(0, 1), like, hidden, width, w_dtype)
            results += [bounds[number][0, 0, :, :hidden].to(h_dtype) if wants[number][0] else None]
            results += [bounds[number][1, 0, :, :hidden].to(c_dtype) if wants[number][1] else None]
            results += [dw_ih, dw_hh, *(db.unbind() if db is not None and biased else (None, None)), None]
        dx = None if dx_NJ is None else dx_NJ[:, :inputs].reshape(steps, lanes, inputs)
        return None, None, dx, None, *results


class _Streams:
    """Runs the work of several layers concurrently: on one stream each, which starts after all earlier work and is joined at the end.

    With one stream, the work stays on the current stream, in order.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.count, self.device = count, device
        self.streams: tuple[torch.cuda.Stream, ...] = ()
        self.done: dict[tuple[int, int], torch.cuda.Event] = {}

    def __enter__(self) -> _Streams:
        if self.count > 1:
            self.home = torch.cuda.current_stream(self.device)
            self.streams = _side_streams(self.count, self.device)
        for stream in self.streams:
            stream.wait_stream(self.home)
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self.streams:
            self.home.wait_stream(stream)

    @contextmanager
    def of(self, layer: int, before: int, chunk: int) -> Iterator[None]:
        """Inside this context, a layer works on a chunk, after layer `before` has finished the same chunk."""
        if not self.streams:
            yield
            return
        stream = self.streams[layer % self.count]
        ready = self.done.get((before, chunk))
        if ready is not None:
            stream.wait_event(ready)
        with torch.cuda.stream(stream):
            yield
        self.done[layer, chunk] = stream.record_event()


@cache
def _side_streams(count: int, device: torch.device) -> tuple[torch.cuda.Stream, ...]:
    return tuple(torch.cuda.Stream(device) for _ in range(count))  # type: ignore[no-untyped-call]


def _diagonals(layers: int, chunks: int) -> Iterator[tuple[int, int]]:
    """(layer, chunk) in an order in which everything follows its dependencies, and streams take turns."""
    for diagonal in range(layers + chunks - 1):
        for layer in range(max(0, diagonal - chunks + 1), min(layers, diagonal + 1)):
            yield layer, diagonal - layer


def _spans(steps: int, chunk_steps: int) -> list[tuple[int, int]]:
    return [(first, min(first + chunk_steps, steps)) for first in range(0, steps, chunk_steps)]
