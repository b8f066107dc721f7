"""The launches around the recurrence of `persistent.cu` on the CPU, with the same arguments as `recurrence` has: four rows for each unit,
interleaved and padded, resets that are bits in forward, and noise that is bytes. What a launch has not written holds NaN.

Shapes: T time, B lane, I input (J padded), H hidden (P padded), K units of a head, G = gates · H, Q = 4P interleaved, S = T + 1, N rows,
M numbers of a unit's memory, W words of a lane's resets, E groups.
"""

from __future__ import annotations

import sys
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
