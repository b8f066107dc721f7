"""The launches of `persistent.cu` on the CPU, block by block, with the same arguments as `recurrence` has.

It walks as the kernel does: blocks that own units, lanes dealt to groups, passes, heads that know nothing of each other, warpgroups that
share K, quads that swap partial sums, four rows for each unit, interleaved and padded, buffers that hold NaN until a word is written, once,
resets that are bits in forward and notes in the memory for backward, and noise that is bytes. The formulas of a step are read out of the
source itself (`_formulas`). The GPU adds rounding, and who waits for whom; `tests/gpu` has these.

Shapes: T time, B lane, I input (J padded), H hidden (P padded), K units of a head (padded; P without heads), G = gates · H, Q = 4P
interleaved, S = T + 1, N lanes of a pass or rows, M numbers of a unit's memory, W words of a lane's resets, E groups.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import _formulas

from carrywave.kernels.hopper.buffers import LayerMarks
from carrywave.kernels.hopper.layout import LayerShape
from carrywave.kernels.hopper.recurrence import Packed, SortedLanes
from carrywave.kernels.step_marks import CellNoise
from carrywave.kernels.weights import LayerWeights

WARPGROUPS = 4
Table = list[tuple[int, int]]  # (lane, length) at each place of a group

# The launches beside the recurrence itself.
AROUND = (
    "pack",
    "states",
    "unwritten",
    "gradients",
    "unpack",
    "deal",
    "real_rows",
    "last_state",
    "set_reset_bits",
    "begun_rows",
    "noise_bytes",
    "prepare_backward",
)
# The rows of a unit for each gate of the cell, in the products with the inputs and with h.
ROWS = {"lstm": ((0, 1, 2, 3),) * 2, "gru": ((0, 1, 2), (0, 1, 3)), "slstm": ((0, 1, 2, 3),) * 2}


def interleaved(weight_GI: Tensor, rows: tuple[int, ...], padded: int, width: int) -> Tensor:
    """[Q, width]: four rows for each unit, zeros where there is no weight."""
    hidden, inputs = weight_GI.shape[0] // len(rows), weight_GI.shape[1]
    out = weight_GI.new_zeros(padded, 4, width)
    out[:hidden, rows, :inputs] = weight_GI.view(len(rows), hidden, inputs).transpose(0, 1)
    return out.view(4 * padded, width)


def plain(grad_QI: Tensor, rows: tuple[int, ...], hidden: int, inputs: int) -> Tensor:
    """Back in torch's order of gates."""
    return grad_QI.view(-1, 4, grad_QI.shape[1])[:hidden, rows, :inputs].transpose(0, 1).reshape(len(rows) * hidden, inputs)


def pack(weights: LayerWeights, shape: LayerShape, pitch: int, like: Tensor, *, transposed: bool) -> Packed:
    of_input, of_h = ROWS[shape.cell]
    w_hh_QK = interleaved(weights.w_hh.detach(), of_h, shape.width, shape.hidden).to(like.dtype)
    bias_Q = like.new_zeros(4 * shape.width)
    for bias_G, rows in ((weights.b_ih, of_input), (weights.b_hh, of_h)):
        if bias_G is not None:
            bias_Q += interleaved(bias_G.detach()[:, None].to(like.dtype), rows, shape.width, 1)[:, 0]
    w_ih_QJ = interleaved(weights.w_ih.detach(), of_input, shape.width, pitch).to(like.dtype)
    turned = torch.cat([of_head.t() for of_head in w_hh_QK.chunk(shape.heads)]) if transposed else None
    return Packed(w_ih_QJ, w_hh_QK, turned, bias_Q, w_ih_QJ.t().contiguous() if transposed and shape.joined > 1 else None)


def states(h_BH: Tensor, shape: LayerShape, steps: int, like: Tensor) -> Tensor:
    hs_SBP = torch.full((steps + 1, len(h_BH), shape.width), torch.nan, dtype=like.dtype)
    hs_SBP[0] = 0.0
    hs_SBP[0, :, : h_BH.shape[1]] = h_BH
    return hs_SBP


def unwritten(rows_NP: Tensor) -> Tensor:
    return torch.full_like(rows_NP, torch.nan)


def gradients(gates_NQ: Tensor, shape: LayerShape, launches: int) -> tuple[Tensor, Tensor]:
    return torch.full_like(gates_NQ, torch.nan), torch.zeros(launches, 1)


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
    of_input, of_h = ROWS[shape.cell]
    dw_ih = None if grad_ih_QJ is None else plain(grad_ih_QJ, of_input, hidden, inputs).to(dtype)
    dw_hh = None if grad_hh_QP is None else plain(grad_hh_QP, of_h, hidden, hidden // shape.heads).to(dtype)
    sums_Q1 = bias_EQ.sum(0)[:, None]
    return dw_ih, dw_hh, torch.stack([plain(sums_Q1, rows, hidden, 1)[:, 0].to(dtype) for rows in (of_input, of_h)])


def deal(lengths_B: Tensor, steps: int, chunk_steps: int, like: Tensor) -> list[SortedLanes]:
    """Each lane's place is the number of those that come before it, as the kernel counts."""
    before = (lengths_B[:, None] > lengths_B) | (
        (lengths_B[:, None] == lengths_B) & (torch.arange(len(lengths_B))[:, None] < torch.arange(len(lengths_B)))
    )
    order_B = torch.empty(len(lengths_B), dtype=torch.int32)
    order_B[before.sum(0)] = torch.arange(len(lengths_B), dtype=torch.int32)
    spans = [(first, min(chunk_steps, steps - first)) for first in range(0, steps, chunk_steps)]
    return [SortedLanes(order_B, (lengths_B - first).clamp(0, span).to(torch.int32)) for first, span in spans]


def real_rows(x_TBI: Tensor, lengths_B: Tensor) -> Tensor:
    steps, lanes, inputs = x_TBI.shape
    rows = torch.where((torch.arange(steps)[:, None] < lengths_B)[..., None], x_TBI, 0.0).reshape(steps * lanes, inputs)
    return torch.nn.functional.pad(rows, (0, -inputs % 8))


def last_state(hs_SBP: Tensor, lengths_B: Tensor, hidden: int, dtype: torch.dtype) -> Tensor:
    return hs_SBP[lengths_B, torch.arange(len(lengths_B)), :hidden].to(dtype)


def prepare_backward(shape: LayerShape, like: Tensor, kinds: tuple[int, int]) -> None:
    pass


def set_reset_bits(resets_TB: Tensor, first: int, bits_BW: Tensor) -> None:
    words = bits_BW.to(torch.int64) & 0xFFFFFFFF
    for step, lane in resets_TB.nonzero().tolist():
        words[lane, (first + step) // 32] |= 1 << (first + step) % 32
    bits_BW.copy_(torch.where(words < 1 << 31, words, words - (1 << 32)))


def noise_bytes(noise: CellNoise, shape: LayerShape, x_TBI: Tensor) -> Tensor:
    like_TBP = x_TBI.new_empty(()).expand(*x_TBI.shape[:2], shape.width)
    old = [noise.kept(0, part, like_TBP) for part in range(len(noise.zoneout))]
    multiplier_TBP = noise.candidate(0, like_TBP)
    bytes_TBP = torch.ones(like_TBP.shape, dtype=torch.uint8) if multiplier_TBP is None else (multiplier_TBP > 0).to(torch.uint8)
    for bit, kept in ((2, old[0]), (4, old[-1])):
        if isinstance(kept, Tensor):
            bytes_TBP = bytes_TBP + kept.to(torch.uint8) * bit
    return bytes_TBP


def begun_rows(hs_TBP: Tensor, marks: LayerMarks) -> Tensor:
    if marks.resets is None:
        return hs_TBP.reshape(-1, hs_TBP.shape[-1])
    begin_P = torch.zeros_like(hs_TBP[0, 0]) if marks.h_P is None else marks.h_P
    return torch.where(marks.resets.rows_TB[..., None], begin_P, hs_TBP).reshape(-1, hs_TBP.shape[-1])


def starts_again(marks: LayerMarks, lanes: list[int], step: int) -> Tensor:
    """[N, 1] bool: where lanes start again at a step of the launch, by the bits of the window."""
    if marks.resets is None:
        return torch.zeros(len(lanes), 1, dtype=torch.bool)
    number = marks.resets.first + step
    return (marks.resets.bits_BW[lanes, number // 32] >> number % 32 & 1).bool()[:, None]


def by_unit(memory: Tensor, shape: LayerShape) -> Tensor:
    """[…, P, M]: a view of memory in which a unit's numbers are apart."""
    return memory.view(*memory.shape[:-1], shape.width, shape.memory)


def memory_begin(marks: LayerMarks, like_BPM: Tensor) -> Tensor:
    """[P, M]: the memory of a lane that starts again."""
    return torch.zeros_like(like_BPM[0]) if marks.memory_P is None else marks.memory_P[:, None]


def noise_at(marks: LayerMarks, step: int, lanes: list[int], units: slice = slice(None)) -> _formulas.NoiseOf | None:
    """The noise of some units of some lanes at a step."""
    if marks.noise is None:
        return None
    bytes_TBP = marks.noise.bytes_TBP
    return _formulas.noise_of(marks.noise, None if bytes_TBP is None else bytes_TBP[step, lanes, units])


def forward(
    shape: LayerShape,
    packed: Packed,
    hs_SBP: Tensor,
    gates_NQ: Tensor,
    cells: Tensor | None,
    first_c: Tensor,
    last_c: Tensor,
    dealt: SortedLanes,
    marks: LayerMarks,
) -> None:
    steps, lanes, units = hs_SBP.shape[0] - 1, hs_SBP.shape[1], shape.units
    gates = gates_NQ.view(steps, lanes, shape.width, 4)
    cells_TBPM = None if cells is None else by_unit(cells, shape)
    lengths = _lengths(dealt, lanes, steps)
    c_BPM, h_before = by_unit(first_c, shape).clone(), hs_SBP[0].clone()
    begin_PM = memory_begin(marks, c_BPM)
    for group, head in product(range(shape.groups), range(shape.heads)):
        table = _table(shape, group, dealt, lengths)
        for step, turn in product(range(table[0][1]), range(shape.passes)):
            if not (at := _active(table, shape, turn, step)):
                continue
            again = starts_again(marks, at, step)
            for member in range(shape.hidden // units):
                low = head * shape.hidden + member * units
                own = slice(low, low + units)
                # Tiles of 16 units, in each the rows of one gate after those of another.
                rows = [(low + tile * 16 + row % 16) * 4 + row // 16 for tile in range(units // 16) for row in range(64)]
                sums = _multiply(packed.w_hh_QP[rows], hs_SBP[step, at, _of_head(shape, head)], shape)
                recurrent = sums.view(len(at), units // 16, 4, 16).transpose(2, 3).reshape(len(at), units, 4)
                a = gates[step, at, own] + torch.where(again[..., None], 0.0, recurrent)
                memory = torch.where(again[..., None], begin_PM[own], c_BPM[at, own])
                past = torch.where(again, 0.0, h_before[at, own])
                h, kept, memory = _formulas.forward(shape.cell, noise_at(marks, step, at, own), a.unbind(-1), memory, past)
                c_BPM[at, own], h_before[at, own] = memory.to(c_BPM.dtype), h.to(h_before.dtype)
                _write_once(hs_SBP, h, step + 1, at, own)
                if cells_TBPM is not None:
                    gates[step, at, own] = kept.to(gates.dtype)
                    cells_TBPM[step, at, own] = c_BPM[at, own] if marks.resets is None else _noted(c_BPM[at, own], again)
    by_unit(last_c, shape).copy_(c_BPM)
    for lane, length in enumerate(lengths):
        hs_SBP[length + 1 :, lane] = 0.0


def backward(
    shape: LayerShape,
    turned_PQ: Tensor,
    gates_NQ: Tensor,
    cells: Tensor,
    first_c: Tensor,
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
    assert shape.continues or not (before or after_BQ is not None)
    assert (of_resets_EP2 is not None) == (marks.kinds[0] == 2)
    steps, lanes = grad_y_TBP.shape[:2]
    gates, grads = gates_NQ.view(steps, lanes, -1, 4), grads_NQ.view(steps, lanes, -1, 4)
    cells_TBPM, first_BPM = by_unit(cells, shape), by_unit(first_c, shape)
    lengths, begin_PM = _lengths(dealt, lanes, steps), memory_begin(marks, first_BPM)
    last_h, last_memory = grad_last
    grad_h = torch.zeros_like(first_BPM[..., 0]) if last_h is None else last_h.clone()
    dc = torch.zeros_like(first_BPM) if last_memory is None else by_unit(last_memory, shape).clone()
    past = torch.zeros_like(grad_h)
    first_h = grad_h.clone()  # of lanes without a real step
    bias_EQ.zero_()
    if of_resets_EP2 is not None:
        of_resets_EP2.zero_()
    for lane, length in enumerate(lengths):
        grads[length:, lane] = 0.0
    for group, head in product(range(shape.groups), range(shape.heads)):
        table, own = _table(shape, group, dealt, lengths), _of_head(shape, head)
        for step, turn in product(range(table[0][1] - 1, -1 if before else -2, -1), range(shape.passes)):
            after, at = _active(table, shape, turn, step + 1), _active(table, shape, turn, max(step, 0))
            follows = after_BQ is not None and step + 1 == steps
            after = at if follows else after
            if not at:
                continue
            dh = past[at, own]
            if after:
                behind = after_BQ.view(lanes, -1, 4) if follows and after_BQ is not None else grads[step + 1]
                recurrent = torch.zeros(lanes, shape.hidden, dtype=grads.dtype)
                recurrent[after] = _of_quads(turned_PQ[own], behind[after, own].flatten(1), shape)
                # What the next step multiplied was not h if it started again.
                cut = starts_again(marks, after, steps) if follows else _note_in(cells_TBPM[step + 1, after, own], marks)
                recurrent[after] = torch.where(cut, 0.0, recurrent[after])
                dh = dh + recurrent[at]
            if step < 0:
                first_h[at, own] = dh.to(first_h.dtype)
                continue
            ends = torch.tensor([[lengths[lane] == step + 1] for lane in at])
            dh = dh + grad_y_TBP[step, at, own] + torch.where(ends, grad_h[at, own], 0.0)
            again = _note_in(cells_TBPM[step, at, own], marks)
            c_before = torch.where(again[..., None], begin_PM[own], cells_TBPM[step - 1, at, own] if step else first_BPM[at, own])
            c_now = torch.full_like(c_before, torch.nan) if shape.cell == "gru" else cells_TBPM[step, at, own]
            noise = noise_at(marks, step, at, own)
            each, memory, left = _formulas.backward(shape.cell, noise, gates[step, at, own].unbind(-1), c_before, c_now, dh, dc[at, own])
            _write_once(grads, each, step, at, own)
            bias_EQ[group].view(-1, 4)[own] += each.sum(0)
            if of_resets_EP2 is not None:
                parts = memory[..., 0], left
                of_resets_EP2[group, own] += torch.stack([torch.where(again, part, 0.0).sum(0) for part in parts], dim=-1)
            dc[at, own] = torch.where(again[..., None], 0.0, memory).to(dc.dtype)
            past[at, own] = torch.where(again, 0.0, left).to(past.dtype)
    if before:
        some = [lane for lane, length in enumerate(lengths) if length]
        first_h[some] = past[some]
    grad_first[0].copy_(first_h)
    by_unit(grad_first[1], shape).copy_(dc)


def _noted(memory: Tensor, again: Tensor) -> Tensor:
    """The memory, in whose first number the last bit says whether the lane has started again."""
    bits = memory.contiguous().view(torch.int64).clone()
    bits[..., 0] = bits[..., 0] & ~1 | again.to(torch.int64)
    return bits.view(torch.float64)


def _note_in(memory: Tensor, marks: LayerMarks) -> Tensor:
    """Bool, for each unit: what was noted."""
    if marks.resets is None:
        return torch.zeros(memory.shape[:-1], dtype=torch.bool)
    return (memory[..., 0].contiguous().view(torch.int64) & 1).bool()


def _of_head(shape: LayerShape, head: int) -> slice:
    """Its units among those of all heads."""
    return slice(head * shape.hidden, (head + 1) * shape.hidden)


def _of_quads(turned_KQ: Tensor, behind_NQ: Tensor, shape: LayerShape) -> Tensor:
    """[N, K]: the gradient of h through the product. Each block takes a quarter of the inner dimension for all units of its quad; what
    belongs to the others goes to them.
    """
    recurrent = torch.zeros(len(behind_NQ), shape.hidden, dtype=behind_NQ.dtype)
    for member in range(shape.hidden // shape.units):
        quad, part = divmod(member, 4)
        of_quad = slice(quad * 4 * shape.units, (quad + 1) * 4 * shape.units)
        quarter = slice(part * shape.hidden, (part + 1) * shape.hidden)
        recurrent[:, of_quad] += _multiply(turned_KQ[of_quad, quarter], behind_NQ[:, quarter], shape)
    return recurrent


def _lengths(dealt: SortedLanes, lanes: int, steps: int) -> list[int]:
    return [steps] * lanes if dealt.lengths_B is None else [min(length, steps) for length in dealt.lengths_B.tolist()]


def _table(shape: LayerShape, group: int, dealt: SortedLanes, lengths: list[int]) -> Table:
    order = list(range(len(lengths))) if dealt.order_B is None else dealt.order_B.tolist()
    ranks = [place * shape.groups + group for place in range(shape.lanes * shape.passes)]
    return [(order[rank], lengths[order[rank]]) if rank < len(order) else (-1, 0) for rank in ranks]


def _active(table: Table, shape: LayerShape, turn: int, step: int) -> list[int]:
    """The lanes of a pass that reach a step: the first ones."""
    of_pass = table[turn * shape.lanes : (turn + 1) * shape.lanes]
    reach = [length > step for _, length in of_pass]
    assert reach == sorted(reach, reverse=True)
    return [lane for lane, length in of_pass if length > step]


def _multiply(rows_RK: Tensor, gathered: Tensor, shape: LayerShape) -> Tensor:
    """[N, R]: each warpgroup has every fourth 64-wide block of K, in wide layouts half of each, in streamed ones every second. Lanes
    that are not active hold rubbish.
    """
    operand_NK = torch.full((shape.lanes, rows_RK.shape[1]), torch.nan, dtype=rows_RK.dtype)
    operand_NK[: len(gathered)] = gathered
    sums = torch.zeros(shape.lanes, len(rows_RK), dtype=rows_RK.dtype)
    warpgroups, width = (2, 32) if shape.wide else (WARPGROUPS if shape.streamed is None else 2, 64)
    for warpgroup in range(warpgroups):
        for first in range(warpgroup * width, rows_RK.shape[1], warpgroups * width):
            part = slice(first, first + width)
            sums += operand_NK[:, part] @ rows_RK[:, part].t()
    return sums[: len(gathered)]


def _write_once(buffer: Tensor, value: Tensor, *at: object) -> None:
    assert bool(buffer[at].isnan().all()), "a word is written twice"
    assert bool(value.isfinite().all()), "a word was read before it was written"
    buffer[at] = value.to(buffer.dtype)
