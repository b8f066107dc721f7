"""The launches of `recurrence` replaced by what they define, in float64, for tests without a GPU.

Every buffer holds NaN until it is written, and a launch may only read what was written before it in the order of the streams: so this also
shows that chunks and layers come after what they need, and that nothing is left out.

Shapes: T time, B lane, I input, H hidden, P padded, Q = 4P.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from _emulated import deal, last_state, real_rows

from carrywave.kernels.hopper import recurrence
from carrywave.kernels.hopper.layout import LayerShape
from carrywave.kernels.hopper.recurrence import Dealt, Packed
from carrywave.kernels.weights import LayerWeights

NAN = float("nan")


def pack(weights: LayerWeights, shape: LayerShape, pitch: int, like: Tensor, *, transposed: bool) -> Packed:
    hidden = weights.w_hh.shape[1]

    def packed(weight_GI: Tensor, width: int) -> Tensor:
        out = like.new_zeros(shape.hidden, 4, width)
        out[:hidden, :, : weight_GI.shape[1]] = weight_GI.view(4, hidden, -1).transpose(0, 1)
        return out.view(4 * shape.hidden, width)

    w_hh, bias = packed(weights.w_hh, shape.hidden), like.new_zeros(shape.hidden, 4)
    if weights.b_ih is not None and weights.b_hh is not None:
        bias[:hidden] = (weights.b_ih + weights.b_hh).view(4, hidden).t()
    return Packed(packed(weights.w_ih, pitch), w_hh, w_hh.t().contiguous() if transposed else None, bias.view(-1))


def states(h_BH: Tensor, shape: LayerShape, steps: int, like: Tensor) -> Tensor:
    hs = like.new_full((steps + 1, h_BH.shape[0], shape.hidden), NAN)
    hs[0] = torch.nn.functional.pad(h_BH, (0, shape.hidden - h_BH.shape[1]))
    return hs


def gradients(gates_NQ: Tensor, shape: LayerShape, launches: int) -> tuple[Tensor, Tensor]:
    return torch.full_like(gates_NQ, NAN), torch.zeros(launches, 1)


def forward(
    shape: LayerShape,
    packed: Packed,
    hs: Tensor,
    gates: Tensor,
    cells: Tensor | None,
    first_c: Tensor,
    last_c: Tensor,
    dealt: Dealt,
) -> None:
    hs = hs.data  # as a kernel, it writes without torch's noticing
    steps, lanes = hs.shape[0] - 1, hs.shape[1]
    by_step, c = gates.view(steps, lanes, -1, 4), first_c.clone()
    lengths = torch.full((lanes,), steps) if dealt.lengths_B is None else dealt.lengths_B
    for step in range(steps):
        at = lengths > step
        i, f, g, o = (by_step[step, at] + (hs[step, at] @ packed.w_hh_QP.t()).view(-1, shape.hidden, 4)).unbind(-1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        c[at] = f * c[at] + i * g
        hs[step + 1] = 0.0
        hs[step + 1, at] = o * c[at].tanh()
        by_step[step, at] = torch.stack((i, f, g, o), dim=-1)
        if cells is not None:
            cells[step, at] = c[at]
    last_c.copy_(c)


def backward(
    shape: LayerShape,
    turned: Tensor,
    gates: Tensor,
    cells: Tensor,
    first_c: Tensor,
    grad_y: Tensor,
    grad_last: tuple[Tensor | None, Tensor | None],
    grads: Tensor,
    grad_first: tuple[Tensor, Tensor],
    bias: Tensor,
    ring: Tensor,
    dealt: Dealt,
    after: Tensor | None = None,
    *,
    before: bool = False,
) -> None:
    steps, lanes = cells.shape[:2]
    lengths = torch.full((lanes,), steps) if dealt.lengths_B is None else dealt.lengths_B
    dh, dc = (torch.zeros_like(first_c) if each is None else each.clone() for each in grad_last)
    by_step = grads.view(steps, lanes, -1, 4)
    if after is not None:
        dh[lengths == steps] += after[lengths == steps] @ turned.t()
    bias.zero_()
    for step in reversed(range(steps)):
        at = lengths > step
        by_step[step] = 0.0
        i, f, g, o = gates.view(steps, lanes, -1, 4)[step, at].unbind(-1)
        c_before = cells[step - 1, at] if step else first_c[at]
        slope = cells[step, at].tanh()
        own = dh[at] + grad_y[step, at]
        through = dc[at] + own * o * (1 - slope * slope)
        four = through * g * i * (1 - i), through * c_before * f * (1 - f), through * i * (1 - g * g), own * slope * o * (1 - o)
        by_step[step, at] = torch.stack(four, dim=-1)
        dh[at] = by_step[step, at].flatten(1) @ turned.t()
        dc[at] = through * f
        bias[0] += by_step[step].sum(0).flatten()
    if before:
        dh[lengths > 0] = 0.0  # a launch for earlier steps computes it from the gate gradients
    for to, value in zip(grad_first, (dh, dc), strict=True):
        to.copy_(value)


def unpack(
    grad_ih: Tensor | None, grad_hh: Tensor | None, bias: Tensor, like: Tensor, hidden: int, inputs: int, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    def plain(grad: Tensor | None, width: int) -> Tensor | None:
        return None if grad is None else grad.view(-1, 4, grad.shape[1])[:hidden, :, :width].transpose(0, 1).reshape(4 * hidden, width)

    return plain(grad_ih, inputs), plain(grad_hh, hidden), bias.sum(0).view(-1, 4)[:hidden].t().reshape(-1).expand(2, -1).clone()


def replace_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrence, "prepare_backward", lambda shape, like: None)
    for replaced in (pack, states, gradients, deal, real_rows, last_state, forward, backward, unpack):
        monkeypatch.setattr(recurrence, replaced.__name__, replaced)
    padded_to, new_empty = recurrence.padded_to, Tensor.new_empty

    def empty(self: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        made = new_empty(self, *shape, dtype=torch.float64 if dtype == torch.float32 else dtype)
        return made.fill_(NAN) if made.is_floating_point() else made

    monkeypatch.setattr(recurrence, "padded_to", lambda x, width, dtype: padded_to(x, width, torch.float64))
    monkeypatch.setattr(Tensor, "new_empty", empty)
