"""The kernels of `persistent.cu`, `wide.cu` and `stream.cu`, and those around them, as Python functions over tensors.

Shapes: T time, B lane, I input (J padded to a multiple of 8), H hidden (P padded to a multiple of 64), G = gates · H; Q = 4P, the four
numbers of each unit side by side; S = T + 1; W words of a lane's resets; E groups of lanes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from carrywave.cells.cell import by_name
from carrywave.kernels import random
from carrywave.kernels.cuda import nvrtc
from carrywave.kernels.cuda.casting import EACH, HALVES, padded_rows
from carrywave.kernels.hopper.buffers import LayerMarks
from carrywave.kernels.hopper.layout import CELLS, LayerShape
from carrywave.kernels.step_marks import CellNoise
from carrywave.kernels.weights import LayerWeights

SOURCE, WIDE, STREAM, JOINED = "persistent/persistent.cu", "wide/wide.cu", "stream/stream.cu", "joined/joined.cu"
PACKING, LENGTHS = "packing.cu", "lengths.cu"
_MOST_SORTED = 1024  # lanes that our own kernel can sort


class Packed(NamedTuple):
    """A layer's weights in the kernel's order and dtype."""

    w_ih_QJ: Tensor
    w_hh_QP: Tensor
    turned_PQ: Tensor | None  # recurrent weights transposed, for backward
    bias_Q: Tensor
    turned_ih_JQ: Tensor | None = None  # input weights transposed, for backward of layers in one launch


class SortedLanes(NamedTuple):
    """Lengths, and lanes from longest to shortest: None if every step is real."""

    order_B: Tensor | None
    lengths_B: Tensor | None


def pack(weights: LayerWeights, shape: LayerShape, pitch: int, like: Tensor, *, transposed: bool) -> Packed:
    """Cast, pad and reorder the weights, for inputs of this pitch."""
    hidden, inputs = weights.w_ih.shape[0] // by_name(shape.cell).gates, weights.w_ih.shape[1]
    padded, head = shape.width, shape.hidden
    given = [None if each is None else readable(each, like, weights.w_ih.dtype) for each in weights[:4]]
    turned = like.new_empty(padded, 4 * head) if transposed else None
    turned_ih = like.new_empty(pitch, 4 * padded) if transposed and shape.joined > 1 and pitch == padded else None
    packed = Packed(like.new_empty(4 * padded, pitch), like.new_empty(4 * padded, head), turned, like.new_empty(4 * padded), turned_ih)
    halves = int(weights.w_ih.dtype == like.dtype)
    grid = (-(-max(pitch, head) // 32), padded // 8, 2)
    _simple("pack_weights", like, cell=shape.cell)(
        grid, (32, 8), *given, halves, hidden, inputs, *packed, padded, pitch, weights.w_hh.shape[1], head
    )
    return packed


def states(h_BH: Tensor, shape: LayerShape, steps: int, like: Tensor) -> Tensor:
    """A buffer for h at every step, [S, B, P]: the first is given, the others are marked as not yet written if blocks poll for them."""
    lanes, hidden = h_BH.shape
    hs_SBP = like.new_empty(steps + 1, lanes, shape.width)
    words = steps * lanes * shape.width // 8 if shape.polled else 0
    given = readable(h_BH, like)
    halves = int(given.dtype == like.dtype)
    grid = _waves(max(words, lanes * shape.width))
    _simple("prepare", like)(grid, (256, 1), hs_SBP[1:], words, given, halves, lanes, hidden, shape.width, hs_SBP, None, 0)
    return hs_SBP


def unwritten(rows_NP: Tensor) -> Tensor:
    """A buffer like these rows, marked as not yet written."""
    made = torch.empty_like(rows_NP)
    words = made.numel() // 8
    _simple("prepare", made)(_waves(words), (256, 1), made, words, None, 0, 0, 0, 0, None, None, 0)
    return made


def gradients(gates_NQ: Tensor, shape: LayerShape, launches: int) -> tuple[Tensor, Tensor]:
    """Buffers: gate gradients, marked as not yet written if blocks poll for them, and a ring per launch for sums exchanged via memory."""
    grads_NQ = torch.empty_like(gates_NQ)
    of_turn = shape.blocks * 4 * shape.units * shape.lanes
    if shape.streamed is not None:
        return grads_NQ, gates_NQ.new_zeros(launches, shape.marks + 2 * of_turn, dtype=torch.int32)
    words_of_ring = 0 if shape.cluster else 4 * of_turn
    ring = gates_NQ.new_empty(launches, words_of_ring, dtype=torch.int32)
    if shape.near:  # nothing reads it before it is written
        return grads_NQ, ring
    words = grads_NQ.numel() // 8
    _simple("prepare", gates_NQ)(_waves(words), (256, 1), grads_NQ, words, None, 0, 0, 0, 0, None, ring, ring.numel() // 4)
    return grads_NQ, ring


def forward(
    shape: LayerShape,
    packed: Packed,
    hs_SBP: Tensor,
    gates_NQ: Tensor,
    cells_TBP: Tensor | None,
    first_c_BP: Tensor,
    last_c_BP: Tensor,
    dealt: SortedLanes,
    marks: LayerMarks,
) -> None:
    """Compute h, gates and the cell's memory of all steps, and the last memory. Without cells nothing is kept for backward."""
    steps, lanes = hs_SBP.shape[0] - 1, hs_SBP.shape[1]
    rest: tuple[nvrtc.Argument, ...]
    if shape.streamed is None:
        rest = *_resets(marks), *_noise(marks)
    else:
        rest = hs_SBP.new_zeros(shape.marks, dtype=torch.int32), hs_SBP.new_empty(shape.exchange_bytes, dtype=torch.uint8)
    _launch(
        "forward", shape, hs_SBP, marks.kinds, packed.w_hh_QP, hs_SBP, gates_NQ, cells_TBP, first_c_BP, last_c_BP,
        *dealt, lanes, shape.groups, steps, int(cells_TBP is not None), *rest,
    )  # fmt: skip


def prepare_backward(shape: LayerShape, like: Tensor, kinds: tuple[int, int]) -> None:
    """Compile the backward kernel, so that a failure surfaces while another backend can still take over."""
    _recurrent("backward", shape, like, kinds)


def backward(
    shape: LayerShape,
    turned_PQ: Tensor,
    gates_NQ: Tensor,
    cells_TBP: Tensor,
    first_c_BP: Tensor,
    grad_y_TBP: Tensor,
    grad_last: tuple[Tensor | None, Tensor | None],
    grads_NQ: Tensor,
    grad_first: tuple[Tensor, Tensor],
    bias_EQ: Tensor,
    ring: Tensor,
    dealt: SortedLanes,
    marks: LayerMarks,
    of_resets_EP2: Tensor | None,
    after_BQ: Tensor | None = None,
    *,
    before: bool = False,
) -> None:
    """Compute the gradients of the gates, of the initial h and memory, and, per group of lanes, of the bias and of what resets put into the
    memory and into h (apart from what the recurrent product makes of it).

    A sequence may be cut into several calls, the last steps first. `after_BQ`: the gate gradients of the step that follows, which lie
    behind `grads_NQ` in memory; the gradient of h comes from them. `before`: a call for earlier steps will do that; what is written for
    the initial h is then only what passes through lanes without steps here.
    """
    steps, lanes = grad_y_TBP.shape[:2]
    if (after_BQ is not None or before) and not shape.continues:
        raise ValueError("whole-group clusters exchange gradients in shared memory, and cannot go on from those of another launch")
    if after_BQ is not None and after_BQ.data_ptr() != grads_NQ.data_ptr() + grads_NQ.nbytes:
        raise ValueError("the gate gradients of the next step do not follow those of this launch in memory")
    of_lanes = *dealt, lanes, shape.groups, steps, int(after_BQ is not None), int(before)
    rest: tuple[nvrtc.Argument, ...]
    if shape.streamed is None:
        rest = ring, *of_lanes, *_resets(marks), of_resets_EP2, *_noise(marks)
    else:
        rest = *of_lanes, ring, grads_NQ.new_empty(4 * shape.exchange_bytes, dtype=torch.uint8)
    _launch(
        "backward", shape, grads_NQ, marks.kinds, turned_PQ, gates_NQ, cells_TBP, first_c_BP, grad_y_TBP, *grad_last, grads_NQ, *grad_first,
        bias_EQ, *rest,
    )  # fmt: skip


def launch(name: str, shape: LayerShape, like: Tensor, *arguments: nvrtc.Argument) -> None:
    """Run one of the kernels of a layout without marks."""
    _launch(name, shape, like, (0, 0), *arguments)


def _launch(name: str, shape: LayerShape, like: Tensor, kinds: tuple[int, int], *arguments: nvrtc.Argument) -> None:
    """Run one of the kernels over a whole sequence. Blocks that wait for each other must all run at once, unless they are one cluster."""
    run = _recurrent(name, shape, like, kinds)
    run((shape.blocks, 1, 1), (shape.threads, 1), *arguments, cooperative=not shape.near)


def _resets(marks: LayerMarks) -> tuple[Tensor | int | None, ...]:
    """The arguments of a launch about resets."""
    if marks.resets is None:
        return None, 0, 0, None
    return marks.resets.bits_BW, marks.resets.bits_BW.shape[1], marks.resets.first, marks.memory_P


def _noise(marks: LayerMarks) -> tuple[Tensor | float | None, ...]:
    """The arguments of a launch about noise."""
    return (None, 1.0, 0.0, 0.0) if marks.noise is None else tuple(marks.noise)


def unpack(
    shape: LayerShape,
    grad_ih_QJ: Tensor | None,
    grad_hh_QP: Tensor | None,
    bias_EQ: Tensor,
    like: Tensor,
    hidden: int,
    inputs: int,
    dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """The weight gradients in torch's order: [G, I], [G, H], and [2, G], one for each bias."""
    gates = by_name(shape.cell).gates
    pitch = 0 if grad_ih_QJ is None else grad_ih_QJ.shape[1]
    dw_ih = None if grad_ih_QJ is None else like.new_empty(gates * hidden, inputs, dtype=dtype)
    units = hidden // shape.heads
    dw_hh = None if grad_hh_QP is None else like.new_empty(gates * hidden, units, dtype=dtype)
    db = like.new_empty(2, gates * hidden, dtype=dtype)
    groups, padded = bias_EQ.shape[0], bias_EQ.shape[1] // 4
    grid = (-(-max(inputs, hidden) // 128), -(-gates * hidden // 8), 2)
    _simple("unpack_gradients", like, cell=shape.cell)(
        grid, (32, 8), grad_ih_QJ, grad_hh_QP, bias_EQ, groups, int(dtype == like.dtype),
        hidden, inputs, dw_ih, dw_hh, db, padded, pitch, units, shape.hidden,
    )  # fmt: skip
    return dw_ih, dw_hh, db


def deal(lengths_B: Tensor, steps: int, chunk_steps: int, like: Tensor) -> list[SortedLanes]:
    """For each chunk: the real steps of each lane in it, and the lanes from longest to shortest."""
    lanes, chunks = lengths_B.shape[0], -(-steps // chunk_steps)
    if lanes > _MOST_SORTED:
        order_B = torch.argsort(lengths_B, descending=True, stable=True).to(torch.int32)
        firsts = range(0, steps, chunk_steps)
        return [SortedLanes(order_B, (lengths_B - first).clamp(0, min(chunk_steps, steps - first)).to(torch.int32)) for first in firsts]
    order_B, left_CB = like.new_empty(lanes, dtype=torch.int32), like.new_empty(chunks, lanes, dtype=torch.int32)
    _simple("deal", like, LENGTHS)(
        (1, 1, 1), (-(-lanes // 32) * 32, 1), _words(lengths_B), lanes, steps, chunk_steps, chunks, order_B, left_CB
    )
    return [SortedLanes(order_B, left_B) for left_B in left_CB]


def real_rows(x_TBI: Tensor, lengths_B: Tensor) -> Tensor:
    """[N, J]: the rows of x, 0 at padded steps whatever they hold, even NaN; padded like those of `aligned`."""
    steps, lanes, inputs = x_TBI.shape
    x = padded_to(x_TBI, inputs, x_TBI.dtype)
    rows_NJ = x.new_empty(steps * lanes, -(-inputs // 8) * 8)
    grid = (max(1, min(2048, -(-len(rows_NJ) // 8))), 1, 1)
    _simple("real_rows", x, LENGTHS)(grid, (32, 8), x, _words(lengths_B), lanes, len(rows_NJ), inputs, rows_NJ.shape[1], rows_NJ)
    return rows_NJ


def set_reset_bits(resets_TB: Tensor, first: int, bits_BW: Tensor) -> None:
    """Set the bits of the window's steps from `first` on where lanes start again."""
    (steps, lanes), words = resets_TB.shape, bits_BW.shape[1]
    grid = (-(-lanes // 128), (first + steps - 1) // 32 - first // 32 + 1, 1)
    nvrtc.kernel(LENGTHS, "reset_bits", (("FP16", 0),), 0, bits_BW.get_device())(
        grid, (128, 1), resets_TB, lanes, first, steps, words, bits_BW
    )


def begun_rows(hs_TBP: Tensor, marks: LayerMarks) -> Tensor:
    """[N, P]: h before each step as the recurrent product took it: where a lane starts again, what the reset put there."""
    if marks.resets is None:
        return hs_TBP.view(-1, hs_TBP.shape[-1])
    rows_NP = hs_TBP.new_empty(hs_TBP.shape[0] * hs_TBP.shape[1], hs_TBP.shape[2])
    grid = (max(1, min(2048, -(-len(rows_NP) // 8))), 1, 1)
    _simple("begun_rows", hs_TBP, LENGTHS)(grid, (32, 8), hs_TBP, marks.resets.rows_TB, marks.h_P, len(rows_NP), rows_NP.shape[1], rows_NP)
    return rows_NP


def noise_bytes(noise: CellNoise, shape: LayerShape, x_TBI: Tensor) -> Tensor:
    """[T, B, P] uint8: which candidates stay, and which units keep their old values, in one direction (see `cell.cuh`)."""
    (steps, lanes), padded = x_TBI.shape[:2], shape.width
    bytes_TBP = x_TBI.new_empty(steps, lanes, padded, dtype=torch.uint8)
    numbers_B = None if noise.lanes is None else noise.lanes.to(torch.int64).contiguous()
    last = len(noise.zoneout) - 1
    drawn = [(noise.candidate_site(0), noise.recurrent_dropout), *((noise.kept_site(0, part), noise.zoneout[part]) for part in (0, last))]
    run = nvrtc.kernel("dropout.cu", "noise_bytes", (("FP16", 0), ("WIDE", 0)), 0, x_TBI.get_device())
    run(
        (-(-steps * lanes // 8), max(1, padded // 1024), 1), (256, 1), bytes_TBP, noise.key, numbers_B, steps * lanes, lanes, padded,
        int(not noise.locked), random.signed(noise.start),
        *(value for site, chance in drawn for value in (random.signed(site), random.threshold(chance))),
    )  # fmt: skip
    return bytes_TBP


def last_state(hs_SBP: Tensor, lengths_B: Tensor, hidden: int, dtype: torch.dtype) -> Tensor:
    """[B, H]: each lane's h after its last real step, or its initial h if it has none."""
    steps, lanes, padded = hs_SBP.shape[0] - 1, *hs_SBP.shape[1:]
    last_BH = hs_SBP.new_empty(lanes, hidden, dtype=dtype if dtype == hs_SBP.dtype else torch.float32)
    grid = (-(-hidden // 128), lanes, 1)
    halves = int(last_BH.dtype == hs_SBP.dtype)
    _simple("last_state", hs_SBP, LENGTHS)(grid, (128, 1), hs_SBP, _words(lengths_B), lanes, steps, hidden, padded, halves, last_BH)
    return last_BH.to(dtype)


def _words(lengths_B: Tensor) -> Tensor:
    return lengths_B.to(torch.int64).contiguous()


def readable(x: Tensor, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """x as the simple kernels read it: contiguous, in float32 or in the half-precision dtype itself."""
    dtype = dtype or x.dtype
    return x.to(dtype if dtype in (torch.float32, like.dtype) else torch.float32).contiguous()


def padded_to(x: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """x contiguous and aligned to 16 bytes, in this dtype, zero-padded to `width` units."""
    if dtype in HALVES and x.shape[-1] != width:
        return padded_rows(x.reshape(-1, x.shape[-1]), dtype, width).view(*x.shape[:-1], width)
    cast = x.to(dtype).contiguous()
    cast = cast.clone() if cast.data_ptr() % 16 else cast  # a view of another tensor may start at any address
    return cast if cast.shape[-1] == width else functional.pad(cast, (0, width - cast.shape[-1]))


def aligned(x_NI: Tensor) -> Tensor:
    """The rows, zero-padded to a multiple of 8 numbers: matrix products of other widths take three times as long."""
    return padded_rows(x_NI, x_NI.dtype) if x_NI.shape[1] % EACH else x_NI


def _fp16(like: Tensor) -> bool:
    return like.dtype == torch.float16


def _recurrent(name: str, shape: LayerShape, like: Tensor, kinds: tuple[int, int]) -> nvrtc.Kernel:
    resets, noise = kinds
    constants = shape.constants(fp16=_fp16(like), resets=resets, noise=noise)
    source = STREAM if shape.streamed is not None else WIDE if shape.wide else JOINED if shape.joined > 1 else SOURCE
    return nvrtc.kernel(source, name, constants, shape.shared_bytes + (shape.reset_bytes if resets else 0), like.get_device())


def _simple(name: str, like: Tensor, source: str = PACKING, cell: str = "lstm") -> nvrtc.Kernel:
    """One of the kernels that do not depend on the layout."""
    return nvrtc.kernel(source, name, (("FP16", int(_fp16(like))), ("CELL", CELLS[cell])), 0, like.get_device())


def _waves(words: int) -> tuple[int, int, int]:
    """A grid of 256-thread blocks for a loop over this many words: enough to fill the GPU."""
    return max(1, min(1024, -(-words // 256))), 1, 1
