"""A stack of recurrent layers over some steps, forward and backward: launches and matrix products on buffers that the caller holds.

The steps are cut into pieces, and layers that run concurrently are a piece apart, each on its own stream. The buffers may be those of a
whole window, or the part of them that belongs to one chunk: h, c and their gradients at its first and last step are where the chunks before
and after it have left them.

Shapes: T time, B lane, J input (padded), H hidden (P padded), Q = 4P, N = T·B, S = T + 1, C pieces, E groups of lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from carrywave.kernels import pass_cache
from carrywave.kernels.hopper import joined as joining
from carrywave.kernels.hopper import recurrence
from carrywave.kernels.hopper.buffers import NOTHING, Activations, Ends, LayerGradients, LayerMarks, steps_of
from carrywave.kernels.hopper.joined import Turned
from carrywave.kernels.hopper.layout import LayerShape, Wave
from carrywave.kernels.hopper.recurrence import Packed, SortedLanes
from carrywave.kernels.weights import LayerWeights
from carrywave.kernels.window import Span

_PRODUCTS_AT_ONCE = 4  # weight gradients: one does not fill the GPU


def packed(weights: LayerWeights, shape: LayerShape, pitch: int, like: Tensor, *, transposed: bool) -> Packed:
    """The weights in the kernel's order and dtype, packed once a pass."""
    how = shape.hidden, shape.heads, shape.cell, shape.joined > 1, pitch, like.dtype, like.device, transposed
    return pass_cache.cached(weights[:4], how, lambda: recurrence.pack(weights, shape, pitch, like, transposed=transposed))


def activations(
    shape: LayerShape,
    carries: Sequence[tuple[Tensor, Tensor]],
    masked: Sequence[bool],
    steps: int,
    pieces: int,
    like: Tensor,
    *,
    kept: bool,
) -> list[Activations]:
    """Buffers for these steps, each layer with its carry [B, H] in place. `masked`: which outputs are multiplied by a mask."""
    lanes, made = carries[0][0].shape[0], list[Activations]()
    for number, (h_BH, c_BH) in enumerate(carries):
        inputs_NJ = None
        if number:
            # With a mask, the inputs are a product; without one, they are h itself.
            below = made[-1].hs_SBP[1:].view(steps * lanes, shape.width)
            inputs_NJ = below
            if masked[number - 1]:
                inputs_NJ = torch.empty_like(below) if shape.joined == 1 else recurrence.unwritten(below)
        memory = shape.width * shape.memory
        cs_CBP = like.new_empty(pieces + 1, lanes, memory, dtype=torch.float32)
        cs_CBP[0].copy_(recurrence.padded_to(c_BH, memory, torch.float32))
        cells = like.new_empty(steps, lanes, memory, dtype=torch.float32) if kept else None
        gates = like.new_empty(steps * lanes, 4 * shape.width)
        made.append(Activations(inputs_NJ, recurrence.states(h_BH, shape, steps, like), gates, cells, cs_CBP, None))
    return made


def gradients(layers: Sequence[Activations], shape: LayerShape, pieces: int, *, learned: bool = False) -> list[LayerGradients]:
    """Buffers for the backward of these layers."""
    made = []
    for number, layer in enumerate(layers):
        lanes = layer.hs_SBP.shape[1]
        launches = pieces if number == 0 or shape.joined == 1 else 0  # layers in one launch have one ring
        h, memory = (layer.hs_SBP.new_empty(pieces, lanes, shape.width * each, dtype=torch.float32) for each in (1, shape.memory))
        bias = layer.hs_SBP.new_empty(pieces, shape.groups, 4 * shape.width, dtype=torch.float32)
        of_resets = bias.new_empty(pieces, shape.groups, shape.width, 2) if learned else None
        made.append(LayerGradients(*recurrence.gradients(layer.gates_NQ, shape, launches), (h, memory), bias, of_resets))
    return made


def forward(
    wave: Wave,
    packs: Sequence[Packed],
    layers: Sequence[Activations],
    spans: Sequence[Span],
    dealt: Sequence[SortedLanes],
    marks: Sequence[LayerMarks],
) -> None:
    """Run the layers over these pieces."""
    lanes, shape = layers[0].hs_SBP.shape[1], wave.shape
    if shape.joined > 1:
        for piece, span in enumerate(spans):
            joining.forward(shape, packs, [layer.of_steps(span) for layer in layers], piece, dealt[piece])
        return
    with _Streams(wave.streams, layers[0].hs_SBP.device) as streams:
        for number, piece in diagonals(len(layers), len(spans)):
            layer, pack, (first, end) = layers[number], packs[number], spans[piece]
            rows = slice(first * lanes, end * lanes)
            assert layer.inputs_NJ is not None
            with streams.of(number, number - 1, piece):
                mask = layers[number - 1].mask if number else None
                if mask is not None:
                    masked = layer.inputs_NJ[rows].view(end - first, lanes, shape.width)
                    torch.mul(layers[number - 1].hs_SBP[first + 1 : end + 1], steps_of(mask, first, end), out=masked)
                gates = layer.gates_NQ[rows]
                torch.addmm(pack.bias_Q, layer.inputs_NJ[rows], pack.w_ih_QJ.t(), out=gates)
                cells = None if layer.cells_TBP is None else layer.cells_TBP[first:end]
                marked = marks[number].part(first, end)
                if marked.resets is not None and marked.h_P is not None:
                    gates.addcmul_(marked.resets.rows_TB.view(-1, 1).to(gates.dtype), (pack.w_hh_QP @ marked.h_P)[None])
                recurrence.forward(
                    shape,
                    pack,
                    layer.hs_SBP[first : end + 1],
                    gates,
                    cells,
                    layer.cs_CBP[piece],
                    layer.cs_CBP[piece + 1],
                    dealt[piece],
                    marked,
                )


def backward(
    wave: Wave,
    weights: Sequence[Turned],
    layers: Sequence[Activations],
    grads: Sequence[LayerGradients],
    grad_y_TBP: Tensor,
    ends: Sequence[Ends],
    spans: Sequence[Span],
    dealt: Sequence[SortedLanes],
    dx_NJ: Tensor | None,
    marks: Sequence[LayerMarks],
    finish: Callable[[int], None] | None = None,
    *,
    after: Sequence[Tensor] | None = None,
    before: bool = False,
) -> None:
    """Run backward over these pieces, and write the gradient of the first layer's inputs.

    `finish` is called with each layer whose gate gradients are complete, on its stream. `after` and `before` are for a window in several
    calls, as in `recurrence.backward`: each layer's gate gradients of the next step, if those of later steps are there.
    """
    (steps, lanes), shape, count = grad_y_TBP.shape[:2], wave.back, len(layers)
    if shape.joined > 1:
        _backward_joined(
            shape, weights, layers, grads, grad_y_TBP, ends, spans, dealt, dx_NJ, finish, after=after is not None, before=before
        )
        return
    ys = [grad_y_TBP.new_empty(steps, lanes, shape.width) for _ in range(count - 1)] + [grad_y_TBP]
    with _Streams(wave.streams, grad_y_TBP.device) as streams:
        for turned_number, turned_piece in diagonals(count, len(spans)):
            number, piece = count - 1 - turned_number, len(spans) - 1 - turned_piece
            layer, of_layer, (first, end), turned = layers[number], grads[number], spans[piece], weights[number]
            rows, (of_h, of_memory) = slice(first * lanes, end * lanes), of_layer.starts
            follows = None if after is None else after[number]
            if piece < len(spans) - 1:
                follows = of_layer.gates_NQ[end * lanes : (end + 1) * lanes] if shape.continues else None
            with streams.of(number, number + 1, piece):
                assert layer.cells_TBP is not None  # kept by forward
                recurrence.backward(
                    shape, turned.w_hh_PQ, layer.gates_NQ[rows], layer.cells_TBP[first:end], layer.cs_CBP[piece], ys[number][first:end],
                    ends[number] if piece == len(spans) - 1 else (of_h[piece + 1], of_memory[piece + 1]), of_layer.gates_NQ[rows],
                    (of_h[piece], of_memory[piece]), of_layer.bias_CEQ[piece], of_layer.ring[piece], dealt[piece],
                    marks[number].part(first, end), None if of_layer.resets_CEP2 is None else of_layer.resets_CEP2[piece],
                    follows, before=shape.continues and (before or piece > 0),
                )  # fmt: skip
                if number:
                    below = ys[number - 1][first:end]
                    torch.mm(of_layer.gates_NQ[rows], turned.w_ih_QJ, out=below.view(-1, shape.width))
                    mask = layers[number - 1].mask
                    if mask is not None:
                        below.mul_(steps_of(mask, first, end))
                elif dx_NJ is not None:
                    torch.mm(of_layer.gates_NQ[rows], turned.w_ih_QJ, out=dx_NJ[rows])
                if piece == 0 and finish is not None:
                    finish(number)


def _backward_joined(
    shape: LayerShape,
    weights: Sequence[Turned],
    layers: Sequence[Activations],
    grads: Sequence[LayerGradients],
    grad_y_TBP: Tensor,
    ends: Sequence[Ends],
    spans: Sequence[Span],
    dealt: Sequence[SortedLanes],
    dx_NJ: Tensor | None,
    finish: Callable[[int], None] | None,
    *,
    after: bool,
    before: bool,
) -> None:
    """The same for layers in one launch, which all finish together: their weight gradients run side by side."""
    lanes, last = grad_y_TBP.shape[1], len(spans) - 1
    for piece, (first, end) in reversed(list(enumerate(spans))):
        rows = slice(first * lanes, end * lanes)
        behind = ends if piece == last else [(each.starts[0][piece + 1], each.starts[1][piece + 1]) for each in grads]
        joining.backward(
            shape,
            weights,
            [layer.of_steps((first, end)) for layer in layers],
            [each._replace(gates_NQ=each.gates_NQ[rows]) for each in grads],
            grad_y_TBP[first:end],
            behind,
            piece,
            dealt[piece],
            None if dx_NJ is None else dx_NJ[rows],
            after=after or piece < last,
            before=before or piece > 0,
        )
    if finish is not None:
        with _Streams(min(_PRODUCTS_AT_ONCE, len(layers)) if grad_y_TBP.is_cuda else 1, grad_y_TBP.device) as streams:
            for number in range(len(layers)):
                with streams.of(number, -1, 0):
                    finish(number)


def weight_products(
    grads_NQ: Tensor, inputs_NJ: Tensor, hs_SBP: Tensor, into: tuple[Tensor | None, Tensor | None], marks: LayerMarks = NOTHING
) -> None:
    """Both weight gradients of a layer, in the kernel's order, each as one product over all steps; None: not wanted."""
    into_ih, into_hh = into
    if into_ih is not None:
        torch.mm(grads_NQ.t(), inputs_NJ, out=into_ih)
    if into_hh is not None:
        before_NP, units = recurrence.begun_rows(hs_SBP[:-1], marks), into_hh.shape[1]
        if units == before_NP.shape[1]:
            torch.mm(grads_NQ.t(), before_NP, out=into_hh)
        else:  # each head by itself
            rows = len(before_NP)
            of_heads = grads_NQ.view(rows, -1, 4 * units).permute(1, 2, 0), before_NP.view(rows, -1, units).transpose(0, 1)
            torch.bmm(*of_heads, out=into_hh.view(-1, 4 * units, units))


def initial_gradients(layer: LayerGradients, turned_PQ: Tensor, marks: LayerMarks) -> tuple[Tensor, Tensor]:
    """The gradients [P] of what resets put into h and into the memory."""
    assert marks.resets is not None
    assert layer.resets_CEP2 is not None
    memory_P, h_P = layer.resets_CEP2.sum((0, 1)).unbind(-1)
    gates_Q = marks.resets.rows_TB.view(1, -1).to(layer.gates_NQ.dtype) @ layer.gates_NQ
    return h_P + (turned_PQ @ gates_Q[0]).to(h_P.dtype), memory_P


def joined(rows: Sequence[Tensor]) -> Tensor:
    """The rows one below the other: in place if they already lie so in memory, as parts of one buffer do; otherwise a copy."""
    storage, width = rows[0].untyped_storage().data_ptr(), rows[0].shape[1]
    at = rows[0].storage_offset()
    for each in rows:
        if not each.is_contiguous() or each.untyped_storage().data_ptr() != storage or each.storage_offset() != at:
            return torch.cat(list(rows))
        at += each.numel()
    return rows[0].as_strided((sum(len(each) for each in rows), width), (width, 1))


def last_carry(layer: Activations, lengths_B: Tensor | None, hidden: int, dtypes: tuple[torch.dtype, torch.dtype]) -> tuple[Tensor, Tensor]:
    """Copies of h and memory [B, H] at each lane's last real step."""
    if lengths_B is None:
        h = layer.hs_SBP[-1, :, :hidden].to(dtypes[0], copy=True)
    else:
        h = recurrence.last_state(layer.hs_SBP, lengths_B, hidden, dtypes[0])
    memory = hidden * layer.cs_CBP.shape[-1] // layer.hs_SBP.shape[-1]
    return h, layer.cs_CBP[-1, :, :memory].to(dtypes[1], copy=True)


def diagonals(layers: int, pieces: int) -> Iterator[tuple[int, int]]:
    """(layer, piece) in an order in which everything follows its dependencies, and streams take turns."""
    for diagonal in range(layers + pieces - 1):
        for layer in range(max(0, diagonal - pieces + 1), min(layers, diagonal + 1)):
            yield layer, diagonal - layer


def spans_of(steps: int, piece_steps: int) -> list[Span]:
    """The steps cut into pieces."""
    return [(first, min(first + piece_steps, steps)) for first in range(0, steps, piece_steps)]


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
    def of(self, layer: int, before: int, piece: int) -> Iterator[None]:
        """Inside this context, a layer works on a piece, after layer `before` has finished the same piece."""
        if not self.streams:
            yield
            return
        stream = self.streams[layer % self.count]
        ready = self.done.get((before, piece))
        if ready is not None:
            stream.wait_event(ready)
        with torch.cuda.stream(stream):
            yield
        self.done[layer, piece] = stream.record_event()


@cache
def _side_streams(count: int, device: torch.device) -> tuple[torch.cuda.Stream, ...]:
    return tuple(torch.cuda.Stream(device) for _ in range(count))  # type: ignore[no-untyped-call]
