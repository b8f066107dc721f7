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
import _emulated
import _formulas
from _emulated import memory_begin, noise_at, starts_again

from carrywave.kernels.hopper import recurrence
from carrywave.kernels.hopper.layout import LayerShape
from carrywave.kernels.hopper.marks import LayerMarks
from carrywave.kernels.hopper.recurrence import Dealt, Packed

NAN = float("nan")


def forward(
    shape: LayerShape,
    packed: Packed,
    hs: Tensor,
    gates: Tensor,
    cells: Tensor | None,
    first_c: Tensor,
    last_c: Tensor,
    dealt: Dealt,
    marks: LayerMarks,
) -> None:
    hs = hs.data  # as a kernel, it writes without torch's noticing
    steps, lanes = hs.shape[0] - 1, hs.shape[1]
    by_step, c = gates.view(steps, lanes, -1, 4), first_c.clone()
    for step in range(steps):
        at = _active(dealt, lanes, steps, step)
        again = starts_again(marks, at, step)
        recurrent = (hs[step, at] @ packed.w_hh_QP.t()).view(-1, shape.hidden, 4)
        a = by_step[step, at] + torch.where(again[..., None], 0.0, recurrent)
        memory = torch.where(again, memory_begin(marks, c), c[at])
        past = torch.where(again, 0.0, hs[step, at])
        h, kept, c[at] = _formulas.forward(shape.cell, noise_at(marks, step, at), a.unbind(-1), memory, past)
        hs[step + 1] = 0.0
        hs[step + 1, at] = h
        by_step[step, at] = kept
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
    marks: LayerMarks,
    of_resets: Tensor | None,
    after: Tensor | None = None,
    *,
    before: bool = False,
) -> None:
    steps, lanes = cells.shape[:2]
    dh, dc = (torch.zeros_like(first_c) if each is None else each.clone() for each in grad_last)
    by_step, past = grads.view(steps, lanes, -1, 4), torch.zeros_like(dh)
    if after is not None:
        going_on = _active(dealt, lanes, steps, steps - 1)
        dh[going_on] += torch.where(starts_again(marks, going_on, steps), 0.0, after[going_on] @ turned.t())
    bias.zero_()
    if of_resets is not None:
        of_resets.zero_()
    for step in reversed(range(steps)):
        at = _active(dealt, lanes, steps, step)
        by_step[step] = 0.0
        again = starts_again(marks, at, step)
        c_before = torch.where(again, memory_begin(marks, first_c), cells[step - 1, at] if step else first_c[at])
        a = gates.view(steps, lanes, -1, 4)[step, at].unbind(-1)
        own = dh[at] + grad_y[step, at]
        by_step[step, at], memory, left = _formulas.backward(
            shape.cell, noise_at(marks, step, at), a, c_before, cells[step, at], own, dc[at]
        )
        recurrent = by_step[step, at].flatten(1) @ turned.t()
        if of_resets is not None:
            of_resets[0] += torch.stack([torch.where(again, part, 0.0).sum(0) for part in (memory, left)], dim=-1)
        dh[at], dc[at], past[at] = (torch.where(again, 0.0, part) for part in (recurrent + left, memory, left))
        bias[0] += by_step[step].sum(0).flatten()
    if before:  # the rest of it is computed from the gate gradients, by a launch for earlier steps
        some = _active(dealt, lanes, steps, 0)
        dh[some] = past[some]
    for to, value in zip(grad_first, (dh, dc), strict=True):
        to.copy_(value)


def _active(dealt: Dealt, lanes: int, steps: int, step: int) -> list[int]:
    """The lanes that reach a step."""
    lengths = [steps] * lanes if dealt.lengths_B is None else dealt.lengths_B.tolist()
    return [lane for lane, length in enumerate(lengths) if length > step]


def replace_launches(monkeypatch: pytest.MonkeyPatch, *, blocks: bool = False) -> None:
    """`blocks`: the recurrence runs block by block, as the kernel does."""
    for name in (*_emulated.AROUND, "forward", "backward"):
        monkeypatch.setattr(recurrence, name, getattr(_emulated, name))
    for replaced in () if blocks else (forward, backward):
        monkeypatch.setattr(recurrence, replaced.__name__, replaced)
    padded_to, new_empty = recurrence.padded_to, Tensor.new_empty

    def empty(self: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        made = new_empty(self, *shape, dtype=torch.float64 if dtype == torch.float32 else dtype)
        return made.fill_(NAN) if made.is_floating_point() else made

    monkeypatch.setattr(recurrence, "padded_to", lambda x, width, dtype: padded_to(x, width, torch.float64))
    monkeypatch.setattr(Tensor, "new_empty", empty)
