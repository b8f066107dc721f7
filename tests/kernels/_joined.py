"""The launches of `joined.cu` on the CPU, block by block, as `_emulated` has those of `persistent.cu`.

The layers run a step behind each other; what one of them reads before another has written it is NaN.

Shapes: T time, B lane, H hidden (P padded), Q = 4P, N rows or lanes of a pass, R rows of a product, K its inner dimension.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import _formulas
from _emulated import _active, _lengths, _table, _write_once

from carrywave.kernels.hopper.joined import BackwardLayer, ForwardLayer
from carrywave.kernels.hopper.layout import LayerShape
from carrywave.kernels.hopper.recurrence import SortedLanes


def launch_forward(
    shape: LayerShape, layers: Sequence[ForwardLayer], dealt: SortedLanes, lanes: int, steps: int, *, kept: bool, mask_steps: bool
) -> None:
    lengths, cs = _lengths(dealt, lanes, steps), [layer.first_c_BP.clone() for layer in layers]
    for diagonal in range(steps + len(layers) - 1):
        for number, layer in enumerate(layers):
            if 0 <= diagonal - number < steps:
                _forward_step(shape, layer, cs[number], diagonal - number, dealt, lengths, kept=kept, mask_steps=mask_steps)
    for layer, c_BP in zip(layers, cs, strict=True):
        layer.last_c_BP.copy_(c_BP)
        for lane, length in enumerate(lengths):
            layer.hs_SBP.data[length + 1 :, lane] = 0.0
            if layer.outputs_NP is not None:
                layer.outputs_NP.view(steps, lanes, -1)[length:, lane] = 0.0


def _forward_step(
    shape: LayerShape, layer: ForwardLayer, c_BP: Tensor, step: int, dealt: SortedLanes, lengths: list[int], *, kept: bool, mask_steps: bool
) -> None:
    lanes, units, hs_SBP = len(lengths), shape.units, layer.hs_SBP.data
    gates = layer.gates_NQ.view(-1, lanes, shape.hidden, 4)
    for group in range(shape.groups):
        at = _active(_table(shape, group, dealt, lengths), shape, 0, step)
        for member in range(shape.hidden // units) if at else ():
            own = slice(member * units, (member + 1) * units)
            rows = [(member * units + tile * 16 + row % 16) * 4 + row // 16 for tile in range(units // 16) for row in range(64)]
            # Two warpgroups multiply h, and two what comes from below: each every second block of K.
            sums = _blocks(layer.w_hh_QP[rows], hs_SBP[step, at], 2)
            a = gates[step, at, own]
            if layer.w_ih_QP is not None:
                assert layer.below_NP is not None
                sums = sums + _blocks(layer.w_ih_QP[rows], layer.below_NP.view(-1, lanes, shape.hidden)[step, at], 2)
                a = layer.bias_Q.view(-1, 4)[own].expand(len(at), -1, -1)
            a = a + sums.view(len(at), units // 16, 4, 16).transpose(2, 3).reshape(len(at), units, 4)
            h, keep, memory = _formulas.forward(shape.cell, None, a.unbind(-1), c_BP[at, own][..., None], torch.zeros_like(c_BP[at, own]))
            c_BP[at, own] = memory[..., 0].to(c_BP.dtype)
            _write_once(hs_SBP, h, step + 1, at, own)
            if layer.outputs_NP is not None:
                assert layer.mask is not None
                masked = h * layer.mask[step if mask_steps else 0, at, own]
                _write_once(layer.outputs_NP.view(-1, lanes, shape.hidden), masked, step, at, own)
            if kept:
                assert layer.cells_TBP is not None
                gates[step, at, own] = keep.to(gates.dtype)
                layer.cells_TBP[step, at, own] = c_BP[at, own]


def launch_backward(
    shape: LayerShape,
    layers: Sequence[BackwardLayer],
    ring: Tensor,
    dealt: SortedLanes,
    lanes: int,
    steps: int,
    *,
    after: bool,
    before: bool,
    mask_steps: bool,
) -> None:
    lengths = _lengths(dealt, lanes, steps)
    states = []
    for layer in layers:
        zeros = torch.zeros_like(layer.first_c_BP)
        dh, dc = (zeros if part is None else part.clone() for part in (layer.grad_last_h_BP, layer.grad_last_c_BP))
        states.append((dh, dc, dh.clone()))  # the last: of lanes without a real step
        layer.grad_bias_EQ.zero_()
        for lane, length in enumerate(lengths):
            layer.grads_NQ.view(steps, lanes, -1)[length:, lane] = 0.0
    for diagonal in range(steps + 1 + len(layers) - 1):
        for number, layer in enumerate(layers):
            step = steps - 1 - diagonal + (len(layers) - 1 - number)
            if -1 <= step < steps and not (step < 0 and before):
                _backward_step(shape, layer, states[number], step, steps, dealt, lengths, after=after, mask_steps=mask_steps)
    for layer, (_, dc, first_h) in zip(layers, states, strict=True):
        if before:
            first_h[[lane for lane, length in enumerate(lengths) if length]] = 0.0
        layer.grad_first_h_BP.copy_(first_h)
        layer.grad_first_c_BP.copy_(dc)


def _backward_step(
    shape: LayerShape,
    layer: BackwardLayer,
    state: tuple[Tensor, Tensor, Tensor],
    step: int,
    steps: int,
    dealt: SortedLanes,
    lengths: list[int],
    *,
    after: bool,
    mask_steps: bool,
) -> None:
    lanes, (grad_h, dc, first_h) = len(lengths), state
    gates = layer.gates_NQ.view(steps, lanes, shape.hidden, 4)
    # The kernel reads behind this launch's gradients, where a later launch's lie.
    grads = layer.grads_NQ.as_strided((steps + int(after), lanes, 4 * shape.hidden), (lanes * 4 * shape.hidden, 4 * shape.hidden, 1))
    assert layer.cells_TBP is not None
    for group in range(shape.groups):
        table = _table(shape, group, dealt, lengths)
        now = _active(table, shape, 0, max(step, 0))
        follow = now if after and step + 1 == steps else _active(table, shape, 0, step + 1)
        dh = torch.zeros(lanes, shape.hidden, dtype=grads.dtype)
        if follow:
            dh[follow] = _halves(layer.turned_hh_PQ, grads[step + 1, follow], shape)
        if step < 0:
            first_h[now] = dh[now].to(first_h.dtype)
            continue
        if not now:
            continue
        if layer.above_NQ is None:
            assert layer.from_y is not None
            dh[now] += layer.from_y[step, now]
        else:
            assert layer.turned_ih_PQ is not None
            of_y = _halves(layer.turned_ih_PQ, layer.above_NQ.view(steps, lanes, -1)[step, now], shape)
            dh[now] += of_y if layer.from_y is None else of_y * layer.from_y[step if mask_steps else 0, now]
        ends = torch.tensor([[lengths[lane] == step + 1] for lane in now])
        dh[now] += torch.where(ends, grad_h[now], 0.0)
        c_before = (layer.cells_TBP[step - 1, now] if step else layer.first_c_BP[now])[..., None]
        c_now = torch.full_like(c_before, torch.nan) if shape.cell == "gru" else layer.cells_TBP[step, now][..., None]
        a = gates[step, now].unbind(-1)
        each, memory, _ = _formulas.backward(shape.cell, None, a, c_before, c_now, dh[now], dc[now][..., None])
        _write_once(grads.view(-1, lanes, shape.hidden, 4), each, step, now)
        layer.grad_bias_EQ[group] += each.sum(0).flatten()
        dc[now] = memory[..., 0].to(dc.dtype)


def _halves(turned_PQ: Tensor, behind_NQ: Tensor, shape: LayerShape) -> Tensor:
    """[N, P]: a gradient through a product, of which two blocks of each quad have half of K each."""
    sums = torch.zeros(len(behind_NQ), shape.hidden, dtype=behind_NQ.dtype)
    for part in range(2):
        half = slice(part * 2 * shape.hidden, (part + 1) * 2 * shape.hidden)
        sums += _blocks(turned_PQ[:, half], behind_NQ[:, half], 4)
    return sums


def _blocks(rows_RK: Tensor, operand_NK: Tensor, warpgroups: int) -> Tensor:
    """[N, R]: each warpgroup has its turn of the 64-wide blocks of K."""
    sums = torch.zeros(len(operand_NK), len(rows_RK), dtype=rows_RK.dtype)
    for warpgroup in range(warpgroups):
        for first in range(warpgroup * 64, rows_RK.shape[1], warpgroups * 64):
            part = slice(first, first + 64)
            sums += operand_NK[:, part] @ rows_RK[:, part].t()
    return sums
