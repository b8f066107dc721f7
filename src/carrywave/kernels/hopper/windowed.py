"""The persistent kernels over a window that arrives chunk by chunk: whole-window buffers, and nothing in a chunk but its launches.

The buffers of the window are made with its first chunk. Each chunk is one node of autograd. Its forward runs the stack on the chunk's part
of the buffers, from the h and c that lie there; its backward does the same with gradients, and leaves those of the weights to one product
per matrix over the whole window, which `Deferred` runs later.

Between chunks the carry stays in the buffers. What a chunk returns in its place is a token: one number on the device that nobody reads,
through which autograd learns that this chunk's backward follows the next one's. The last chunk returns the carry itself. A chunk that is
given anything else than the token of the one before it runs by itself (`wave`).

Shapes: T time, B lane, I input (J padded), H hidden (P padded), Q = 4P, N = T·B, S = T + 1, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from carrywave.cells.cell import by_name
from carrywave.kernels import derivatives, pass_cache
from carrywave.kernels.carry import AnyCarries
from carrywave.kernels.deferred_gradients import Deferred, deferred_for
from carrywave.kernels.hopper import marks as marking
from carrywave.kernels.hopper import recurrence, stack, wave
from carrywave.kernels.hopper.buffers import Activations, Ends, LayerGradients, LayerMarks, Resets
from carrywave.kernels.hopper.layout import Wave
from carrywave.kernels.hopper.recurrence import SortedLanes
from carrywave.kernels.step_marks import StepMarks
from carrywave.kernels.weights import LayerWeights
from carrywave.kernels.window import ChunkedWindow, WindowChunk

_OF_LAYER = 4  # weights
Marks = Sequence[StepMarks | None] | None


def run(
    x_TBI: Tensor,
    carries: AnyCarries,
    layers: Sequence[LayerWeights],
    masks: Sequence[Tensor | None],
    lengths_B: Tensor | None,
    how: Wave,
    chunk: WindowChunk | None,
    *,
    marks: Marks = None,
    clean: bool = False,
) -> tuple[Tensor, AnyCarries]:
    """Like `wave.run`, for one chunk of a window. `clean`: padding already holds zeros."""
    if chunk is None:
        return wave.run(x_TBI, carries, layers, masks, lengths_B, how, marks=marks, clean=clean)
    held = held_by(chunk, layers)
    if chunk.index == 0 and held is None:
        wave.check(x_TBI, carries, layers, how.shape.cell)
        deferred = _deferred(x_TBI, carries, layers, chunk.window, marks)
        if deferred is not None:
            held = StackWindow(x_TBI, carries, layers, masks, lengths_B is not None, how, chunk.window, deferred)
            result = held.run(chunk, x_TBI, carries, masks, lengths_B, marks, clean=clean)
            chunk.window.kept[_key(layers)] = held  # only now: what failed is not held
            return result
    elif held is not None and held.handed_out(chunk, carries):
        return held.run(chunk, x_TBI, carries, masks, lengths_B, marks, clean=clean)
    elif held is not None and not all(map(pass_cache.lasting, held.given)):
        raise RuntimeError("a chunk was given another carry than that of the chunk before it, and derived weights that it may not have")
    return wave.run(x_TBI, carries, layers, masks, lengths_B, how, marks=marks, clean=clean)


def held_by(chunk: WindowChunk | None, layers: Sequence[LayerWeights]) -> StackWindow | None:
    """What an earlier chunk has left of a call with these layers."""
    return None if chunk is None else chunk.window.kept.get(_key(layers))


def _key(layers: Sequence[LayerWeights]) -> tuple[int, ...]:
    return tuple(id(each.w_ih) for each in layers)


def _deferred(x_TBI: Tensor, carries: AnyCarries, layers: Sequence[LayerWeights], window: ChunkedWindow, marks: Marks) -> Deferred | None:
    """Where to defer the weight gradients; None if chunks have to run by themselves: nothing is differentiated, weights are derived in a
    way that nobody knows to be the same in every chunk, or resets go back to a learned carry, whose gradient comes from each chunk.
    """
    if any(each is not None and each.initial is not None for each in marks or ()):
        return None
    weights = [each for layer in layers for each in layer[:4] if each is not None]
    differentiated = any(tensor.requires_grad for tensor in (x_TBI, *weights, *(part for carry in carries for part in carry)))
    lasts = all(pass_cache.lasting(weight) or any(weight is each for each in window.same) for weight in weights)
    if not torch.is_grad_enabled() or not differentiated or not lasts:
        return None
    return deferred_for()


class StackWindow:
    """The layers of one call over one window."""

    def __init__(
        self,
        x_TBI: Tensor,
        carries: AnyCarries,
        layers: Sequence[LayerWeights],
        masks: Sequence[Tensor | None],
        short: bool,
        how: Wave,
        window: ChunkedWindow,
        deferred: Deferred,
    ) -> None:
        """`short`: the lanes have lengths."""
        # Not the window itself, which holds this: the buffers are freed as soon as nobody needs them, not when garbage is collected.
        self.how, self.chunks, self.steps, self.deferred = how, window.spans, window.steps, deferred
        self.weights = [LayerWeights(*layer[:4]) for layer in layers]
        self.given = [weight for layer in self.weights for weight in layer[:_OF_LAYER] if weight is not None]
        # Gradients of derived weights go through autograd, with the first chunk's backward: the last one to run.
        self.derived = [weight for weight in self.given if not weight.is_leaf]
        self.lanes, self.inputs, self.hidden = x_TBI.shape[1], x_TBI.shape[2], layers[0].w_ih.shape[0] // by_name(how.shape.cell).gates
        self.dtypes = [(carry[0].dtype, carry[-1].dtype) for carry in carries]
        self.bits_BW: Tensor | None = None  # resets of the window, as far as its chunks have come
        self.lengths_B = window.lengths if short else None
        self.like = x_TBI.new_empty(0)
        self.spans = [stack.spans_of(end - first, how.chunk_steps) for first, end in window.spans]  # pieces, within their chunks
        counts = [0]
        for spans in self.spans:
            counts.append(counts[-1] + len(spans))
        self.pieces = [slice(first, end) for first, end in pairwise(counts)]
        with torch.no_grad():
            self.dealt = self._deal(window)
            given = [(carry[0][0].detach(), wave.memory_of(carry).detach()) for carry in carries]
            masked = [mask is not None for mask in masks]
            self.layers = stack.activations(how.shape, given, masked, window.steps, counts[-1], self.like, kept=True)
            pitches = [-(-self.inputs // 8) * 8, *[how.shape.width] * (len(layers) - 1)]
            self.packs = [
                stack.packed(layer, how.shape, pitch, self.like, transposed=True)
                for layer, pitch in zip(self.weights, pitches, strict=True)
            ]
        self.parts: list[list[Activations]] = []  # by chunk
        self.rows: list[Tensor] = []  # inputs of the first layer, by chunk
        self.marks: list[list[LayerMarks]] = []  # of the layers, by chunk
        self.grads: list[LayerGradients] = []  # made by the first backward
        self.started = len(window.spans)  # the earliest chunk whose backward has run
        self.reached = 0  # chunks up to the latest one whose backward has run
        self.unsummed = (0, 0)  # the chunks whose weight gradients are pending

    def _deal(self, window: ChunkedWindow) -> list[SortedLanes]:
        """The lengths of all pieces, the same for all layers that are cut like this one."""
        if self.lengths_B is None:
            return [SortedLanes(None, None)] * self.pieces[-1].stop
        key = "dealt", self.how.chunk_steps
        if key not in window.kept:
            window.kept[key] = self._dealt(self.lengths_B)
        dealt: list[SortedLanes] = window.kept[key]
        return dealt

    def _dealt(self, lengths_B: Tensor) -> list[SortedLanes]:
        piece = self.how.chunk_steps
        if len(self.spans[0]) == 1 or self.chunks[0][1] % piece == 0:  # pieces of one size
            return recurrence.deal(lengths_B, self.steps, min(self.chunks[0][1], piece), self.like)
        parts = [((lengths_B - first).clamp(0, end - first), end - first) for first, end in self.chunks]
        return [each for left_B, steps in parts for each in recurrence.deal(left_B, steps, piece, self.like)]

    def handed_out(self, chunk: WindowChunk, carries: AnyCarries) -> bool:
        """True if the carries are those that the chunk before this one returned."""
        return chunk.index == len(self.parts) and len(carries) == len(self.layers) and carries[0][0].data_ptr() == self._token().data_ptr()

    def _token(self) -> Tensor:
        """A number that the last chunk to run has written."""
        piece = self.pieces[len(self.parts) - 1].stop
        return self.layers[0].cs_CBP[piece].view(-1)[:1].data  # no view for torch, which would miss what later chunks write beside it

    def run(
        self,
        chunk: WindowChunk,
        x_TBI: Tensor,
        carries: AnyCarries,
        masks: Sequence[Tensor | None],
        lengths_B: Tensor | None,
        marks: Marks,
        *,
        clean: bool,
    ) -> tuple[Tensor, AnyCarries]:
        """Run a chunk: its outputs, and the carries or, in their place, the token."""
        if x_TBI.shape != (chunk.span[1] - chunk.span[0], self.lanes, self.inputs) or x_TBI.dtype != self.like.dtype:
            span, last = f"steps {chunk.span[0]} to {chunk.span[1]}", f"{self.lanes} lanes of {self.inputs} inputs in {self.like.dtype}"
            raise ValueError(f"x is {list(x_TBI.shape)} in {x_TBI.dtype}, but this chunk has {span} of a window with {last}")
        given = [part for carry in carries for part in (carry[0][0], wave.memory_of(carry))] if chunk.index == 0 else [carries[0][0]]
        apply: Any = _Chunk.apply
        weights = [weight for layer in self.weights for weight in layer[:_OF_LAYER]]
        if chunk.index and self.derived:
            weights = [weight if weight is None or weight.is_leaf else weight.detach() for weight in weights]
        y_TBH, *ends = apply(self, chunk.index, x_TBI, (lengths_B, clean, marks), masks, len(given), *given, *weights)
        if chunk.last:
            return y_TBH, tuple(wave.carry_of(self.how, h[None], memory[None]) for h, memory in zip(ends[::2], ends[1::2], strict=True))
        # Only the first can be differentiated: one way for gradients is enough.
        of_parts, rest = type(carries[0]), ends[0].detach()
        first, *others = ([rest] * len(carries[0]) for _ in self.layers)
        return y_TBH, tuple(of_parts(*parts) for parts in ([ends[0], *first[1:]], *others))

    def forward(
        self, index: int, x_TBI: Tensor, lengths_B: Tensor | None, masks: Sequence[Tensor | None], marks: Marks = None
    ) -> list[Tensor]:
        """The outputs of a chunk, and the token or the last carries. `lengths_B`: beyond them, x is read as zeros."""
        if index != len(self.parts):
            raise RuntimeError(f"chunk {index} of a window ran after {len(self.parts)} chunks; run them in order")
        rows_NJ = wave.rows_of(x_TBI, lengths_B)
        layers = [layer.part(self.chunks[index], self.pieces[index]) for layer in self.layers]
        layers[0] = layers[0]._replace(inputs_NJ=rows_NJ)
        padded = (wave.padded_mask(mask, self.how, self.like) for mask in masks)
        layers = [layer._replace(mask=mask) for layer, mask in zip(layers, padded, strict=True)]
        marked = self._marked(index, x_TBI, marks)
        stack.forward(self.how, self.packs, layers, self.spans[index], self.dealt[self.pieces[index]], marked)
        self.marks.append(marked)
        self.parts.append(layers)
        self.rows.append(rows_NJ)
        outputs = [layers[-1].hs_SBP[1:, :, : self.hidden]]
        if index < len(self.spans) - 1:
            return [*outputs, self._token()]
        for layer, dtypes in zip(self.layers, self.dtypes, strict=True):
            outputs += stack.last_carry(layer, self.lengths_B, self.hidden, dtypes)
        return outputs

    def _marked(self, index: int, x_TBI: Tensor, marks: Marks) -> list[LayerMarks]:
        """The marks of a chunk; the bits of its resets join those of the chunks before it."""
        resets_TB = None if marks is None or marks[0] is None else marks[0].resets
        if index and (resets_TB is None) != (self.bits_BW is None):
            raise ValueError("resets in some chunks of a window and none in others; pass them with every chunk or with none")
        if resets_TB is not None and self.bits_BW is None:
            self.bits_BW = marking.empty_bits(self.steps, self.lanes, x_TBI)
        resets = marking.resets_of(resets_TB, self.chunks[index][0], self.bits_BW)
        marked = marking.marks_of(marks, len(self.layers), resets, self.how.shape, x_TBI)
        for kinds in {each.kinds for each in marked}:
            recurrence.prepare_backward(self.how.back, self.like, kinds)
        return marked

    def _marked_over(self, first: int, end: int, number: int) -> LayerMarks:
        """The resets of a layer over some chunks."""
        each = [resets.rows_TB for of_chunk in self.marks[first:end] if (resets := of_chunk[number].resets) is not None]
        return LayerMarks(Resets(torch.cat(each), each[0]) if each else None)

    def backward(
        self, index: int, grad_y_TBH: Tensor | None, grad_ends: Sequence[Tensor | None], *, wants_dx: bool
    ) -> tuple[Tensor | None, list[tuple[Tensor, Tensor]]]:
        """The gradient of a chunk's inputs, and those of each layer's h and memory at its start."""
        if not self.grads:
            self.grads = stack.gradients(self.layers, self.how.back, self.pieces[-1].stop)
        layers, pieces, (first, end) = self.parts[index], self.pieces[index], self.chunks[index]
        x_shape = torch.Size((end - first, self.lanes, self.inputs))
        grads = [each.part((first, end), self.lanes, pieces) for each in self.grads]
        ends: list[Ends]
        if index == len(self.spans) - 1:
            ends = wave.padded_ends(grad_ends, self.how)
        elif self.started == index + 1:
            ends = [(each.starts[0][pieces.stop], each.starts[1][pieces.stop]) for each in self.grads]
        else:  # no gradient came from later chunks
            ends = [(None, None)] * len(layers)
        following = self.started == index + 1 < len(self.spans) and self.how.back.continues
        next_rows = slice(end * self.lanes, (end + 1) * self.lanes)
        after = [each.gates_NQ[next_rows] for each in self.grads] if following else None
        dx_NJ = torch.empty_like(self.rows[index]) if wants_dx else None
        grad_y = wave.grad_outputs(grad_y_TBH, x_shape, self.how, self.like)
        turned = [wave.turned_of(pack) for pack in self.packs]
        stack.backward(
            self.how, turned, layers, grads, grad_y, ends, self.spans[index], self.dealt[pieces], dx_NJ, self.marks[index],
            after=after, before=index > 0,
        )  # fmt: skip
        self.started, self.reached = index, max(self.reached, index + 1)
        self._defer(index)
        if index == 0:
            self._release()
        return wave.input_gradient(dx_NJ, x_shape), [(each.starts[0][0], each.starts[1][0]) for each in grads]

    def _defer(self, index: int) -> None:
        """Defer this chunk's part of the weight gradients."""
        trained = [weight for weight in self.given if _trained(weight)]
        first, end = self.unsummed
        if first < end:
            self.unsummed = index, end
        elif trained:
            self.unsummed = index, index + 1
            self.deferred.later(trained, self.weight_gradients)

    def _release(self) -> None:
        """Free what only backward reads: the weight gradients may have to wait."""
        self.parts = [[] for _ in self.parts]
        self.marks = [[each._replace(noise=None) for each in of_chunk] for of_chunk in self.marks]
        self.layers = [layer._replace(gates_NQ=self.like, cells_TBP=None) for layer in self.layers]

    def weight_gradients(self) -> list[Tensor]:
        """The gradients of all trained weights, over all chunks whose backward has run since this was last asked."""
        first, end = self.unsummed
        self.unsummed = 0, 0
        return [grad for grad in self._sums(first, end, _trained) if grad is not None]

    def derived_gradients(self) -> list[Tensor | None]:
        """For every weight, its gradient over the whole window if it is derived."""
        if not self.derived:
            return [None] * (_OF_LAYER * len(self.weights))
        return self._sums(0, self.reached, lambda weight: weight is not None and not weight.is_leaf)

    def _sums(self, first: int, end: int, wanted: Callable[[Tensor | None], bool]) -> list[Tensor | None]:
        """The gradients of the wanted weights over these chunks."""
        steps = self.chunks[first][0], self.chunks[end - 1][1]
        pieces = slice(self.pieces[first].start, self.pieces[end - 1].stop)
        sums: list[Tensor | None] = []
        for number, (weights, pack) in enumerate(zip(self.weights, self.packs, strict=True)):
            wants = [wanted(each) for each in weights[:_OF_LAYER]]
            if not any(wants):
                sums += [None] * _OF_LAYER
                continue
            layer, grads = self.layers[number].part(steps, pieces), self.grads[number].part(steps, self.lanes, pieces)
            inputs_NJ = stack.joined(self.rows[first:end]) if layer.inputs_NJ is None else layer.inputs_NJ
            into_ih = torch.empty_like(pack.w_ih_QJ) if wants[0] else None
            into_hh = torch.empty_like(pack.w_hh_QP) if wants[1] else None
            marked = self._marked_over(first, end, number)
            stack.weight_products(grads.gates_NQ, inputs_NJ, layer.hs_SBP, (into_ih, into_hh), marked)
            width, dtype = weights.w_ih.shape[1], weights.w_ih.dtype
            bias_EQ = grads.bias_CEQ.flatten(0, 1)
            dw_ih, dw_hh, db = recurrence.unpack(self.how.back, into_ih, into_hh, bias_EQ, self.like, self.hidden, width, dtype)
            sums += [grad if want else None for grad, want in zip((dw_ih, dw_hh, *db.unbind()), wants, strict=True)]
        return sums

    def carry_at(self, index: int) -> AnyCarries:
        """The carries at the start of a chunk. A lane that has ended may hold anything."""
        first, piece = self.chunks[index][0], self.pieces[index].start
        return tuple(
            wave.carry_of(
                self.how, each.hs_SBP[None, first, :, : self.hidden], each.cs_CBP[None, piece, :, : self.hidden * self.how.shape.memory]
            )
            for each in self.layers
        )


def _trained(weight: Tensor | None) -> bool:
    """True if a weight is a parameter whose gradient can be deferred."""
    return weight is not None and weight.is_leaf and weight.requires_grad


class _Chunk(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        held: StackWindow,
        index: int,
        x_TBI: Tensor,
        options: tuple[Tensor | None, bool, Marks],
        masks: Sequence[Tensor | None],
        carried: int,
        *flat: Tensor | None,
    ) -> tuple[Tensor, ...]:
        lengths_B, clean, marks = options
        outputs = held.forward(index, x_TBI.detach(), None if clean else lengths_B, masks, marks)
        # Backward reads them from the buffers; saved here, torch notices if somebody has written to them.
        ctx.save_for_backward(x_TBI, held.parts[index][-1].hs_SBP)
        ctx.held, ctx.index, ctx.options, ctx.masks, ctx.carried, ctx.flat = held, index, options, masks, carried, flat
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @derivatives.as_saved
    def backward(ctx: Any, grad_y_TBH: Tensor | None, *grad_ends: Tensor | None) -> tuple[Tensor | None, ...]:
        held, index, [x_TBI, _] = ctx.held, ctx.index, ctx.saved_tensors
        wave.refuse_more(grad_y_TBH, *grad_ends)
        if not held.deferred.open:
            return _by_itself(ctx, x_TBI, grad_y_TBH, *grad_ends)
        dx, starts = held.backward(index, grad_y_TBH, grad_ends, wants_dx=ctx.needs_input_grad[2])
        carried: list[Tensor | None] = [starts[0][0][0, :1]]  # for the token: a number that is there
        if index == 0:
            parts = [
                (part, dtype) for start, pair in zip(starts, held.dtypes, strict=True) for part, dtype in zip(start, pair, strict=True)
            ]
            wanted = ctx.needs_input_grad[6 : 6 + ctx.carried]
            of_parts = [held.hidden, held.hidden * held.how.back.memory] * len(starts)
            carried = [
                part[:, :width].to(dtype) if want else None for (part, dtype), want, width in zip(parts, wanted, of_parts, strict=True)
            ]
        derived = held.derived_gradients() if index == 0 else [None] * (len(ctx.flat) - ctx.carried)
        return None, None, dx, None, None, None, *carried, *derived


def _by_itself(ctx: Any, x_TBI: Tensor, grad_y_TBH: Tensor | None, *grad_ends: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of one chunk alone, for a user who asks for them along the way: from a forward that is run again."""
    held, index, count, (lengths_B, clean, marks) = ctx.held, ctx.index, len(ctx.held.layers), ctx.options

    def plain(x: Tensor, *flat: Tensor | None) -> tuple[Tensor, ...]:
        each = list(flat[ctx.carried :])
        layers = [LayerWeights(*each[n * _OF_LAYER : (n + 1) * _OF_LAYER]) for n in range(count)]  # type: ignore[arg-type]
        parts = [part[None] for part in flat[: ctx.carried] if part is not None]
        carries = held.carry_at(index)
        if index == 0:
            carries = tuple(wave.carry_of(held.how, h, memory) for h, memory in zip(parts[::2], parts[1::2], strict=True))
        y, ends = wave.run(x, carries, layers, ctx.masks, lengths_B, held.how, marks=marks, clean=clean)
        last = [part for end in ends for part in (end[0][0], wave.memory_of(end))]
        return (y, *(last if index == len(held.spans) - 1 else [y.new_zeros(1)]))

    grads = derivatives.through(plain, (x_TBI, *ctx.flat), (ctx.needs_input_grad[2], *ctx.needs_input_grad[6:]), (grad_y_TBH, *grad_ends))
    return None, None, grads[0], None, None, None, *grads[1:]
