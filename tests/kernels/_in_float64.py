"""The launches of `recurrence` replaced by what they define, in float64, for tests without a GPU.

Every buffer holds NaN until it is written, and a launch may only read what was written before it in the order of the streams: so this also
shows that chunks and layers come after what they need, and that nothing is left out.

Shapes: T time, B lane, I input, H hidden, P padded, K units of a head, Q = 4P, M numbers of a unit's memory, N lanes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import _emulated
import _formulas
from _emulated import by_unit, memory_begin, noise_at, starts_again

from carrywave.kernels.hopper import recurrence
from carrywave.kernels.hopper.buffers import LayerMarks
from carrywave.kernels.hopper.layout import LayerShape
from carrywave.kernels.hopper.recurrence import Packed, SortedLanes

NAN = float("nan")


def forward(
    shape: LayerShape,
    packed: Packed,
    hs: Tensor,
    gates: Tensor,
    cells: Tensor | None,
    first_c: Tensor,
    last_c: Tensor,
    dealt: SortedLanes,
    marks: LayerMarks,
) -> None:
    hs = hs.data  # as a kernel, it writes without torch's noticing
    steps, lanes = hs.shape[0] - 1, hs.shape[1]
    by_step, c_BPM = gates.view(steps, lanes, -1, 4), by_unit(first_c, shape).clone()
    begin_PM = memory_begin(marks, c_BPM)
    for step in range(steps):
        at = _active(dealt, lanes, steps, step)
        again = starts_again(marks, at, step)
        recurrent = _by_heads(hs[step, at], packed.w_hh_QP, shape).unflatten(-1, (-1, 4))
        a = by_step[step, at] + torch.where(again[..., None], 0.0, recurrent)
        memory = torch.where(again[..., None], begin_PM, c_BPM[at])
        past = torch.where(again, 0.0, hs[step, at])
        h, kept, c_BPM[at] = _formulas.forward(shape.cell, noise_at(marks, step, at), a.unbind(-1), memory, past)
        hs[step + 1] = 0.0
        hs[step + 1, at] = h
        by_step[step, at] = kept
        if cells is not None:
            by_unit(cells, shape)[step, at] = c_BPM[at]
    by_unit(last_c, shape).copy_(c_BPM)


def _by_heads(rows_NI: Tensor, weights_OI: Tensor, shape: LayerShape) -> Tensor:
    """[N, …]: the product of each head's part of the rows with its block of weights."""
    parts = zip(rows_NI.chunk(shape.heads, dim=1), weights_OI.chunk(shape.heads), strict=True)
    return torch.cat([part @ block.t() for part, block in parts], dim=1)


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
    dealt: SortedLanes,
    marks: LayerMarks,
    of_resets: Tensor | None,
    after: Tensor | None = None,
    *,
    before: bool = False,
) -> None:
    assert (of_resets is not None) == (marks.kinds[0] == 2)
    steps, lanes = cells.shape[:2]
    cells_TBPM, first_BPM = by_unit(cells, shape), by_unit(first_c, shape)
    begin_PM, (last_h, last_memory) = memory_begin(marks, first_BPM), grad_last
    dh = torch.zeros_like(first_BPM[..., 0]) if last_h is None else last_h.clone()
    dc = torch.zeros_like(first_BPM) if last_memory is None else by_unit(last_memory, shape).clone()
    by_step, past = grads.view(steps, lanes, -1, 4), torch.zeros_like(dh)
    if after is not None:
        going_on = _active(dealt, lanes, steps, steps - 1)
        dh[going_on] += torch.where(starts_again(marks, going_on, steps), 0.0, _by_heads(after[going_on], turned, shape))
    bias.zero_()
    if of_resets is not None:
        of_resets.zero_()
    for step in reversed(range(steps)):
        at = _active(dealt, lanes, steps, step)
        by_step[step] = 0.0
        again = starts_again(marks, at, step)
        c_before = torch.where(again[..., None], begin_PM, cells_TBPM[step - 1, at] if step else first_BPM[at])
        a = gates.view(steps, lanes, -1, 4)[step, at].unbind(-1)
        own, noise = dh[at] + grad_y[step, at], noise_at(marks, step, at)
        by_step[step, at], memory, left = _formulas.backward(shape.cell, noise, a, c_before, cells_TBPM[step, at], own, dc[at])
        recurrent = _by_heads(by_step[step, at].flatten(1), turned, shape)
        if of_resets is not None:
            of_resets[0] += torch.stack([torch.where(again, part, 0.0).sum(0) for part in (memory[..., 0], left)], dim=-1)
        dh[at], past[at] = (torch.where(again, 0.0, part) for part in (recurrent + left, left))
        dc[at] = torch.where(again[..., None], 0.0, memory)
        bias[0] += by_step[step].sum(0).flatten()
    if before:  # the rest of it is computed from the gate gradients, by a launch for earlier steps
        some = _active(dealt, lanes, steps, 0)
        dh[some] = past[some]
    grad_first[0].copy_(dh)
    by_unit(grad_first[1], shape).copy_(dc)


def _active(dealt: SortedLanes, lanes: int, steps: int, step: int) -> list[int]:
    """The lanes that reach a step."""
    lengths = [steps] * lanes if dealt.lengths_B is None else dealt.lengths_B.tolist()
    return [lane for lane, length in enumerate(lengths) if length > step]


def replace_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put these in the place of the kernels' launches."""
    for name in _emulated.AROUND:
        monkeypatch.setattr(recurrence, name, getattr(_emulated, name))
    for replaced in (forward, backward):
        monkeypatch.setattr(recurrence, replaced.__name__, replaced)
    padded_to, new_empty = recurrence.padded_to, Tensor.new_empty

    def empty(self: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        made = new_empty(self, *shape, dtype=torch.float64 if dtype == torch.float32 else dtype)
        return made.fill_(NAN) if made.is_floating_point() else made

    monkeypatch.setattr(recurrence, "padded_to", lambda x, width, dtype: padded_to(x, width, torch.float64))
    monkeypatch.setattr(Tensor, "new_empty", empty)
