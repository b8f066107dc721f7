"""The launches of `persistent.cu` on the CPU, block by block, with the same arguments as `recurrence` has.

It walks as the kernel does: blocks that own units, lanes dealt to groups, passes, warpgroups that share K, quads that swap partial
sums, gates interleaved and padded, buffers that hold NaN until a word is written, once. The formulas of a step are read out of the
source itself. The GPU adds rounding, and who waits for whom; `tests/gpu` has these.

Shapes: T time, B lane, I input (J padded), H hidden (P padded), G = 4H, Q = 4P interleaved, S = T + 1, N lanes of a pass or rows.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from carrywave.kernels.hopper.layout import LayerShape
from carrywave.kernels.hopper.recurrence import SOURCE, Dealt, Packed
from carrywave.kernels.weights import LayerWeights

WARPGROUPS = 4
Table = list[tuple[int, int]]  # (lane, length) at each place of a group

# What a step computes, and with which name its expression begins in the source.
FORWARD = {"i": "sigmoid", "f": "sigmoid", "g": "tanh_", "o": "sigmoid", "c": "f", "h": "o"}
BACKWARD = {"slope": "tanh_", "d_o": "dh", "d_c": "dc", "d_i": "d_c", "d_f": "d_c", "d_g": "d_c", "dc": "d_c"}


@cache
def formulas() -> dict[str, CodeType]:
    """The kernel's own expressions, by the name of what they give."""
    text = files("carrywave.kernels").joinpath("source", SOURCE).read_text("utf-8").replace("[pass]", "")
    found = {}
    for name, first in (FORWARD | BACKWARD).items():
        match = re.search(rf"\b{name} = ({first}\b[^,;]*)[,;]", text)
        assert match is not None, f"{SOURCE} does not say how it computes {name}"
        found[name] = compile(match[1].replace("1.0f", "1.0"), SOURCE, "eval")
    return found


def computed(wanted: dict[str, str], **values: Tensor) -> dict[str, Tensor]:
    known: dict[str, Any] = {"sigmoid": torch.sigmoid, "tanh_": torch.tanh, **values}
    for name in wanted:
        known[name] = eval(formulas()[name], {"__builtins__": {}}, known)
    return known


def interleaved(weight_GI: Tensor, padded: int, width: int) -> Tensor:
    """[Q, width]: rows by (unit, gate), zeros beyond."""
    hidden, inputs = weight_GI.shape[0] // 4, weight_GI.shape[1]
    out = weight_GI.new_zeros(padded, 4, width)
    out[:hidden, :, :inputs] = weight_GI.view(4, hidden, inputs).transpose(0, 1)
    return out.view(4 * padded, width)


def plain(grad_QI: Tensor, hidden: int, inputs: int) -> Tensor:
    """Back in torch's order of gates."""
    return grad_QI.view(-1, 4, grad_QI.shape[1])[:hidden, :, :inputs].transpose(0, 1).reshape(4 * hidden, inputs)


def pack(weights: LayerWeights, shape: LayerShape, pitch: int, like: Tensor, *, transposed: bool) -> Packed:
    w_hh_QP = interleaved(weights.w_hh.detach(), shape.hidden, shape.hidden).to(like.dtype)
    bias_G = torch.zeros(len(weights.w_ih)) if weights.b_ih is None or weights.b_hh is None else weights.b_ih + weights.b_hh
    bias_Q = interleaved(bias_G.detach()[:, None].to(like.dtype), shape.hidden, 1)[:, 0]
    w_ih_QJ = interleaved(weights.w_ih.detach(), shape.hidden, pitch).to(like.dtype)
    return Packed(w_ih_QJ, w_hh_QP, w_hh_QP.t().contiguous() if transposed else None, bias_Q)


def states(h_BH: Tensor, shape: LayerShape, steps: int, like: Tensor) -> Tensor:
    hs_SBP = torch.full((steps + 1, len(h_BH), shape.hidden), torch.nan, dtype=like.dtype)
    hs_SBP[0] = 0.0
    hs_SBP[0, :, : h_BH.shape[1]] = h_BH
    return hs_SBP


def gradients(gates_NQ: Tensor, shape: LayerShape, launches: int) -> tuple[Tensor, Tensor]:
    return torch.full_like(gates_NQ, torch.nan), torch.zeros(launches, 1)


def unpack(
    grad_ih_QJ: Tensor | None, grad_hh_QP: Tensor | None, bias_EQ: Tensor, like: Tensor, hidden: int, inputs: int, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    dw_ih = None if grad_ih_QJ is None else plain(grad_ih_QJ, hidden, inputs).to(dtype)
    dw_hh = None if grad_hh_QP is None else plain(grad_hh_QP, hidden, hidden).to(dtype)
    return dw_ih, dw_hh, plain(bias_EQ.sum(0)[:, None], hidden, 1)[:, 0].to(dtype).repeat(2, 1)


def deal(lengths_B: Tensor, steps: int, chunk_steps: int, like: Tensor) -> list[Dealt]:
    """Each lane's place is the number of those that come before it, as the kernel counts."""
    before = (lengths_B[:, None] > lengths_B) | (
        (lengths_B[:, None] == lengths_B) & (torch.arange(len(lengths_B))[:, None] < torch.arange(len(lengths_B)))
    )
    order_B = torch.empty(len(lengths_B), dtype=torch.int32)
    order_B[before.sum(0)] = torch.arange(len(lengths_B), dtype=torch.int32)
    spans = [(first, min(chunk_steps, steps - first)) for first in range(0, steps, chunk_steps)]
    return [Dealt(order_B, (lengths_B - first).clamp(0, span).to(torch.int32)) for first, span in spans]


def real_rows(x_TBI: Tensor, lengths_B: Tensor) -> Tensor:
    steps, lanes, inputs = x_TBI.shape
    rows = torch.where((torch.arange(steps)[:, None] < lengths_B)[..., None], x_TBI, 0.0).reshape(steps * lanes, inputs)
    return torch.nn.functional.pad(rows, (0, -inputs % 8))


def last_state(hs_SBP: Tensor, lengths_B: Tensor, hidden: int, dtype: torch.dtype) -> Tensor:
    return hs_SBP[lengths_B, torch.arange(len(lengths_B)), :hidden].to(dtype)


def prepare_backward(shape: LayerShape, like: Tensor) -> None:
    pass


def forward(
    shape: LayerShape,
    packed: Packed,
    hs_SBP: Tensor,
    gates_NQ: Tensor,
    cells_TBP: Tensor | None,
    first_c_BP: Tensor,
    last_c_BP: Tensor,
    dealt: Dealt,
) -> None:
    steps, lanes, units = hs_SBP.shape[0] - 1, hs_SBP.shape[1], shape.units
    gates = gates_NQ.view(steps, lanes, shape.hidden, 4)
    lengths = _lengths(dealt, lanes, steps)
    c = first_c_BP.clone()
    for group in range(shape.groups):
        table = _table(shape, group, dealt, lengths)
        for step, turn in ((step, turn) for step in range(table[0][1]) for turn in range(shape.passes)):
            if not (at := _active(table, shape, turn, step)):
                continue
            for member in range(shape.hidden // units):
                own = slice(member * units, (member + 1) * units)
                # Tiles of 16 units, in each the rows of one gate after those of another.
                rows = [(member * units + tile * 16 + row % 16) * 4 + row // 16 for tile in range(units // 16) for row in range(64)]
                sums = _multiply(packed.w_hh_QP[rows], hs_SBP[step, at], shape)
                recurrent = sums.view(len(at), units // 16, 4, 16).transpose(2, 3).reshape(len(at), units, 4)
                a_i, a_f, a_g, a_o = (gates[step, at, own] + recurrent).unbind(-1)
                now = computed(FORWARD, a_i=a_i, a_f=a_f, a_g=a_g, a_o=a_o, c=c[at, own])
                c[at, own] = now["c"].to(c.dtype)
                _write_once(hs_SBP, now["h"], step + 1, at, own)
                if cells_TBP is not None:
                    gates[step, at, own] = torch.stack([now[gate] for gate in "ifgo"], dim=-1)
                    cells_TBP[step, at, own] = c[at, own]
    last_c_BP.copy_(c)
    for lane, length in enumerate(lengths):
        hs_SBP[length + 1 :, lane] = 0.0


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
    dealt: Dealt,
    after_BQ: Tensor | None = None,
    *,
    before: bool = False,
) -> None:
    steps, lanes, units, padded = *cells_TBP.shape[:2], shape.units, shape.hidden
    gates, grads = gates_NQ.view(steps, lanes, padded, 4), grads_NQ.view(steps, lanes, padded, 4)
    lengths = _lengths(dealt, lanes, steps)
    grad_h, dc = (torch.zeros_like(first_c_BP) if grad is None else grad.clone() for grad in grad_last)
    first_h = grad_h.clone()  # of lanes without a real step
    bias_EQ.zero_()
    for lane, length in enumerate(lengths):
        grads[length:, lane] = 0.0
    for group in range(shape.groups):
        table = _table(shape, group, dealt, lengths)
        for step, turn in ((step, turn) for step in range(table[0][1] - 1, -1 if before else -2, -1) for turn in range(shape.passes)):
            after, at = _active(table, shape, turn, step + 1), _active(table, shape, turn, max(step, 0))
            follows = after_BQ is not None and step + 1 == steps
            after = at if follows else after
            if not at:
                continue
            recurrent = torch.zeros(lanes, padded, dtype=grads.dtype)
            for member in range(padded // units if after else 0):
                # A quarter of K for all units of the quad; what belongs to the others goes to them.
                quad, part = divmod(member, 4)
                of_quad, of_K = slice(quad * 4 * units, (quad + 1) * 4 * units), slice(part * padded, (part + 1) * padded)
                behind = after_BQ if follows else grads.view(steps, lanes, 4 * padded)[step + 1]
                gathered = behind[after, of_K]
                recurrent[after, of_quad] += _multiply(turned_PQ[of_quad, of_K], gathered, shape)
            if step < 0:
                first_h[at] = recurrent[at].to(first_h.dtype)
                continue
            ends = torch.tensor([[lengths[lane] == step + 1] for lane in at])
            dh = recurrent[at] + grad_y_TBP[step, at] + torch.where(ends, grad_h[at], 0.0)
            i, f, g, o = gates[step, at].unbind(-1)
            c_before = cells_TBP[step - 1, at] if step else first_c_BP[at]
            now = computed(BACKWARD, i=i, f=f, g=g, o=o, dh=dh, dc=dc[at], c_now=cells_TBP[step, at], c_before=c_before)
            dc[at] = now["dc"].to(dc.dtype)
            each = torch.stack([now[f"d_{gate}"] for gate in "ifgo"], dim=-1)
            _write_once(grads, each, step, at)
            bias_EQ[group] += each.sum(0).view(-1)
    if before:
        first_h[[lane for lane, length in enumerate(lengths) if length]] = 0.0
    grad_first[0].copy_(first_h)
    grad_first[1].copy_(dc)


def _lengths(dealt: Dealt, lanes: int, steps: int) -> list[int]:
    return [steps] * lanes if dealt.lengths_B is None else [min(length, steps) for length in dealt.lengths_B.tolist()]


def _table(shape: LayerShape, group: int, dealt: Dealt, lengths: list[int]) -> Table:
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
    """[N, R]: each warpgroup has every fourth 64-wide block of K. Lanes beyond the active ones hold rubbish."""
    operand_NK = torch.full((shape.lanes, rows_RK.shape[1]), torch.nan, dtype=rows_RK.dtype)
    operand_NK[: len(gathered)] = gathered
    sums = torch.zeros(shape.lanes, len(rows_RK), dtype=rows_RK.dtype)
    for warpgroup in range(WARPGROUPS):
        for block in range(warpgroup, rows_RK.shape[1] // 64, WARPGROUPS):
            part = slice(block * 64, (block + 1) * 64)
            sums += operand_NK[:, part] @ rows_RK[:, part].t()
    return sums[: len(gathered)]


def _write_once(buffer: Tensor, value: Tensor, *at: object) -> None:
    assert bool(buffer[at].isnan().all()), "a word is written twice"
    assert bool(value.isfinite().all()), "a word was read before it was written"
    buffer[at] = value.to(buffer.dtype)
